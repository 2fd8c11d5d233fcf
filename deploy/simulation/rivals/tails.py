"""RollPacker's tail batching (arXiv 2509.21009): what is long is put off, and done together.

- A short round has a quarter more prompts than a step needs, each with a quarter more answers, and takes the first that
  are complete. The answers that are more are as long as others of their prompt.
- Prompts that were not complete are done in long rounds of their own, once they fill a step, with nothing to spare.
- At the end of a simulation the rest is one more round, which counts by its size: all prompts are trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from ..machine.workload import Group, StepPlan

SPARE = 0.25  # of the prompts, and of the answers to each, that a short round has more
FURTHER = 1_000_000  # the number of the first step whose prompts others have to spare


class TailBatches:
    """Makes the rounds. draw: a step's work, by its number. Steps have `group_count` groups of `group_size`."""

    def __init__(self, draw: Callable[[int], StepPlan], *, group_count: int, group_size: int) -> None:
        self.group_count = group_count
        self._draw, self._size = draw, group_size
        self._long: list[Group] = []
        self._drawn = 0

    @property
    def put_off_count(self) -> int:
        """Count the groups that wait for a long round."""
        return len(self._long)

    def put_off(self, groups: Sequence[Group]) -> None:
        """Keep the groups that a round left, with as many answers as a step needs."""
        self._long += [group[: self._size] for group in groups]

    def next(self, *, is_last: bool) -> StepPlan:
        """Return the next round. is_last: of what was put off, be it less than a step."""
        if is_last or len(self._long) >= self.group_count:
            groups, self._long = self._long[: self.group_count], self._long[self.group_count :]
            return StepPlan(groups=groups, needed=len(groups), kept=frozenset(range(len(groups))))
        plan, dice = self._draw(self._drawn), Random(self._drawn)
        spare = self._draw(FURTHER + self._drawn).groups[: math.ceil(SPARE * self.group_count)]
        self._drawn += 1
        more = math.ceil(SPARE * self._size)
        count = len(plan.groups)
        return replace(
            plan,
            groups=[(*group, *dice.choices(group, k=more)) for group in (*plan.groups, *spare)],
            kept=plan.kept | frozenset(range(count, count + len(spare))),
            quorum=self._size,
        )
