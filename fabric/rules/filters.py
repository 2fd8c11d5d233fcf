"""Filters of complete groups worth training on. A dropped group is acknowledged; another task may replace it.

Source of `varied`: dynamic sampling of DAPO (arXiv 2503.14476, section 3.2): in a group whose rewards are all equal
every advantage is 0, so it teaches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from ..contract.errors import InputError
from ..contract.ids import shard_of
from ..contract.records import Group
from ..contract.text import did_you_mean

Keep = Callable[[Group], bool]
REFILL = re.compile(r"^(.*)-r(\d+)$")
NAME_LENGTH_MAX = 63


def has_varied_rewards(group: Group) -> bool:
    """Tell whether the group's rewards differ."""
    rewards = {rollout.reward for rollout in group.rollouts}
    return len(rewards) > 1


FILTERS: Mapping[str, Keep] = {"varied": has_varied_rewards}


def check_refill(keep: Any, refill: Any) -> None:
    """Require a filter where tasks are given to replace what it drops. Raises InputError."""
    if refill is not None and keep is None:
        expected = 'give keep="varied", or a function of a group'
        raise InputError(
            f"groups: refill replaces groups that keep drops, and there is no keep: {expected}", name="refill"
        )


def find_filter(keep: Any) -> Keep:
    """Find a filter by its name, or return it as given; None keeps all.

    Raises:
        InputError: there is none of that name, or it is neither a name nor a function.
    """
    if keep is None:
        return lambda _: True
    if isinstance(keep, str):
        if keep not in FILTERS:
            raise InputError(f"there is no group filter {keep!r}: {did_you_mean(keep, FILTERS, 'Or give a function')}")
        return FILTERS[keep]
    if not callable(keep):
        expected = f"{', '.join(FILTERS)}, or a function of a group"
        raise InputError(f"groups: keep is {type(keep).__name__}, expected {expected}", name="keep")
    found: Keep = keep
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """Replaces a dropped group by the next task, under a name made from the dropped one's. shard_count: the run's.

    The name is the same whenever the same group is dropped, so a trainer that dies in between and drops it again
    does not push a second replacement.
    """

    tasks: Iterator[Mapping[str, Any]]
    shard_count: int = 1
    _taken: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _unused: list[Mapping[str, Any]] = field(default_factory=list)

    def task_for(self, name: str) -> Mapping[str, Any] | None:
        """Return the next task, for a replacement of this name the same until it is pushed; None: there are no more."""
        if name not in self._taken:
            task = self._unused.pop() if self._unused else next(self.tasks, None)
            if task is None:
                return None
            self._taken[name] = task
        return self._taken[name]

    def note(self, name: str, *, is_used: bool) -> None:
        """Forget a replacement that the run has; is_used: with its task, which else replaces the next group."""
        task = self._taken.pop(name, None)
        if task is not None and not is_used:
            self._unused.append(task)

    def name_of(self, dropped: str) -> str:
        """Name the replacement of a group: `<group>-r1`, and the replacement of that `<group>-r2`.

        In a run of several shards numbers are passed over until it is in the dropped one's, whose place it takes.
        """
        found = REFILL.match(dropped)
        base, count = (found.group(1), int(found.group(2)) + 1) if found else (dropped, 1)
        while shard_of(name := _numbered(base, count), self.shard_count) != shard_of(dropped, self.shard_count):
            count += 1
        return name


def _numbered(base: str, count: int) -> str:
    suffix = f"-r{count}"
    if len(base) > NAME_LENGTH_MAX - len(suffix):  # cut off, long names would be alike
        suffix = f"-{crc32(base.encode()):08x}{suffix}"
    return base[: NAME_LENGTH_MAX - len(suffix)] + suffix
