"""Weights as stored bits: layout, codec and manifest. numpy, zstandard and xxhash only."""
