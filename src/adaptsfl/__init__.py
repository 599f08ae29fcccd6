"""AdaptSFL: split federated learning that plans its own cuts and its own aggregation interval."""

__version__ = "0.1.0"
