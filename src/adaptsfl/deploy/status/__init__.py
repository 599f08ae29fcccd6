"""How a running edge server is, for people and for Prometheus."""
