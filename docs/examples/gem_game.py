"""Any game of GEM's, by its name: its observations and actions are text already.

Offer it from an agent worker, then name it in a run:

    rollfab agent --environment mastermind=docs.examples.gem_game:Game
    fabric.run("games", model=…, environment="mastermind", environment_options={"name": "game:Mastermind-v0-easy"})
"""

from __future__ import annotations

from typing import Any

from rollfab.workers.environments.base import TextSampling


class Game:
    """A game. name: as `gem.print_envs()` lists it."""

    sampling = TextSampling(max_tokens=256)
    turn_count_max = 20

    def __init__(self, name: str = "game:GuessTheNumber-v0-easy") -> None:
        import gem  # here: it takes a second, and each episode has a process of its own

        self._world = gem.make(name)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Say the rules."""
        text, facts = self._world.reset(seed=seed)
        return text, facts

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a move, which GEM looks for in \\boxed{…}."""
        text, reward, terminated, truncated, facts = self._world.step(action)
        return text, float(reward), terminated, truncated, facts
