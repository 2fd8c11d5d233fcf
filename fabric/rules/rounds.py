"""What a synchronous step is made of, where some tasks take far longer than others: tail batching.

Source: RollPacker, arXiv 2509.21009. A short round pushes more tasks than a step needs, each with more rollouts, and
ends with the first groups that are complete. The tasks of the others are put off, and done in long rounds with nothing
to spare, once they fill a step. So every task is trained on, and a step seldom waits for its longest rollout. In
exchange rollouts that are long lose races, within a group too: what a policy learns from is not quite what it was.

Where groups that teach nothing are dropped (dynamic sampling of DAPO, filters.py), the next task takes the place of
each in its round. The number in a group's name says which task it is of, whoever is dropped: a round that is begun
again, by a trainer that died in it, is of the same tasks under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from ..contract.errors import InputError
from ..contract.ids import check_name
from ..contract.records import Group
from .filters import Keep, find_filter

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
        keep: which groups are trained on, as in `groups`: "varied", or a function of a group; None: all.
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
        keep: Keep | str | None = None,
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
        self._keep = find_filter(keep)
        self._number, self._drawn, self._put_off = _read(state)
        self._tasks = islice(iter(tasks), self._drawn, None)
        self._round: Round[T] | None = None
        self._before = self.state()
        self._pushed: dict[str, T] = {}  # in the round under way, by name
        self._taken: set[str] = set()
        self._dropped: set[str] = set()
        self._unpushed: list[str] = []  # of those, what the caller was not told
        self._owed = 0  # tasks, in the places of what was dropped; below 0: pushed before that came again

    def next(self) -> Round[T] | None:
        """Return the round under way, or the next one; None: every task was trained on, or dropped.

        The one under way begins again: all of its groups come again to whoever left the block that received them.
        """
        if self._round is None:
            self._before, self._pushed = self.state(), {}
            self._round = self._made()
        first = 0 if self._round is None else len(self._round.tasks)
        self._taken, self._dropped = set(), set()
        self._unpushed = list(self._pushed)[first:]  # the caller may have been interrupted before it pushed them
        self._owed = -len(self._unpushed)
        return self._round

    def takes(self, group: Group) -> bool:
        """Tell whether a group is one that the round is trained on. What `keep` drops makes way for another: `more`."""
        name = group.group_id
        self._recall(name)
        if name in self._pushed and name not in self._taken | self._dropped and not self.is_over:
            is_kept = self._keep(group)
            (self._taken if is_kept else self._dropped).add(name)
            self._owed += not is_kept
        return name in self._taken

    def more(self) -> Round[T] | None:
        """Return what to push in the places of groups that were dropped since; None: nothing."""
        if self._round is None:
            return None
        self._extend(self._owed)
        self._owed = min(self._owed, 0)  # there may be no more tasks
        names, self._unpushed = tuple(self._unpushed), []
        tasks = tuple(self._pushed[name] for name in names)
        return replace(self._round, group_ids=names, tasks=tasks) if names else None

    @property
    def is_over(self) -> bool:
        """True once it has all groups that it needs, or once all that were pushed have come, and no tasks are left."""
        if self._round is None or len(self._taken) == self._round.needed:
            return True
        is_all_pushed = self._owed <= 0 and not self._unpushed
        return is_all_pushed and len(self._pushed) == len(self._taken) + len(self._dropped)

    def _recall(self, name: str) -> None:
        """Count what a trainer that died in this round pushed in it, also before what was dropped comes again."""
        prefix = f"{self._name}-{self._number}-"
        if self._round is not None and name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
            self._extend(int(name.removeprefix(prefix)) + 1 - len(self._pushed))

    def _extend(self, count: int) -> None:
        """Have so many tasks more in the round under way, or as many as there are."""
        if count <= 0:
            return
        tasks: list[T] = []
        if self._round is not None and self._round.is_long:
            tasks, self._put_off = self._put_off[:count], self._put_off[count:]
        names = self._named([*tasks, *self._draw(count - len(tasks))])
        self._unpushed += names
        self._owed -= len(names)

    def _draw(self, count: int) -> list[T]:
        drawn = list(islice(self._tasks, count))
        self._drawn += len(drawn)
        return drawn

    def _made(self) -> Round[T] | None:
        if len(self._put_off) < self._count:
            drawn = self._draw(self._more[0])
            if len(drawn) > self._count:
                return self._of(drawn, self._more[1], self._size)
            self._put_off += drawn  # the last ones: none is to spare
        long, self._put_off = self._put_off[: self._count], self._put_off[self._count :]
        return self._of(long, self._size, None) if long else None

    def _named(self, tasks: Sequence[T]) -> tuple[str, ...]:
        first = len(self._pushed)
        names = tuple(f"{self._name}-{self._number}-{first + index}" for index in range(len(tasks)))
        self._pushed.update(zip(names, tasks, strict=True))
        return names

    def _of(self, tasks: Sequence[T], size: int, quorum: int | None) -> Round[T]:
        return Round(
            group_ids=self._named(tasks),
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
        over = {group.group_id for group in done} | self._dropped
        left = {name: task for name, task in self._pushed.items() if name not in over}
        self._put_off += left.values()
        self._number += 1
        self._round = None
        return list(left)

    def state(self) -> dict[str, Any]:
        """Return where it stands, as JSON carries it if tasks do: save it with the checkpoint of a round's training."""
        if self._round is not None:
            return self._before
        return {"round": self._number, "drawn": self._drawn, "put_off": list(self._put_off)}


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
