"""Everything that starts processes: the command line, the roles, a fabric on one machine, and replay."""

if not __name__.startswith("rollfab."):
    raise ImportError(
        "import this room as rollfab.deploy: a bare `import deploy` would make a second copy of every class"
    )
