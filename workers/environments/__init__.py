"""Environments: what a trajectory acts in, and how one is found by name."""
