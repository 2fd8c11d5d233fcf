"""Fuzz URLs, names, tasks and key files: python tests/fuzz/fuzz_texts.py -runs=100000. See harness.py."""

from __future__ import annotations

from harness import fuzz

if __name__ == "__main__":
    fuzz("url", "name", "tasks", "keys", "rows", "head", "versions")
