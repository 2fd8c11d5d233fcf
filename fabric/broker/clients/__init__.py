"""Clients of every kind of broker: one server, a cluster; their connections, patience and errors."""
