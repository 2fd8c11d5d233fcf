"""Reads the broker once for all who ask, and makes the api's models of it."""
