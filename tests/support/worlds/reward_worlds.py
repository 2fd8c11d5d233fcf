"""Reward functions that do whatever a function can do wrong; a task's "fault" says what, and without one they are well.

A reward worker reaches them by `--reward NAME=tests.support.worlds.reward_worlds:name`.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollfab.fabric.contract.records import Rollout
from tests.support.worlds import curious_worlds


def well(task: dict[str, Any], rollout: Rollout) -> float:
    """A reward that uses the arrays as arrays."""
    assert isinstance(rollout.logprobs, np.ndarray)
    assert rollout.completion_mask.dtype == np.uint8
    return float(rollout.completion_mask.sum() + len(rollout.spans))


async def patient(task: dict[str, Any], rollout: Rollout) -> float:
    """An async function is awaited."""
    await asyncio.sleep(0.001)
    return well(task, rollout)


def slow(task: dict[str, Any], rollout: Rollout) -> float:
    """Slow enough to be killed in; leaves a line for every call that came to an end."""
    time.sleep(0.15)
    with Path(task["ends"]).open("a") as lines:
        lines.write(f"{rollout.trajectory_id}\n")
    return well(task, rollout)


def bad(task: dict[str, Any], rollout: Rollout) -> Any:
    """Does what the task's fault says."""
    fault = task.get("fault")
    if fault == "looks":
        return curious_worlds.score(task, rollout)
    return well(task, rollout) if fault is None else FAULTS[fault]()


def spin() -> None:
    while True:
        pass


def hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock, so no thread runs


def ignore_all_signals() -> None:
    for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    spin()


def fill_memory() -> None:
    held = []
    while True:
        held.append(bytes(8 << 20))  # not written to: on a busy machine that takes longer than a reward may


def print_for_ever() -> None:
    while True:
        print("x" * 1000)


def start_threads() -> float:
    for _ in range(40):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return 1.0


def start_processes() -> float:
    for _ in range(50):
        subprocess.Popen(["/bin/sleep", "1000"])
    return 1.0


class Evil(float):
    """A number that is none."""

    def __float__(self) -> float:
        raise RuntimeError("no")


FAULTS = {
    "spins": spin,
    "holds the lock": hold_the_lock,
    "ignores signals": ignore_all_signals,
    "os._exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "segfault": lambda: ctypes.string_at(0),
    "kills its group": lambda: os.killpg(os.getpgrp(), signal.SIGKILL),
    "closes everything": lambda: os.closerange(0, 64),
    "fills memory": fill_memory,
    "prints for ever": print_for_ever,
    "threads": start_threads,
    "processes": start_processes,
    "huge text": lambda: "x" * (4 << 20),
    "huge list": lambda: [0.0] * 200_000,
    "huge number": lambda: 10**400,
    "NaN": lambda: math.nan,
    "None": lambda: None,
    "array": lambda: np.zeros(2),
    "evil": Evil,
    "raises": lambda: 1 / 0,
    "recursion": lambda: FAULTS["recursion"](),
    "interrupts": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
}


# ---- not reward functions

number = 3


class Scorer:
    """Its instances may be called; it is none."""

    def __call__(self, task: dict[str, Any], rollout: Rollout) -> float:
        return 1.0


scorer = Scorer()


def too_few(task: dict[str, Any]) -> float:
    return 1.0


def too_many(task: dict[str, Any], rollout: Rollout, scale: float) -> float:
    return scale


def by_name_only(*, task: dict[str, Any], rollout: Rollout) -> float:
    return 1.0


def with_default(task: dict[str, Any], rollout: Rollout, scale: float = 1.0, **more: Any) -> float:
    return scale


def generator(task: dict[str, Any], rollout: Rollout) -> Iterator[float]:
    yield 1.0
