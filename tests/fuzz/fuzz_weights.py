"""Fuzz manifests, chunks, blocks and layouts: python tests/fuzz/fuzz_weights.py -runs=100000. See harness.py."""

from __future__ import annotations

from harness import fuzz

if __name__ == "__main__":
    fuzz("manifest", "chunk", "block", "layout")
