"""Processes that must be gone at the end of a test, such as holders of foreign code, and all that is below them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from tests.support.until import until, wait_until

LIMIT_S = 20.0


def living(groups: Iterable[int]) -> list[int]:
    """Processes of these groups, and below those, that have not ended. A zombie has: who adopted it is slow, not it."""
    wanted, found = set(groups), []
    parents = {each.pid: each for each in psutil.process_iter() if _group_of(each) in wanted}
    every = list(psutil.process_iter(["ppid"]))
    count = -1
    while count != len(parents):  # numbers wrap: a child's may be the smaller one
        count = len(parents)
        parents |= {each.pid: each for each in every if each.info["ppid"] in parents}
    for process in parents.values():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return -1


def children_of(pid: int) -> list[int]:
    """Living children of a process, right now; fast enough to catch one in the middle of what it does."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:  # it is gone
        pass
    return [each for each in found if state_of(each) not in "ZX"]


def state_of(pid: int) -> str:
    """R, S, D, T (stopped), Z (zombie), or X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait_until_gone(*pids: int, limit_s: float = LIMIT_S) -> None:
    """Whoever adopted them may be slow to ask how they ended."""
    wait_until(lambda: all(state_of(pid) in "ZX" for pid in pids), lambda: f"alive: {pids}", limit_s)


class Groups:
    """The groups that a test has seen, by the numbers of their holders, and all processes of them."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.numbers = set(numbers)
        self._seen: set[psutil.Process] = set()
        self.look()

    def add(self, number: int) -> None:
        assert number > 1 and number != os.getpgrp()
        self.numbers.add(number)
        self.look()

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, number: int) -> bool:
        return number in self.numbers

    def look(self) -> list[int]:
        """Note who lives now, so that it is found again wherever it goes."""
        found = living(self.numbers)
        for pid in found:
            try:
                self._seen.add(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue
        return found

    def held(self) -> int:
        """How many holders live."""
        return len(self.numbers.intersection(self.look()))

    def left(self) -> list[psutil.Process]:
        """All that ever was seen, and has not ended."""
        self.look()
        return [each for each in self._seen if _lives(each)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait while the loop turns."""
        await until(condition, lambda: f"living: {self.left()}", LIMIT_S, 0.02)

    def check_gone(self) -> None:
        """All of them have ended, soon at the latest."""
        wait_until(lambda: not self.left(), lambda: f"living: {self.left()}", LIMIT_S, 0.02)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
