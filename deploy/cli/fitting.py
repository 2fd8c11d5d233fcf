"""Several lists in the lines of one terminal: each gets its share, and says how much of it is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...fabric.contract.text import counted
from .printing import Console


@dataclass
class Part:
    """Items of one kind. draw: shows the first of them, densely where lines are short. what: one of them, in a word."""

    what: str
    items: Sequence[Any]
    draw: Callable[[Sequence[Any], bool], Sequence[RenderableType]]
    shown: int = field(init=False)

    def __post_init__(self) -> None:
        self.shown = len(self.items)

    def drawn(self, *, is_dense: bool) -> list[RenderableType]:
        """The items shown, and how many are not."""
        rows = list(self.draw(self.items[: self.shown], is_dense)) if self.shown else []
        left = len(self.items) - self.shown
        return [*rows, *([Text(f"… and {counted(left, f'more {self.what}')}", style="dim")] if left else [])]


def fit(parts: Sequence[Part], console: Console | None) -> Group:
    """All of them, whole; or what the lines of a console hold: the longest part gives way, until all fit."""
    whole = [each for part in parts for each in part.drawn(is_dense=False)]
    if console is None or _height(whole, console) <= console.height:
        return Group(*whole)
    for part in parts:
        part.shown = min(part.shown, console.height)
    heights = [_height(part.drawn(is_dense=True), console) for part in parts]
    while sum(heights) > console.height and (longer := [at for at, part in enumerate(parts) if part.shown]):
        longest = max(longer, key=lambda at: heights[at])
        parts[longest].shown -= 1
        heights[longest] = _height(parts[longest].drawn(is_dense=True), console)
    return Group(*(each for part in parts for each in part.drawn(is_dense=True)))


def _height(drawn: Sequence[RenderableType], console: Console) -> int:
    return sum(len(console.render_lines(each, pad=False)) for each in drawn)
