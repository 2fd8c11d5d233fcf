"""Shared by all processes: records, rules, ports, the broker and its queue, and weights and their ways."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.fabric: under another name every class would exist twice")
