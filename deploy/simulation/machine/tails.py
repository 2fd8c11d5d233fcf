"""RollPacker's tail batching (arXiv 2509.21009), by the rule that trainers use: fabric/rules/rounds.py.

- The answers that a short round has more are as long as others of their prompt.
- Which prompts teach nothing shows when they end, so these are anywhere among the others of their round.
- At the end of a simulation what was put off is one more round, which counts by its size: all prompts are trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from ....fabric.rules.rounds import TailRounds
from .workload import Group, StepPlan

SPARE = 0.25  # of the prompts, and of the answers to each, that a short round has more
FURTHER = 1_000_000  # the number of the first step whose prompts others have to spare


@dataclass(frozen=True, slots=True)
class Done:
    """A group that is complete."""

    group_id: str


class TailBatches:
    """Makes the rounds. draw: a step's work, by its number. Steps have `group_count` groups of `group_size`."""

    def __init__(self, draw: Callable[[int], StepPlan], *, group_count: int, group_size: int) -> None:
        self.group_count = group_count
        self._draw, self._size = draw, group_size
        self._rounds = TailRounds(self._prompts(), group_count=group_count, group_size=group_size, spare=SPARE)
        self._short_count = 0
        self._is_last = False
        self._named: dict[int, str] = {}  # by the group's identity
        self._in_vain: list[Group] = []  # put off, too: that they teach nothing shows when they end

    def _prompts(self) -> Iterator[Group]:
        """Draw what each step would have had, and what is to spare beside it."""
        for step in count():
            plan = self._draw(step)
            more = self._draw(FURTHER + step).groups[: math.ceil(SPARE * self.group_count)]
            for group in (*(plan.groups[index] for index in sorted(plan.kept)), *more):
                if self._is_last:
                    return
                yield group

    @property
    def put_off_count(self) -> int:
        """Count the groups that wait for a long round."""
        return len(self._rounds.state()["put_off"])

    def put_off(self, groups: Sequence[Group]) -> None:
        """End a round; these of its groups are not complete."""
        left = {self._named.get(id(group)) for group in groups}
        self._in_vain += [group[: self._size] for group in groups if id(group) not in self._named]
        self._rounds.end(Done(name) for name in self._named.values() if name not in left)

    def next(self, *, is_last: bool) -> StepPlan:
        """Return the next round. is_last: nothing more is drawn."""
        self._is_last = is_last
        made = self._rounds.next()
        assert made is not None, "a round is asked for while something is put off, or more can be drawn"
        groups, vain, dice = list(made.tasks), self._in_vain, Random(self._short_count)
        if made.is_long:
            self._in_vain = []
        else:
            plan = self._draw(self._short_count)
            self._short_count += 1
            vain = [group for index, group in enumerate(plan.groups) if index not in plan.kept]
            groups, vain = (
                [(*group, *dice.choices(group, k=made.group_size - self._size)) for group in each]
                for each in (groups, vain)
            )
        self._named = dict(zip(map(id, groups), made.group_ids, strict=True))
        for group in vain:
            groups.insert(dice.randint(0, len(groups)), group)
        kept = frozenset(index for index, group in enumerate(groups) if id(group) in self._named)
        return StepPlan(groups=groups, needed=made.needed, kept=kept, quorum=made.quorum)
