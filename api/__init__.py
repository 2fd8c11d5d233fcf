"""The HTTP face: status, metrics, live page."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.api: under another name every class would exist twice")
