"""GuessTheNumber: GEM's game in one character per observation and per guess.

- The policy reads "?" to begin, then ">" (the number is higher), "<" (lower) or "!" (not a new number in range). Its
  own guesses are in its context, so the observations are hints alone: the policy must use the history to solve it.
- It guesses with one digit; "0" stands for 10.
- Reward: 1 for the number, else 0, and `invalid_reward` for a character that is no digit (the world stays as it is).
  GEM's partial reward for a near miss on the last guess is off unless asked for: it pays for not solving the game.
- A task may name its "number", so that all trajectories of a group look for the same number; otherwise GEM draws it
  from the task's "seed", or else from the trajectory's.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ....fabric.contract.errors import ConfigError, EnvironmentFailed
from ..base import Environment, Observation, Step, TextSampling, task_seed

DIGITS = "1234567890"
INVALID_REWARD = -0.05
HINTS = {"higher than": ">", "lower than": "<"}  # words of GEM's observations
GAME = "gem.envs.game_env.guess_the_number"


class GuessTheNumber(Environment):
    """Find a number from 1 to 10 in four guesses.

    Args:
        partial_reward: keep GEM's reward for a near miss on the last guess.
        invalid_reward: for an action that is not a digit.
    """

    name = "guess-the-number"
    sampling = TextSampling(max_tokens=1)
    turn_count_max = 8
    inline = True

    def __init__(self, partial_reward: bool = False, invalid_reward: float = INVALID_REWARD) -> None:
        game = load_gem(GAME).GuessTheNumberEnv
        # the settings GEM registers as game:GuessTheNumber-v0-easy
        self._world = _keep_dice(lambda: game(min_number=1, max_number=len(DIGITS), max_turns=4))
        self._partial_reward = partial_reward
        self._invalid_reward = invalid_reward

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        drawn = task_seed(self.name, task, seed) % 2**32  # numpy takes no larger seed
        _keep_dice(lambda: self._world.reset(seed=drawn))
        if "number" in task:
            self._world.game_number = _check_number(task["number"])
        return Observation("?")

    async def step(self, action: str) -> Step:
        """Guess, or change nothing if the action is not a digit."""
        guess = DIGITS.find(action.strip() or "x") + 1
        if guess == 0 or len(action.strip()) != 1:
            return Step("!", self._invalid_reward, info={"invalid": True})
        text, reward, terminated, truncated, _ = self._world.step(f"\\boxed{{{guess}}}")
        success = text.startswith("Congratulations")
        if not self._partial_reward:
            reward = float(success)
        hint = next((hint for words, hint in HINTS.items() if words in text), "!")
        return Step(hint, float(reward), bool(terminated), bool(truncated), {"success": success})


def _check_number(number: Any) -> int:
    if isinstance(number, int) and 1 <= number <= len(DIGITS):
        return number
    raise EnvironmentFailed(f"the task's number is {number!r}: use 1 to {len(DIGITS)}", reason="task")


def _keep_dice(draw: Callable[[], Any]) -> Any:
    """Call `draw` and put the process-wide dice back: GEM seeds `random` and numpy's for the whole process."""
    kept, kept_numpy = random.getstate(), np.random.get_state()
    try:
        return draw()
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)


def load_gem(name: str) -> ModuleType:
    """Load one module of GEM without the rest of the package.

    `import gem` loads every game, reasoning-gym and matplotlib (1.1 s of CPU, 60 MB) and configures the root logger.
    We leave the package objects empty while we import the module, then remove them again, so that a later
    `import gem` elsewhere finds the whole package.

    Raises:
        ConfigError: GEM is not installed.
    """
    if "gem" in sys.modules:
        return importlib.import_module(name)
    parents = [name.rsplit(".", depth)[0] for depth in range(name.count("."), 0, -1)]
    try:
        for parent in parents:
            spec = importlib.util.find_spec(parent)
            if spec is None:
                raise ConfigError("environment guess-the-number needs GEM: pip install gem-llm", environment=name)
            sys.modules[parent] = importlib.util.module_from_spec(spec)
        return importlib.import_module(name)
    finally:
        for loaded in [key for key in sys.modules if key == "gem" or key.startswith("gem.")]:
            del sys.modules[loaded]
