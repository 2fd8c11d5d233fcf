"""`python -m rollfab` is the `rollfab` command."""

from .commands.cli import main

if __name__ == "__main__":
    main()
