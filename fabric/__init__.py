"""The contract and the queue: what travels, the rules, and every port on Redis and in memory."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.fabric: a bare `import fabric` would make a second copy of every class")
