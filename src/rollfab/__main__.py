"""The `rollfab` command, also as `python -m rollfab`: an interrupt while it loads ends it without a word."""

from __future__ import annotations

from .deploy.cli.exits import leaving_at_once


def main() -> None:
    """Entry point: load the commands, and run the one that was typed."""
    with leaving_at_once():
        from .deploy import main as cli

    cli.main()


if __name__ == "__main__":
    main()
