"""An object in a process of its own, called over a pipe.

- It is made there, so that this process imports nothing that it needs, and never shares an interpreter with it.
- Its output, and that of its children, goes to a log; an error there is an error here, with the log's last lines.
- It ends with its owner, however that ended: the pipe breaks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollfab.fabric.contract.errors import FabricError

END_S = 15.0
TAIL_LINES = 12


class Remote:
    """`make(*arguments)`, a context manager, entered in another process. Must be importable and pickle."""

    def __init__(
        self, name: str, log_path: Path, make: Callable[..., AbstractContextManager[Any]], *arguments: Any
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._log_path = log_path
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(log_path), make, arguments), name=name)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def ready(self, timeout_s: float) -> None:
        """Wait until it is entered. Raises FabricError."""
        self._answer("start", timeout_s)

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call it and wait.

        Raises:
            FabricError: it raised, ended, or took too long.
        """
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise FabricError(f"{self._name} has ended{self._tail()}") from error
        return self._answer(method, timeout_s)

    def _answer(self, what: str, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise FabricError(f"{self._name}: {what} took longer than {timeout_s:.0f} s{self._tail()}")
            is_good, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise FabricError(f"{self._name} ended during {what}{self._tail()}") from error
        if not is_good:
            raise FabricError(f"{self._name}: {what} failed: {answer}{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines = self._log_path.read_text("utf-8", "replace").splitlines() if self._log_path.exists() else []
        return "; its last lines:\n" + "\n".join(lines[-TAIL_LINES:]) if lines else ""

    def close(self) -> None:
        """Leave it and wait until its process has ended."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, log_path: str, make: Callable[..., AbstractContextManager[Any]], arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is the owner's, who then closes the pipe
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        with make(*arguments) as made:
            pipe.send((True, None))
            while True:
                method, given = pipe.recv()
                pipe.send((True, getattr(made, method)(*given)))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # noqa: BLE001  the top of a process: its owner is told
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}"))
