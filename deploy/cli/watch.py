"""Shows a picture that changes, longer than the screen if need be: on a screen of its own, moved through by keys.

- The terminal is as before afterwards, whatever ends it but SIGKILL: its screen, its cursor, its echo.
- A look that fails changes nothing of the picture, and is said below it; the next one may go well.
- Without a terminal each picture is printed after the other.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from ...fabric.contract.errors import FabricError
from ...fabric.contract.text import one_line
from ...fabric.host.command import with_commands
from ...fabric.host.helpers import Helpers
from .printing import Console

LOOK_S = 1.0
KEYS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
ENDING = (b"q", b"Q")
MOVES = {  # lines, pages, all
    b"k": (-1, 0), b"\x1b[A": (-1, 0), b"\x1bOA": (-1, 0), b"j": (1, 0), b"\x1b[B": (1, 0), b"\x1bOB": (1, 0),
    b"b": (0, -1), b"\x1b[5~": (0, -1), b" ": (0, 1), b"f": (0, 1), b"\x1b[6~": (0, 1),
    b"g": (0, -1 << 20), b"\x1b[H": (0, -1 << 20), b"\x1bOH": (0, -1 << 20), b"\x1b[1~": (0, -1 << 20),
    b"G": (0, 1 << 20), b"\x1b[F": (0, 1 << 20), b"\x1bOF": (0, 1 << 20), b"\x1b[4~": (0, 1 << 20),
}  # fmt: skip

Look = Callable[[Console], Awaitable[RenderableType]]


@dataclass
class Place:
    """Which lines of a picture a screen shows."""

    first: int = 0

    def move(self, key: bytes, line_count: int, page: int) -> None:
        """Follow a key; others move nothing."""
        lines, pages = MOVES.get(key, (0, 0))
        self.first = max(0, min(self.first + lines + pages * page, line_count - page))


async def watch(look: Look, console: Console) -> None:
    """Look once a second and show what is seen, until `q`, Ctrl-C, or a signal that ends processes.

    Raises:
        FabricError: the first look failed.
    """
    picture = await look(console)
    if not console.is_terminal:
        while True:
            console.print(picture, soft_wrap=True)
            await asyncio.sleep(LOOK_S)
            picture = await look(console)
    screen = _Screen(look, console, picture)
    with _keys(screen.press), Live(console=console, screen=True, auto_refresh=False) as live:
        await screen.show(live)


class _Screen:
    """One picture, where it is looked at, and why the last look failed."""

    def __init__(self, look: Look, console: Console, picture: RenderableType) -> None:
        self._look = look
        self._console = console
        self._picture = picture
        self._place = Place()
        self._trouble = ""
        self._is_over = False
        self._changed = asyncio.Event()

    def press(self, typed: bytes) -> None:
        """Follow keys; none at all: the terminal is gone."""
        for key in KEYS.findall(typed):
            self._place.move(key, len(self._lines()), self._page)
        self._is_over |= not typed or any(key in ENDING for key in KEYS.findall(typed))
        self._changed.set()

    async def show(self, live: Live) -> None:
        """Draw whenever something is new, until it is over."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.press, b"")
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        async with Helpers(self._follow()):
            while not self._is_over:
                self._changed.clear()
                live.update(self._drawn(), refresh=True)
                await self._changed.wait()

    async def _follow(self) -> None:
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    self._picture, self._trouble = await self._look(self._console), ""
                except FabricError as error:
                    self._trouble = one_line(with_commands(str(error)))
                self._changed.set()
        finally:  # whatever nobody foresaw is raised by the one who waits
            self._is_over = True
            self._changed.set()

    @property
    def _page(self) -> int:
        return max(1, self._console.height - max(1, len(self._notes())))

    def _notes(self) -> list[list[Segment]]:
        """Lines below the picture that say why the last look failed, and what to do."""
        if not self._trouble:
            return []
        return self._console.render_lines(Text(self._trouble, style="red"), pad=False)[: self._console.height // 2]

    def _lines(self) -> list[list[Segment]]:
        return self._console.render_lines(self._picture, pad=False)

    def _drawn(self) -> Group:
        lines = self._lines()
        self._place.move(b"", len(lines), self._page)  # it may have become shorter
        first = self._place.first
        shown = lines[first : first + self._page]
        blank = [Segment.line()] * (self._page - len(shown))
        above = Segments([each for line in shown for each in (*line, Segment.line())] + blank)
        if notes := self._notes():
            between = [each for line in notes for each in (Segment.line(), *line)][1:]
            return Group(above, Segments(between))
        rest = f"lines {first + 1} to {first + len(shown)} of {len(lines)}: arrows, PgUp, PgDn, g, G; "
        below = Text(f"{rest if len(shown) < len(lines) else ''}q ends", style="dim")
        below.no_wrap, below.overflow, below.end = True, "ellipsis", ""
        return Group(above, below)


@contextmanager
def _keys(press: Callable[[bytes], None]) -> Iterator[None]:
    """Call `press` with what is typed, as soon as it is, and without an echo; the terminal is as before afterwards."""
    import os
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    door = sys.stdin.fileno()
    before, loop = termios.tcgetattr(door), asyncio.get_running_loop()
    try:
        tty.setcbreak(door, termios.TCSANOW)
        now = termios.tcgetattr(door)
        now[6][termios.VSUSP] = b"\0"  # stopped by Ctrl-Z, it would leave its screen behind
        termios.tcsetattr(door, termios.TCSANOW, now)
        loop.add_reader(door, lambda: press(os.read(door, 1024)))
        yield
    finally:
        loop.remove_reader(door)
        termios.tcsetattr(door, termios.TCSADRAIN, before)
