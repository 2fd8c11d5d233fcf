"""Child processes, one per role: started, watched, restarted, and never left behind.

- A child that dies is started again after a pause that doubles while it keeps dying.
- Children die with the supervisor: they are asked to stop, then killed; and each watches its parent (see child.py).
- Their output goes to one log file per role; the last lines are shown when one fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOP_TIMEOUT_S = 8.0
PAUSE_S_MAX = 10.0
LAST_WORDS_LINE_COUNT = 5


@dataclass
class Child:
    """One role's process and its history."""

    name: str
    arguments: Sequence[str]
    log_path: Path
    is_restarted: bool = True
    process: subprocess.Popen[bytes] | None = None
    start_count: int = 0
    start_at_s: float = 0.0
    start_at_byte: int = 0
    """Of its log."""
    pause_s: float = 0.25
    exit_code: int | None = None
    """Of its last end."""
    last_words: str = ""
    """What it printed last before that end, and nothing of an earlier life."""
    is_mourned: bool = False
    """Whether that end was reported."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self.process.pid if self.process is not None and self.is_running else None

    def start(self) -> None:
        """Start the process; its output is appended to the log."""
        self.start_count += 1
        self.is_mourned = False
        self.start_at_s = time.monotonic()
        with self.log_path.open("ab") as output:
            self.start_at_byte = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollfab", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ROLLFAB_PARENT": str(os.getpid()), **self.environment},
                process_group=0,  # an interrupt from the terminal reaches us alone; we stop children in order
            )

    def tail(self, line_count: int = 12, *, since_byte: int = 0) -> str:
        """The last lines of its log."""
        if not self.log_path.exists():
            return ""
        text = self.log_path.read_bytes()[since_byte:].decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-line_count:])


class Supervisor:
    """Starts roles and keeps them running."""

    def __init__(self, log_directory: Path) -> None:
        self.log_directory = log_directory
        self.children: dict[str, Child] = {}
        log_directory.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        is_restarted: bool = True,
        environment: dict[str, str] | None = None,
    ) -> Child:
        """Start a role under a name of its own."""
        child = Child(
            name=name,
            arguments=arguments,
            log_path=self.log_directory / f"{name}.log",
            is_restarted=is_restarted,
            environment=environment or {},
        )
        self.children[name] = child
        child.start()
        return child

    def watch(self) -> list[Child]:
        """Start again what has died; returns the children found dead since the last call."""
        died: list[Child] = []
        for child in self.children.values():
            if child.is_running or child.process is None:
                continue
            code = child.process.returncode
            if not child.is_mourned:
                child.exit_code, child.is_mourned = code, True
                child.last_words = child.tail(LAST_WORDS_LINE_COUNT, since_byte=child.start_at_byte)
                died.append(child)
                lived_s = time.monotonic() - child.start_at_s
                child.pause_s = 0.25 if lived_s > PAUSE_S_MAX else min(child.pause_s * 2, PAUSE_S_MAX)
            is_due = time.monotonic() - child.start_at_s >= child.pause_s
            if child.is_restarted and is_due:
                child.start()
        return died

    def kill(self, name: str) -> int:
        """SIGKILL a child, as a crash would; returns the pid it had."""
        child = self.children[name]
        assert child.process is not None
        child.process.send_signal(signal.SIGKILL)
        child.process.wait()
        return child.process.pid

    def stop(self) -> None:
        """Ask all to stop, then kill what is left; in reverse order of starting."""
        running = [child for child in reversed(self.children.values()) if child.is_running]
        for child in running:
            assert child.process is not None
            child.process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for child in running:
            assert child.process is not None
            try:
                child.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
