"""Real devices, one edge server and one fed server, over the network."""
