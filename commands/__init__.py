"""The command line, and the processes it starts."""

if not __name__.startswith("rollfab."):
    raise ImportError(
        "import this room as rollfab.commands: a bare `import commands` would make a second copy of every class"
    )
