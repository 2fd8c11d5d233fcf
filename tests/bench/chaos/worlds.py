"""What chaos' trajectories do: turns of one length at a steady pace, scored by a reward function.

Agents and reward workers offer them only when told to: `--environment stroll=tests.bench.chaos.worlds:Stroll`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollfab.fabric.contract.records import Rollout
from rollfab.workers.environments.base import Environment, Observation, Step, TextSampling

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Stroll(Environment):
    """A fixed number of greedy turns; what it says follows from the seed, so that equal seeds give equal rollouts.

    Args:
        turn_count: turns until it ends.
        completion_tokens: length of every turn.
        pace_s: how long a step takes; it costs no CPU.
    """

    name = "stroll"
    isolation = "none"  # it could end its agent: what is lost with agents is what chaos looks at

    def __init__(self, turn_count: int, completion_tokens: int, pace_s: float) -> None:
        self.sampling = TextSampling(temperature=0.0, max_tokens=completion_tokens, ends_at_eos=False)
        self.turn_count_max = turn_count
        self._pace_s = pace_s
        self._turn_count = 0
        self._letter = 0

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        """Say a letter."""
        self._letter = seed % len(LETTERS)
        return Observation(LETTERS[self._letter] * 8)

    async def step(self, action: str) -> Step:
        """Wait, then say the next one."""
        await asyncio.sleep(self._pace_s)
        self._turn_count += 1
        letter = LETTERS[(self._letter + self._turn_count) % len(LETTERS)]
        return Step(letter, 0.0, terminated=self._turn_count >= self.turn_count_max)


def count_turns(task: dict[str, Any], rollout: Rollout) -> float:
    """A reward that can be checked: one per turn."""
    return float(rollout.turn_count)
