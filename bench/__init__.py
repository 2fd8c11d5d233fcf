"""Benchmarks that measure themselves and their baselines in one run."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.bench: under another name every class would exist twice")
