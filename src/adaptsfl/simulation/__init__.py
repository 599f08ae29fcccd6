"""Training over a simulated fleet: policy × engine × virtual clock, recorded block by block."""
