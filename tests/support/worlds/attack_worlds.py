"""Environments of a bad neighbour, each attack by its name, and of the good ones beside it. Standard library only.

Agents reach them by `--environment NAME=tests.support.worlds.attack_worlds:Attacker`. A task's "attack" says what is
done, its "at" whether at the reset or at the first step.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any

from tests.support.worlds.curious_worlds import look

MIB = 1 << 20


class OddError(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OddKey:
    """A key that cannot be written."""

    def __str__(self) -> str:
        raise RuntimeError("no key")

    __repr__ = __str__


class OddInfo(dict[str, Any]):
    """Cannot be walked through."""

    def keys(self) -> Any:
        raise RuntimeError("no keys")

    items = __iter__ = keys  # type: ignore[assignment]


class Attacker:
    """Does what its task's "attack" says."""

    sampling = {"max_tokens": 1}  # noqa: RUF012
    turn_count_max = 4

    def __init__(self) -> None:
        self._attack, self._at, self._task = "", "step", dict[str, Any]()
        self._ends = False

    async def reset(self, task: dict[str, Any], seed: int) -> Any:
        self._attack, self._at, self._task = task.get("attack", ""), task.get("at", "step"), task
        return self._answer("reset", "?")

    async def step(self, action: str) -> Any:
        return self._answer("step", "")

    def _answer(self, where: str, text: str) -> Any:
        answer = SimpleNamespace(text=text, reward=1.0, terminated=where == "step", truncated=False, info={})
        if self._attack and self._at == where:
            getattr(self, "do_" + self._attack)(answer)
        return answer

    # ---- too much

    def do_large_info(self, answer: Any) -> None:
        answer.info = {"log": "x" * (80 * MIB)}

    def do_large_text(self, answer: Any) -> None:
        answer.text = "word " * MIB

    def do_many_strings(self, answer: Any) -> None:
        answer.info = {f"k{index}": "" for index in range(MIB // 4)}

    def do_deep(self, answer: Any) -> None:
        value: list[Any] = []
        for _ in range(100_000):
            value = [value]
        answer.info = {"deep": value}

    def do_circle(self, answer: Any) -> None:
        answer.info = {"again": answer.info}
        answer.info["again"]["again"] = answer.info

    def do_large_number(self, answer: Any) -> None:
        answer.info = {"number": 10**100_000}

    def do_large_reward(self, answer: Any) -> None:
        answer.reward = 10**400

    def do_long_reward(self, answer: Any) -> None:
        answer.reward = "x" * (20 * MIB)

    def do_long_error(self, answer: Any) -> None:
        raise ValueError("x" * (80 * MIB))

    # ---- odd

    def do_odd_error(self, answer: Any) -> None:
        raise OddError

    def do_odd_keys(self, answer: Any) -> None:
        answer.info = {OddKey(): 1}

    def do_odd_info(self, answer: Any) -> None:
        answer.info = OddInfo(a=1)

    def do_surrogate_text(self, answer: Any) -> None:
        answer.text, answer.terminated = "\ud800", False

    def do_surrogate_info(self, answer: Any) -> None:
        answer.info = {"name": "\udfff"}

    # ---- the process

    def do_hang(self, answer: Any) -> None:
        time.sleep(1000)

    def do_spin(self, answer: Any) -> None:
        while True:
            pass

    def do_spin_in_c(self, answer: Any) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")

    def do_exit(self, answer: Any) -> None:
        os._exit(3)

    def do_exit_later(self, answer: Any) -> None:
        if self._ends:
            time.sleep(1000)  # a fast engine asks for all steps there may be before this process has ended
        self._ends = True
        threading.Timer(0.05, os._exit, [4]).start()
        answer.terminated = False

    def do_segfault(self, answer: Any) -> None:
        ctypes.string_at(0)

    def do_fill_memory(self, answer: Any) -> None:
        held = []
        while True:
            held.append(bytearray(64 * MIB))

    def do_print(self, answer: Any) -> None:
        while True:
            print("x" * 65536)

    # ---- for secrets

    def do_look(self, answer: Any) -> None:
        answer.info = {"found": look(self._task)}

    # ---- the channel

    def do_lie(self, answer: Any) -> None:
        _write(struct.pack(">I", 0xFFFFFFFF) + b"x" * MIB)

    def do_bomb(self, answer: Any) -> None:
        data = json.dumps({"answer": [[]] * (MIB // 4)}).encode()
        _write(struct.pack(">I", len(data)) + data)

    def do_hang_up(self, answer: Any) -> None:
        os.close(_channel())
        time.sleep(1000)


def _channel() -> int:
    """The socket on which the agent is spoken to."""
    return next(int(name) for name in os.listdir("/proc/self/fd") if _is_socket(name))


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:
        return False


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(_channel(), data) :]


class Neighbour:
    """Wants nothing but to be left alone: some turns at a steady pace."""

    sampling = {"max_tokens": 4}  # noqa: RUF012
    turn_count_max = 9

    def __init__(self, turns: int = 4, pace_s: float = 0.1) -> None:
        self._left, self._pace_s = turns, pace_s

    async def reset(self, task: dict[str, Any], seed: int) -> SimpleNamespace:
        return SimpleNamespace(text="?", info={})

    async def step(self, action: str) -> SimpleNamespace:
        await asyncio.sleep(self._pace_s)
        self._left -= 1
        is_over = self._left == 0
        return SimpleNamespace(
            text=".", reward=float(is_over), terminated=is_over, truncated=False, info={"said": action}
        )
