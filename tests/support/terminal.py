"""A command at a terminal of 80 by 24, as a person has one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Self

from tests.support.until import wait_until

COLUMNS, LINES = 80, 24
SHOWN_S = 50.0  # less than a test has: what is shown is said
END_S = 110.0  # roles that end are started again and again before they are given up
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A command of rollfab, and all that it has written; it is killed at the end of the block."""

    def __init__(self, *words: str, url: str | None = None, cwd: Path | None = None) -> None:
        self.door, self.inside = pty.openpty()
        fcntl.ioctl(self.inside, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(self.inside)
        place = {name: value for name, value in os.environ.items() if name not in ("ROLLFAB_URL", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollfab", *words],
            stdin=self.inside,
            stdout=self.inside,
            stderr=self.inside,
            env={**place, **({} if url is None else {"ROLLFAB_URL": url}), "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            cwd=cwd,
        )
        self._written = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.door)
        os.close(self.inside)

    @property
    def text(self) -> str:
        """All of it, with what colours it and moves the cursor."""
        return self._written.decode("utf-8", "replace")

    @property
    def shown(self) -> str:
        """What a person has read so far, as one line."""
        return " ".join(CONTROL.sub("", self.text).split())

    def read(self, duration_s: float = 0.05) -> None:
        """Take in what is written within so long."""
        until_s = time.monotonic() + duration_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([self.door], [], [], left_s)[0]:
                self._written += os.read(self.door, 1 << 16)

    def until(self, wanted: str) -> str:
        """Wait until a text is shown; returns all that is."""

        def is_shown() -> bool:
            is_over = self.process.poll() is not None
            self.read()
            assert wanted in self.shown or not is_over, f"it ended without {wanted!r}: {self.shown}"
            return wanted in self.shown

        wait_until(is_shown, lambda: f"{wanted!r} in {self.shown}", SHOWN_S)
        return self.shown

    def type(self, keys: str) -> None:
        os.write(self.door, keys.encode())

    def end(self) -> int:
        """Wait until the command has ended; its exit code."""

        def is_over() -> bool:
            self.read()
            return self.process.poll() is not None

        wait_until(is_over, lambda: f"it goes on: {self.shown}", END_S)
        self.read(0.2)
        return int(self.process.returncode)
