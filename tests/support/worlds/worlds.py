"""Environments and reward functions for tests with real processes: paced, forgetful, slow, and broken in every way.

Agents and reward workers reach them by `--environment NAME=tests.support.worlds.worlds:Class` and `--reward
NAME=tests.support.worlds.worlds:name`; `support/processes/fabric_processes.py` puts this repository on their path.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from rollfab.fabric.contract.records import Rollout
from rollfab.workers.environments.base import Environment, Observation, Step, TextSampling

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ANY_LENGTH = tuple(LETTERS[:12])  # stopping at these, an untrained policy writes about nine tokens


class Walk(Environment):
    """A fixed number of turns at a fixed pace; `info` says how many steps this very object took.

    Args:
        turns: until it terminates; each is worth 1 / turns.
        pace_s: how long a step takes.
        tokens: most tokens of a turn.
        any_length: turns end at some letters, so that their lengths differ.
    """

    name = "walk"
    isolation = "none"

    def __init__(self, turns: int = 6, pace_s: float = 0.05, tokens: int = 8, any_length: bool = False) -> None:
        self.sampling = TextSampling(max_tokens=tokens, stop=ANY_LENGTH if any_length else ())
        self.turn_count_max = turns + 1
        self._turns = turns
        self._pace_s = pace_s
        self._actions: list[str] = []
        self._steps_here = 0

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        return Observation(LETTERS[seed % len(LETTERS)])

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._pace_s)
        self._actions.append(action)
        self._steps_here += 1
        info = {"actions": list(self._actions), "steps_here": self._steps_here}
        is_over = len(self._actions) == self._turns
        return Step(LETTERS[len(self._actions) % len(LETTERS)], 1.0 / self._turns, is_over, False, info)


class WalkBySnapshot(Walk):
    """The same, going on from its own snapshot."""

    name = "walk-snapshot"
    recovery = "snapshot"

    async def snapshot(self) -> dict[str, Any]:
        return {"actions": self._actions}

    async def restore(self, snapshot: dict[str, Any]) -> None:
        self._actions = list(snapshot["actions"])


class WalkByRestart(Walk):
    """The same, unable to go on elsewhere."""

    name = "walk-restart"
    recovery = "restart"


class Broken(Environment):
    """Does what its task's "fault" says, at its reset or in its second turn; without one it ends well after two turns.

    A task's "fault_seeds" say which of its trajectories are meant (default: all); its "attempts_file" is given a line
    per attempt.
    """

    name = "broken"
    isolation = "none"

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        self._fault = task.get("fault") if seed in task.get("fault_seeds", [seed]) else None
        self._turn = 0
        attempt_count = count_attempt(Path(task["attempts_file"])) if "attempts_file" in task else 0
        if self._fault == "recovers":
            self._fault = "step" if attempt_count == 1 else None
        if self._fault == "reset":
            raise KeyError("no such level")
        if self._fault == "reset hangs":
            await asyncio.Event().wait()
        if self._fault == "will not be stopped":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        if self._fault == "no observation":
            return None  # type: ignore[return-value]
        if self._fault == "empty observation":
            return Observation("")
        return Observation("?")

    async def step(self, action: str) -> Step:
        self._turn += 1
        if self._turn == 1:
            return Step(".", 0.5)
        return self._last_step()

    def _last_step(self) -> Step:
        if self._fault in ("step", "step and close"):
            raise RuntimeError("the world fell over")
        if self._fault == "exit":
            raise SystemExit(3)
        if self._fault == "cancelled":
            raise asyncio.CancelledError
        if self._fault == "times out":
            raise TimeoutError("the game server")
        if self._fault == "no step":
            return {"reward": 1.0}  # type: ignore[return-value]
        if self._fault == "no text":
            return Step(None, 0.5)  # type: ignore[arg-type]
        if self._fault == "no JSON":
            return Step("", 0.5, True, info={"world": self})
        if self._fault == "odd text":
            raise RuntimeError("lone surrogate \ud800")
        rewards = {"NaN": math.nan, "infinite": math.inf, "no number": "high"}
        return Step("", rewards.get(self._fault, 0.5), terminated=True)  # type: ignore[arg-type]

    async def close(self) -> None:
        if self._fault == "step and close":
            raise OSError("cannot close either")
        if self._fault == "close hangs":
            await asyncio.Event().wait()


def count_attempt(path: Path) -> int:
    """Add a line to a file; returns how many it has."""
    with path.open("a+") as lines:
        lines.write("attempt\n")
        lines.seek(0)
        return len(lines.readlines())


class BrokenGym:
    """A plain synchronous world; the seed chooses how it breaks. Its calls run in threads."""

    SEEDS: ClassVar = {"hangs": 101, "stops": 102, "exits": 103, "four values": 104}
    sampling = TextSampling(max_tokens=1)
    isolation = "none"

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._seed = seed
        return "?", {}

    def step(self, action: str) -> Any:
        if self._seed == self.SEEDS["hangs"]:
            threading.Event().wait()
        if self._seed == self.SEEDS["stops"]:
            next(iter(()))
        if self._seed == self.SEEDS["exits"]:
            raise SystemExit(4)
        if self._seed == self.SEEDS["four values"]:
            return "", 1.0, True, {}
        return "", 1.0, True, False, {}


class Unmakeable(Environment):
    """Cannot be constructed."""

    name = "unmakeable"
    isolation = "none"

    def __init__(self) -> None:
        raise FileNotFoundError("maps/level-1.txt")

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        raise AssertionError("there is none to call")

    async def step(self, action: str) -> Step:
        raise AssertionError("there is none to call")


# ---- reward functions


def slow_reward(task: dict[str, Any], rollout: Rollout) -> float:
    """A reward that takes a while: long enough to be killed in."""
    time.sleep(0.05)
    return float(rollout.turn_count)


def broken_reward(task: dict[str, Any], rollout: Rollout) -> float:
    """Two, for broken worlds that end well."""
    return 2.0


def touch(path: str) -> None:
    """What a job must never be able to call by its path."""
    Path(path).write_text(str(os.getpid()))


class Guided(Walk):
    """The same, asking for what the engines of a preset cannot do."""

    name = "guided"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sampling = TextSampling(guided_regex="[a-c]+")
