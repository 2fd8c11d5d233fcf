"""Environments with a process of their own, which do in it whatever a process can do wrong. Standard library only.

An agent reaches them by `--environment NAME=tests.support.worlds.isolated_worlds:Captive`, which asks for the
isolation itself, or by `NAME=PYTHON:tests.support.worlds.isolated_worlds:Captive`. A task's "marks" is a directory
where each process leaves a file.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from types import SimpleNamespace
from typing import Any

PROCESS = uuid.uuid4().hex  # of this process alone: its own number may be the same in every namespace
CHILD = [sys.executable, "-c", "import time; time.sleep(1000)"]
DAEMON = [sys.executable, "-c", "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"]


class Captive:
    """Says what its task's "fault" or its action tells it to; without one it ends well after two turns."""

    isolation = "process"
    sampling = {"max_tokens": 1}  # noqa: RUF012
    turn_count_max = 20
    recovery = "snapshot"

    def __init__(self, turns: int = 2, pace_s: float = 0.0) -> None:
        self._turns = turns
        self._pace_s = pace_s
        self._turn = 0
        self._fault = ""
        self._kept: Any = None

    async def reset(self, task: dict[str, Any], seed: int) -> SimpleNamespace:
        self._fault = task.get("fault", "")
        if "marks" in task:
            os.close(os.open(f"{task['marks']}/{PROCESS}", os.O_CREAT))
        return SimpleNamespace(text="?", info={"process": PROCESS})

    async def step(self, action: str) -> Any:
        self._turn += 1
        await asyncio.sleep(self._pace_s)
        is_last = self._turn >= self._turns
        fault = action if hasattr(self, "do_" + action) else self._fault if is_last else ""
        return getattr(self, "do_" + fault)() if fault else said("" if is_last else ".", is_over=is_last)

    async def snapshot(self) -> dict[str, Any]:
        return {"turn": self._turn, "kept": self._kept}

    async def restore(self, snapshot: dict[str, Any]) -> None:
        self._turn = snapshot["turn"]

    # ---- hangs

    def do_spin(self) -> None:
        while True:
            pass

    def do_spin_in_c(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock for longer than anybody waits

    def do_sleep(self) -> None:
        print("going to sleep")
        time.sleep(1000)

    def do_stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_leave_child(self) -> None:
        subprocess.Popen(CHILD)
        self.do_sleep()

    def do_leave_daemon(self) -> None:
        subprocess.run(DAEMON, check=True)  # in a session of its own, its parent gone
        self.do_sleep()

    # ---- crashes

    def do_segfault(self) -> None:
        print("about to read address 0")
        ctypes.string_at(0)

    def do_exit(self) -> None:
        print("leaving")
        os._exit(7)

    def do_be_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out

    # ---- odd answers

    def do_raise(self) -> None:
        raise ValueError("no such move")

    def do_leave(self) -> None:
        raise SystemExit(3)

    def do_keep_much(self) -> SimpleNamespace:
        self._kept = "x" * (9 << 20)
        return said("")

    def do_keep_strange(self) -> SimpleNamespace:
        self._kept = {1, 2}
        return said("")

    def do_say_nothing(self) -> None:
        return None

    def do_print(self) -> SimpleNamespace:
        print("line\n" * 20_000)
        os.write(1, b"\x00\x00\x00\x02{}")
        return said("printed")

    def do_tell_hash(self) -> SimpleNamespace:
        return said(str(hash("a word")))

    def do_tell_path(self) -> SimpleNamespace:
        return said("\n".join(sys.path))


class OnlyOnce(Captive):
    """Its processes serve one episode each."""

    episode_count_max = 1


class Frugal(Captive):
    """May have little memory."""

    memory_bytes_max = 256 << 20

    def do_fill_memory(self) -> SimpleNamespace:
        return said(str(len(bytearray(512 << 20))))


class Walker:
    """A plain synchronous world, in the way of Gymnasium."""

    isolation = "process"
    turn_count_max = 3

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._at = seed
        return str(self._at), {"process": PROCESS}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._at += 1
        return str(self._at), 0.5, self._at >= 3, False, {}


def said(text: str, reward: Any = 0.5, is_over: bool = False) -> SimpleNamespace:
    """What a step brings, without rollfab's own class for it."""
    return SimpleNamespace(text=text, reward=reward, terminated=is_over, truncated=False, info={"process": PROCESS})
