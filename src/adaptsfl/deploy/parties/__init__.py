"""The processes of a deployment: edge server, fed server and devices."""
