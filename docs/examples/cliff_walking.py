"""A world of Gymnasium's, whose observations and actions are numbers, as one of text: two small maps.

Offer it from an agent worker:

    rollfab agent --environment cliff=docs.examples.cliff_walking:CliffWalking
"""

from __future__ import annotations

from typing import Any

import gymnasium

from rollfab.workers.environments.base import TextSampling

MOVES = "URDL"  # Gymnasium's numbers 0 to 3
WIDTH = 12


class CliffWalking:
    """Walk along a cliff to its far end. One letter a turn; another letter is a lost turn."""

    sampling = TextSampling(max_tokens=1)
    turn_count_max = 40

    def __init__(self) -> None:
        self._world = gymnasium.make("CliffWalking-v1")
        self._place = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Say where it begins."""
        self._place, _ = self._world.reset(seed=seed)
        return self._text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        if len(action) != 1 or action not in MOVES:
            return self._text(), -1.0, False, False, {"moved": False}
        self._place, reward, terminated, truncated, _ = self._world.step(MOVES.index(action))
        return self._text(), float(reward), terminated, truncated, {"moved": True}

    def close(self) -> None:
        """Let go of the world."""
        self._world.close()

    def _text(self) -> str:
        row, column = divmod(int(self._place), WIDTH)
        return f"row {row} of 4, column {column} of {WIDTH}: {MOVES}?"
