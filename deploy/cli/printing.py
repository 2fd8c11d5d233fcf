"""Prints to a terminal or pipe: what comes from the broker was written by anybody, and moves no cursor here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from ...fabric.contract.text import HARMFUL, printable
from ...fabric.contract.wire import dump_json

SPARKS = "▁▂▃▄▅▆▇█"


class Console(rich.console.Console):
    """Rich's, whose own control sequences alone reach the terminal."""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as the library does, with every text made printable."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or not HARMFUL.search(segment.text)
            yield segment if is_plain else Segment(printable(segment.text), segment.style)


def show(text: str, *, flush: bool = False) -> None:
    """Print text as it is, but for what is harmful in it."""
    print(printable(text), flush=flush)


def show_json(value: Any, *, flush: bool = False) -> None:
    """Print plain values as one line of JSON; what is harmful in texts stands as the escapes of JSON."""
    escaped = HARMFUL.sub(lambda found: f"\\u{ord(found.group()):04x}", dump_json(value).decode())
    print(escaped, flush=flush)


def spark(values: list[float], width: int = 72) -> str:
    """Draw values as a row of block characters, scaled from 0 (or below) to 1."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    recent = values[-width:]
    return "".join(SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in recent)
