"""The contract and the queue: what travels, the rules, and every port on Redis and in memory."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.fabric: under another name every class would exist twice")
