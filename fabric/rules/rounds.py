"""What a synchronous step is made of, where some tasks take far longer than others: tail batching.

Source: RollPacker, arXiv 2509.21009. A short round pushes more tasks than a step needs, each with more rollouts, and
ends with the first groups that are complete. The tasks of the others are put off, and done in long rounds with nothing
to spare, once they fill a step. So every task is trained on, and a step seldom waits for its longest rollout. In
exchange rollouts that are long lose races, within a group too: what a policy learns from is not quite what it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from ..contract.errors import InputError
from ..contract.ids import check_name

T = TypeVar("T")


class Named(Protocol):
    """A group, as far as rounds care."""

    @property
    def group_id(self) -> str:
        """Its name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Generic[T]):
    """A step's work: what to push, and how many complete groups end it. is_long: of tasks that were put off."""

    group_ids: tuple[str, ...]
    tasks: tuple[T, ...]
    group_size: int
    quorum: int | None
    needed: int
    is_long: bool

    @property
    def push(self) -> dict[str, Any]:
        """The arguments of `submit`."""
        return {
            "tasks": list(self.tasks),
            "group_size": self.group_size,
            "quorum": self.quorum,
            "group_ids": list(self.group_ids),
        }

    def has(self, group: Named) -> bool:
        """Tell whether a group is of this round, as `keep` of `groups` asks: others came too late for theirs."""
        return group.group_id in self.group_ids


class TailRounds(Generic[T]):
    """Makes the rounds of a training. It only counts: pushing, waiting and cancelling are the caller's.

    Args:
        tasks: all of them, in an order that is the same whenever a training goes on.
        group_count: complete groups that a step needs.
        group_size: rollouts that a group needs.
        spare: of both, the part that a short round has more.
        name: begins the names of the groups; trainings of one run have different ones.
        state: what `state` returned, to go on from there.

    Raises:
        InputError, ConfigError: an argument makes no sense.
    """

    def __init__(
        self,
        tasks: Iterable[T],
        *,
        group_count: int,
        group_size: int,
        spare: float = 0.25,
        name: str = "round",
        state: Mapping[str, Any] | None = None,
    ) -> None:
        for what, value in (("group_count", group_count), ("group_size", group_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{what} is {value!r:.100}, expected a whole number, 1 or more", name=what)
        if isinstance(spare, bool) or not isinstance(spare, int | float) or not 0 < spare <= 1:
            raise InputError(f"spare is {spare!r:.100}, expected a part, above 0 and at most 1, as 0.25", name="spare")
        self._name = check_name("round", name)
        check_name("round", f"{name}-1000000-10000")  # the names of its groups
        self._count, self._size = group_count, group_size
        self._more = [math.ceil((1 + spare) * each) for each in (group_count, group_size)]
        self._number, self._drawn, self._put_off = _read(state)
        self._tasks = islice(iter(tasks), self._drawn, None)
        self._round: Round[T] | None = None

    def next(self) -> Round[T] | None:
        """Return the round under way, or the next one; None: every task was trained on."""
        if self._round is None:
            self._round = self._made()
        return self._round

    def _made(self) -> Round[T] | None:
        if len(self._put_off) < self._count:
            drawn = list(islice(self._tasks, self._more[0]))
            self._drawn += len(drawn)
            if len(drawn) > self._count:
                return self._of(drawn, self._more[1], self._size)
            self._put_off += drawn  # the last ones: none is to spare
        long, self._put_off = self._put_off[: self._count], self._put_off[self._count :]
        return self._of(long, self._size, None) if long else None

    def _of(self, tasks: Sequence[T], size: int, quorum: int | None) -> Round[T]:
        names = tuple(f"{self._name}-{self._number}-{index}" for index in range(len(tasks)))
        return Round(
            group_ids=names,
            tasks=tuple(tasks),
            group_size=size,
            quorum=quorum,
            needed=min(self._count, len(tasks)),
            is_long=quorum is None,
        )

    def end(self, done: Iterable[Named]) -> list[str]:
        """End the round with the groups that it is trained on; return the names of the others, to be cancelled."""
        if self._round is None:
            return []
        trained = {group.group_id for group in done}
        left = {n: task for n, task in zip(self._round.group_ids, self._round.tasks, strict=True) if n not in trained}
        self._put_off += left.values()
        self._number += 1
        self._round = None
        return list(left)

    def state(self) -> dict[str, Any]:
        """Return where it stands, as JSON carries it if tasks do: save it with the checkpoint of a round's training."""
        under_way = () if self._round is None else self._round.tasks
        is_long = self._round is not None and self._round.is_long
        return {
            "round": self._number,
            "drawn": self._drawn - (0 if is_long else len(under_way)),
            "put_off": [*(under_way if is_long else ()), *self._put_off],
        }


def _read(state: Mapping[str, Any] | None) -> tuple[int, int, list[Any]]:
    """Read what `state` returned. Raises InputError: it is something else."""
    if state is None:
        return 0, 0, []
    checks: dict[str, Callable[[Any], bool]] = {
        "round": lambda value: isinstance(value, int) and value >= 0,
        "drawn": lambda value: isinstance(value, int) and value >= 0,
        "put_off": lambda value: isinstance(value, list),
    }
    if not isinstance(state, Mapping) or not all(
        name in state and check(state[name]) for name, check in checks.items()
    ):
        raise InputError("state is none that rounds gave: give back what they said, or leave it out", name="state")
    return state["round"], state["drawn"], list(state["put_off"])
