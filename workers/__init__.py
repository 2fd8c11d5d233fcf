"""Processes that do the work: agent, rollout and reward workers, engines, environments."""

if not __name__.startswith("rollfab."):
    raise ImportError(
        "import this room as rollfab.workers: a bare `import workers` would make a second copy of every class"
    )
