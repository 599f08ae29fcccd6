"""Real devices and servers over the network."""
