"""Environments made for benches: they take no time, or what they are told, and answer the same length every turn.

Agents offer them only when told to: `--environment metronome=tests.bench.worlds:Metronome`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from rollfab.workers.environments.base import Environment, Observation, Step, TextSampling

LETTER = "o"  # one token of the presets' tokenizer


class Metronome(Environment):
    """A fixed number of turns of a fixed length, each answered with as many characters, whatever the policy writes.

    Args:
        turn_count: turns until it ends.
        completion_tokens: length of every turn; nothing ends one early.
        observation_tokens: characters of every observation, the first included.

    A task may say its own first "text", "completion_tokens", "temperature" and "turn_count", and the seconds before
    each answer, "pause_s".
    """

    name = "metronome"
    inline = True

    def __init__(self, turn_count: int, completion_tokens: int, observation_tokens: int) -> None:
        self.sampling = TextSampling(temperature=1.0, max_tokens=completion_tokens, ends_at_eos=False)
        self.turn_count_max = turn_count
        self._text = observation(observation_tokens)
        self._turn_count, self._turns, self._pause_s = 0, turn_count, 0.0

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        """Say the first observation."""
        own = self.sampling
        self.sampling = dataclasses.replace(
            own,
            temperature=task.get("temperature", own.temperature),
            max_tokens=task.get("completion_tokens", own.max_tokens),
        )
        self._turns = task.get("turn_count", self._turns)
        self._pause_s = task.get("pause_s", 0.0)
        return Observation(task.get("text", self._text))

    async def step(self, action: str) -> Step:
        """Count."""
        if self._pause_s:
            await asyncio.sleep(self._pause_s)
        self._turn_count += 1
        return Step(self._text, 0.0, terminated=self._turn_count >= self._turns)


def observation(token_count: int) -> str:
    """What the metronome says."""
    return LETTER * token_count
