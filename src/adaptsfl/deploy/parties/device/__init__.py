"""A device: its data, and its side of the protocol."""
