"""A small world whose every observation and reward depends on every action before; in three kinds of recovery."""

from __future__ import annotations

import asyncio
from typing import Any
from zlib import crc32

from rollfab.workers.environments.base import Environment, Observation, Recovery, Step, TextSampling
from tests.sim.policy import LETTERS
from tests.sim.virtual_loop import PROCESS

KILLER = "g0.0"  # the trajectory that ends every agent it runs in, where the options say that there is one
KINDS: tuple[Recovery, ...] = ("replay", "snapshot", "restart")
TARGETS = [f"sim-{kind}=tests.sim.environment:{kind.capitalize()}" for kind in KINDS]


def begin(task: dict[str, Any], seed: int) -> tuple[int, str]:
    """The first state, and what the policy reads first."""
    state = crc32(f"{task['number']} {seed}".encode())
    return state, _text(state)


def follow(state: int, action: str, turn_count: int, turns: int) -> tuple[int, Step]:
    """The state after an action, and what follows. `turn_count`: with this one."""
    state = crc32(action.encode(), state)
    is_over, is_cut = turn_count >= turns, state % 11 == 0
    step = Step(_text(state), (state % 8) / 8, is_over, is_cut and not is_over, {"state": state})
    return state, step


def _text(state: int) -> str:
    return "".join(LETTERS[(state >> shift) % 26] for shift in range(0, 4 * (1 + state % 3), 4))


class Replay(Environment):
    """The world; after a loss its actions are replayed.

    Args:
        turns: after which it is over; some end sooner. tokens: most tokens of a turn. pace_s: what a step takes.
    """

    name = "sim-replay"
    isolation = "none"
    recovery: Recovery = "replay"  # type: ignore[misc]

    def __init__(self, turns: int, tokens: int, pace_s: float, stops: str = "yz") -> None:
        self.sampling = TextSampling(temperature=0.0, max_tokens=tokens, stop=tuple(stops))
        self.turn_count_max = turns + 1
        self._turns = turns
        self._pace_s = pace_s
        self._state = 0
        self._turn_count = 0
        self._kills_at = -1

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        self._state, text = begin(task, seed)
        self._kills_at = task["kills_at"] if task.get("killer_seed") == seed else -1
        await self._kill()
        return Observation(text)

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._pace_s)
        process = PROCESS.get()
        if process is not None and process.is_world_hung:
            await asyncio.Event().wait()
        self._turn_count += 1
        await self._kill()
        self._state, step = follow(self._state, action, self._turn_count, self._turns)
        return step

    async def _kill(self) -> None:
        """End the agent, as a crash in native code would."""
        process = PROCESS.get()
        if self._turn_count == self._kills_at and process is not None:
            process.crash()
            await asyncio.Event().wait()


class Snapshot(Replay):
    """The same, going on from its own snapshot."""

    name = "sim-snapshot"
    recovery: Recovery = "snapshot"  # type: ignore[misc]

    async def snapshot(self) -> dict[str, Any]:
        return {"state": self._state, "turn_count": self._turn_count}

    async def restore(self, snapshot: dict[str, Any]) -> None:
        self._state, self._turn_count = snapshot["state"], snapshot["turn_count"]


class Restart(Replay):
    """The same, unable to go on elsewhere."""

    name = "sim-restart"
    recovery: Recovery = "restart"  # type: ignore[misc]
