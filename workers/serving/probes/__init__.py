"""Seeing what a serving engine does."""
