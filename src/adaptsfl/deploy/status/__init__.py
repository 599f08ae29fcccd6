"""The status of a running edge server, for people and for Prometheus."""
