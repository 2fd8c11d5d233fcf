"""Weights as stored bits: layout, codec, manifest, chain and staging. numpy, zstandard and xxhash only."""
