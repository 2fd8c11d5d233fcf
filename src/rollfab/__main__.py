"""The `rollfab` command, also as `python -m rollfab`: an interrupt, whenever it comes, ends it without a traceback."""

from __future__ import annotations

from .deploy.cli.exits import ending_by_interrupt, leaving_at_once


def main() -> None:
    """Entry point: load the commands, and run the one that was typed."""
    with ending_by_interrupt():
        with leaving_at_once():
            from .deploy import main as cli
        cli.main()


if __name__ == "__main__":
    main()
