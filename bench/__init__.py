"""Benchmarks that measure themselves and their baselines in one run."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.bench: a bare `import bench` would make a second copy of every class")
