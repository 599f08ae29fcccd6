"""The fed server, and the calls of it."""
