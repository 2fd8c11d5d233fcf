"""Finds out what this machine has of what the roles need."""
