"""Our side of the pipe to the peers: start each in a process of its own, ask for rounds, end it.

- A peer that cannot run costs its own row: the reason is said, the bench goes on.
- arq needs redis < 6 and so its own environment: `.venv-arq` beside ours (`make bench` makes it), else one under the
  user's cache directory, made here when that is allowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

PACKAGE = Path(__file__).parent
ARQ_REQUIREMENT = "arq>=0.26,<1"
START_TIMEOUT_S = 20.0
ROUND_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 180.0
PROGRAM = """
import importlib, sys
sys.path.append(sys.argv[1])  # last, so that the peer's own packages come first
importlib.import_module(sys.argv[2]).main(sys.argv[3])
"""


class PeerFailed(Exception):
    """A peer cannot be measured; the text says why."""


class Peer:
    """One peer's process."""

    def __init__(self, name: str, interpreter: Path, url: str) -> None:
        self.name = name
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop()
        module = f"{PACKAGE.name}.with_{name}"
        self._process = subprocess.Popen(
            [str(interpreter), "-c", PROGRAM, str(PACKAGE.parent), module, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self._read(START_TIMEOUT_S)
        except PeerFailed:
            self.stop()
            raise

    def round(self, job_count: int) -> float:
        """Jobs per second of one round.

        Raises:
            PeerFailed: it ended, hung, or lost jobs.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps({"job_count": job_count}), file=self._process.stdin, flush=True)
        except OSError as error:
            raise PeerFailed(self._last_words()) from error
        answer = self._read(ROUND_TIMEOUT_S)
        if answer["done_count"] != job_count:
            raise PeerFailed(f"did {answer['done_count']} of {job_count} jobs")
        return job_count / float(answer["duration_s"])

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            raise PeerFailed(f"no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"ended with exit code {self._process.returncode}"

    def stop(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def start_peers(names: Sequence[str], url: str, *, may_install: bool) -> tuple[dict[str, Peer], dict[str, str]]:
    """Peers that run, and for the others why not."""
    running: dict[str, Peer] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            running[name] = Peer(name, _interpreter(name, may_install=may_install), url)
        except PeerFailed as error:
            reasons[name] = f"not run: {error}"
    return running, reasons


def _interpreter(name: str, *, may_install: bool) -> Path:
    if name != "arq":
        return Path(sys.executable)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollfab" / "bench-arq"
    for environment in (Path(sys.prefix).parent / ".venv-arq", cache):
        if (environment / ".done").exists():
            return environment / "bin" / "python"
    if not may_install:
        raise PeerFailed("it needs an environment of its own: run once without --quick, or `make bench`")
    return _install(cache)


def _install(environment: Path) -> Path:
    python = environment / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", ARQ_REQUIREMENT],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            words = (error.stderr or error.stdout or "").strip().splitlines()
            raise PeerFailed(f"its environment could not be made: {words[-1] if words else error}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(f"its environment could not be made: {error}") from error
    (environment / ".done").touch()
    return python
