"""Runs child processes, one per role: starts, watches and restarts them, and never leaves one behind.

- A child that dies is started again after a pause that doubles while it keeps dying. With `lives_max` it is given up
  after so many lives in a row that came to nothing, and at once if it says that it is used wrongly.
- Children die with the supervisor: they are asked to stop, then killed; and each watches its parent (follow_parent).
- Their output goes to one log file per role; the last lines are shown when one fails. What is longer than LOG_BYTES_MAX
  is moved to another file, in place of the one before: a role's logs take twice that. Lines that are written during the
  move may be lost: without a pipe between, a child never waits for us, and its last words outlive us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...fabric.host.directories import owner_only
from ..cli.logs import plain_lines

STOP_TIMEOUT_S = 8.0
PAUSE_S_MAX = 10.0
LAST_WORDS_LINE_COUNT = 5
LOG_BYTES_MAX = 16 << 20
LOG_LOOK_S = 1.0
OLDER = ".1"  # ends the name of a log's older part
WRONG_USAGE = 2  # exit code of a role that no other start would help


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
    """The size of its log when this life began."""
    pause_s: float = 0.25
    exit_code: int | None = None
    """The exit code of its last end."""
    last_words: str = ""
    """The last words printed before that end, and nothing of an earlier life."""
    is_ready: bool = False
    """Whether somebody has seen this life do its work; set from outside."""
    lost_lives: int = 0
    """Lives in a row that came to nothing."""
    is_given_up: bool = False
    is_mourned: bool = False
    """Whether that end was reported."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """True if the process is alive."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self.process.pid if self.process is not None and self.is_running else None

    def start(self) -> None:
        """Start the process; its output is appended to the log."""
        self.start_count += 1
        self.is_mourned = self.is_ready = False
        self.start_at_s = time.monotonic()
        with open(self.log_path, "ab", opener=owner_only) as output:
            self.start_at_byte = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollfab", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ROLLFAB_PARENT": str(os.getpid()), **self.environment},
                process_group=0,  # an interrupt from the terminal reaches us alone; we stop children in order
            )

    def mourn(self) -> None:
        """Take down how the process ended."""
        assert self.process is not None
        self.exit_code, self.is_mourned = self.process.returncode, True
        self.last_words = self.tail(LAST_WORDS_LINE_COUNT, since_byte=self.start_at_byte)
        lived_s = time.monotonic() - self.start_at_s
        self.pause_s = 0.25 if lived_s > PAUSE_S_MAX else min(self.pause_s * 2, PAUSE_S_MAX)
        is_lost = not self.is_ready or (self.exit_code >= 0 and lived_s <= PAUSE_S_MAX)
        self.lost_lives = self.lost_lives + 1 if is_lost else 0

    def end(self, number: int) -> None:
        """Send its whole process group a signal: an engine's own processes too."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def tail(self, line_count: int = 12, *, since_byte: int = 0) -> str:
        """Return the last lines of its log that are for people."""
        if not self.log_path.exists():
            return ""
        text = self.log_path.read_bytes()[since_byte:].decode("utf-8", "replace")
        return "\n".join(plain_lines(text)[-line_count:])


class Supervisor:
    """Starts roles and keeps them running."""

    def __init__(self, log_directory: Path, *, lives_max: int | None = None) -> None:
        """lives_max: after so many lives in a row that came to nothing a child is given up; None: never."""
        self.lives_max = lives_max
        self.log_directory = log_directory
        self.children: dict[str, Child] = {}
        self._logs_looked_at_s = 0.0
        log_directory.mkdir(mode=0o700, parents=True, exist_ok=True)

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
        """Start again what has died and is not given up; returns the children found dead since the last call."""
        self._bound_logs()
        died: list[Child] = []
        for child in self.children.values():
            if child.is_running or child.process is None:
                continue
            if not child.is_mourned:
                child.mourn()
                died.append(child)
                if self.lives_max is not None:
                    child.is_given_up = child.exit_code == WRONG_USAGE or child.lost_lives >= self.lives_max
            is_due = time.monotonic() - child.start_at_s >= child.pause_s
            if child.is_restarted and is_due and not child.is_given_up:
                child.start()
        return died

    def _bound_logs(self) -> None:
        """Move what is long out of the way of who writes: they append, and go on at the new end."""
        if time.monotonic() < self._logs_looked_at_s + LOG_LOOK_S:
            return
        self._logs_looked_at_s = time.monotonic()
        for path in self.log_directory.glob("*.log"):
            with contextlib.suppress(OSError):  # a full disk keeps nobody from watching roles
                if path.stat().st_size >= LOG_BYTES_MAX:
                    older = path.with_name(path.name + OLDER)
                    shutil.copyfile(path, older)
                    older.chmod(0o600)
                    os.truncate(path, 0)
                    for child in self.children.values():
                        child.start_at_byte = 0 if child.log_path == path else child.start_at_byte

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
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.1, deadline_s - time.monotonic()))
        self.kill_all()
        for child in running:
            assert child.process is not None
            child.process.wait()

    def kill_all(self) -> None:
        """SIGKILL whoever runs, with the processes that it started itself."""
        for child in self.children.values():
            if child.is_running:
                child.end(signal.SIGKILL)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


# ---------------------------------------------------------------- child
#
# A role that was started by a supervisor ends when the supervisor is gone, even if that was killed.
#
# The child polls its parent's pid: portable, and unlike a parent-death signal not tied to the thread that forked.


CHECK_S = 0.5


def follow_parent(parent_pid: int) -> None:
    """Send ourselves SIGTERM once `parent_pid` is no longer our parent, and SIGKILL if that does not end us."""
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            never.wait(CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)
        never.wait(5.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
