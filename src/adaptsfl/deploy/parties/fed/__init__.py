"""The fed server, and the client that calls it."""
