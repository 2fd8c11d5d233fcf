"""The status as Prometheus metrics."""
