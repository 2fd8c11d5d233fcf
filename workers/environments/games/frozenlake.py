"""FrozenLake: Gymnasium's grid walk, one character per observation and per action.

- The policy reads where it stands (a letter per cell, "a" is the top left) and writes L, D, R or U.
- Reward: the environment's own (1 at the goal, else 0), and `invalid_reward` for anything that is not a move. Such an
  action leaves the world as it is and does not end the episode: if it did, every rollout of an untrained policy would
  look the same and nothing could be learnt.
- The default map is fixed and not slippery, so task and seed change nothing; slippery worlds draw from the seed.
"""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from ....fabric.contract.errors import ConfigError
from ..base import Environment, Observation, Step, TextSampling, task_seed

ACTIONS = {"L": 0, "D": 1, "R": 2, "U": 3}  # Gymnasium's numbering
INVALID_REWARD = -0.05  # 14 of them stay above -1, so one success always outweighs a clumsy walk


class FrozenLake(Environment):
    """Walk from the start to the goal without falling into a hole.

    Args:
        map: "4x4", "8x8", or rows such as ["SFF", "FHF", "FFG"].
        slippery: moves go astray two times in three, as in Gymnasium's default.
        invalid_reward: for an action that is not one of L, D, R, U.
    """

    name = "frozenlake"
    sampling = TextSampling(max_tokens=1)
    turn_count_max = 14
    inline = True

    def __init__(
        self, map: str | list[str] = "4x4", slippery: bool = False, invalid_reward: float = INVALID_REWARD
    ) -> None:
        import gymnasium

        where = {"map_name": map} if isinstance(map, str) else {"desc": map}
        try:
            # max_episode_steps -1: the turn limit is the run's, not Gymnasium's 100
            self._world = gymnasium.make(
                "FrozenLake-v1", is_slippery=slippery, max_episode_steps=-1, disable_env_checker=True, **where
            ).unwrapped
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                f"frozenlake map {map!r} cannot be made: use '4x4', '8x8' or rows of S, F, H, G"
            ) from error
        self._cell_count = int(self._world.observation_space.n)  # type: ignore[attr-defined]
        self._column_count = int(self._world.ncol)  # type: ignore[attr-defined]
        self._invalid_reward = invalid_reward
        self._cell = 0

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        """Stand on the start."""
        cell, _ = self._world.reset(seed=task_seed(self.name, task, seed))
        self._cell = int(cell)
        return Observation(self._text())

    async def step(self, action: str) -> Step:
        """Move, or stay if the action is not a move."""
        move = ACTIONS.get(action.strip())
        if move is None:
            return Step(self._text(), self._invalid_reward, info={"invalid": True})
        cell, reward, terminated, truncated, _ = self._world.step(move)
        self._cell = int(cell)
        return Step(self._text(), float(reward), bool(terminated), bool(truncated), {"success": float(reward) > 0})

    async def close(self) -> None:
        """Free Gymnasium's window, if one was ever opened."""
        self._world.close()

    def _text(self) -> str:
        """Name the policy's cell: by a letter, or by row and column on maps with more cells than letters."""
        if self._cell_count <= len(ascii_lowercase):
            return ascii_lowercase[self._cell]
        return f"{self._cell // self._column_count}{self._cell % self._column_count}"
