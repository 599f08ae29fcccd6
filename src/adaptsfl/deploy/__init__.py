"""Real devices, an edge server and a fed server over the network."""
