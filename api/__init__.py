"""The HTTP face: status, metrics, live page."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.api: a bare `import api` would make a second copy of every class")
