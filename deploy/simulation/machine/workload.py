"""Trajectories to simulate: their turns' lengths and their tools' latencies, drawn from a seed.

- frozenlake, alfworld: our parameters after ROSE's settings; swe: fitted to a measured SWE run (verl, 8 H200);
  reasoning: a lognormal through the published quantiles of DeepSeek-R1's outputs in ServeGen.
- search: our parameters, for work that reads some 20 times as much as it makes; mixed: four groups of it in five, the
  others short reasoning.
- LN(m, s) is a lognormal with median m and log-deviation s. Failing trajectories run to their cap of turns.
- The same seed and step give the same trajectories, whatever arm runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Dice = np.random.Generator
SEARCHES = 0.8  # of the groups of mixed work


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A turn: tokens made, tokens of the environment's answer, seconds that it takes."""

    output_tokens: int
    observation_tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class TrajectoryPlan:
    """A trajectory. start_s: until its environment is ready."""

    prompt_tokens: int
    turns: tuple[TurnPlan, ...]
    start_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        """All tokens that it makes."""
        return sum(turn.output_tokens for turn in self.turns)


Group = tuple[TrajectoryPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of work. turn_tokens_max: what a turn may come to make, which engines reserve."""

    draw: Callable[[Dice, int], Group]
    turn_tokens_max: int


def _ln(dice: Dice, median: float, sigma: float, low: float = 0.0, high: float = math.inf) -> float:
    return float(min(max(median * math.exp(sigma * dice.standard_normal()), low), high))


def _frozenlake(dice: Dice, size: int) -> Group:
    hard, success = _ln(dice, 1.0, 0.6), float(dice.beta(1.2, 1.2))
    found = []
    for _ in range(size):
        count = min(10, 2 + int(dice.poisson(5))) if dice.random() < success else 10
        outs = [int(min(4096, max(20, _ln(dice, 350, 0.7, 20, 4096) * hard))) for _ in range(count)]
        found.append(TrajectoryPlan(400, tuple(TurnPlan(out, 150, 0.02) for out in outs)))
    return tuple(found)


def _alfworld(dice: Dice, size: int) -> Group:
    success = float(dice.beta(1.5, 1.0))
    found = []
    for _ in range(size):
        count = int(_ln(dice, 14, 0.5, 4, 50)) if dice.random() < success else 50
        turns = tuple(
            TurnPlan(int(_ln(dice, 180, 0.7, 16, 2048)), int(_ln(dice, 80, 0.6, 10, 800)), _ln(dice, 0.25, 1.0, 0, 60))
            for _ in range(count)
        )
        found.append(TrajectoryPlan(900, turns))
    return tuple(found)


def _swe(dice: Dice, size: int) -> Group:
    found = []
    for _ in range(size):
        count = int(min(32, max(3, _ln(dice, 30, 0.25))))
        long, slow = _ln(dice, 1.0, 0.4) / 1.083, _ln(dice, 1.0, 0.9)
        turns = tuple(
            TurnPlan(
                int(max(1, min(4096, _ln(dice, 150, 0.8) * long))),
                int(_ln(dice, 60, 1.2, 1, 6000)),
                min(600.0, _ln(dice, 0.6, 1.3) * slow),
            )
            for _ in range(count)
        )
        found.append(TrajectoryPlan(1500, turns, _ln(dice, 3.0, 1.0, 0, 60)))
    return tuple(found)


def _search(dice: Dice, size: int) -> Group:
    found = []
    for _ in range(size):
        count = int(_ln(dice, 8, 0.5, 3, 20))
        turns = tuple(
            TurnPlan(
                int(_ln(dice, 60, 0.7, 10, 1000)), int(_ln(dice, 1500, 0.8, 100, 6000)), _ln(dice, 0.5, 1.0, 0, 60)
            )
            for _ in range(count)
        )
        found.append(TrajectoryPlan(2000, turns))
    return tuple(found)


def _mixed(dice: Dice, size: int) -> Group:
    if dice.random() < SEARCHES:
        return _search(dice, size)
    hard = _ln(dice, 1.0, 0.5)
    outs = [int(min(8000, max(50, _ln(dice, 812, 0.99) * hard))) for _ in range(size)]
    return tuple(TrajectoryPlan(300, (TurnPlan(out, 0, 0.0),)) for out in outs)


def _reasoning(dice: Dice, size: int) -> Group:
    hard = _ln(dice, 1.0, 0.5)
    outs = [int(min(30_000, max(50, _ln(dice, 812, 0.99) * hard))) for _ in range(size)]
    return tuple(TrajectoryPlan(300, (TurnPlan(out, 0, 0.0),)) for out in outs)


KINDS: dict[str, Kind] = {
    "frozenlake": Kind(draw=_frozenlake, turn_tokens_max=4096),
    "alfworld": Kind(draw=_alfworld, turn_tokens_max=2048),
    "swe": Kind(draw=_swe, turn_tokens_max=4096),
    "search": Kind(draw=_search, turn_tokens_max=4096),
    "mixed": Kind(draw=_mixed, turn_tokens_max=8192),
    "reasoning": Kind(draw=_reasoning, turn_tokens_max=30_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one training step. needed: complete groups that end it; kept: which groups count. quorum: how many
    trajectories complete a group; None: all.

    DAPO submits more groups than it needs and drops those that teach nothing; which those are shows when they end.
    """

    groups: Sequence[Group]
    needed: int
    kept: frozenset[int]
    quorum: int | None = None

    @property
    def trajectory_count(self) -> int:
        """All trajectories that may have to run."""
        return sum(len(group) for group in self.groups)


def draw_step(kind: str, *, seed: int, step: int, groups: int, group_size: int, oversample: float = 1.0) -> StepPlan:
    """Draw the work of a step. oversample: above 1, U(1, oversample) times the groups are submitted (DAPO)."""
    dice = np.random.default_rng((seed, step))
    factor = float(dice.uniform(1.0, oversample)) if oversample > 1 else 1.0
    count = math.ceil(groups * factor)
    kept = frozenset(dice.permutation(count)[:groups].tolist())
    drawn = [KINDS[kind].draw(dice, group_size) for _ in range(count)]
    return StepPlan(groups=drawn, needed=groups, kept=kept)
