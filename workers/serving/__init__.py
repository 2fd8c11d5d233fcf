"""Sharing a device with a serving engine: seeing it (probes), and keeping its promises (the guard)."""
