"""Sharing a device: memory, and who computes first."""
