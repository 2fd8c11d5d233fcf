"""The trainer's side: submit, groups, publish."""

if not __name__.startswith("rollfab."):
    raise ImportError("import this room as rollfab.trainer: a bare `import trainer` would make a second copy of every class")
