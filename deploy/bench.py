"""`rollfab bench …`: benches live in a clone (tests/bench), and are no part of the installed package."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ..fabric.contract.errors import InputError
from .cli.arguments import with_finite_numbers

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "benches are no part of the installed package; in a clone of rollfab: make bench BENCH=queue"


class Benches(TyperGroup):
    """The commands of tests/bench/cli.py, loaded when one of them is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._all())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._all().get(cmd_name)

    def _all(self) -> dict[str, Any]:
        if not self.commands:  # where the library looks for one of a like name
            self.commands.update(_found().commands)
        return dict(self.commands)


def _found() -> Any:
    if not (ROOT / "tests" / "bench" / "cli.py").is_file():
        raise InputError(ELSEWHERE)
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
        # Processes that a bench starts find its environments and rewards by name.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    from tests.bench.cli import app as benches

    return with_finite_numbers(typer.main.get_command(benches))


def _begin() -> None:
    """Have SIGTERM end a bench as Ctrl-C does: with its processes, and without a trace in the temporary directory."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def register(app: typer.Typer) -> None:
    """Add the benches."""
    benches = typer.Typer(cls=Benches, no_args_is_help=True)
    benches.callback()(_begin)
    app.add_typer(benches, name="bench", help="Measure, with baselines in the same run.")
