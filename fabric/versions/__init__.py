"""Versions of a run's weights: stored, made, read, and staged beside the live ones."""
