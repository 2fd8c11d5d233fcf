"""Which of the waiting jobs goes first. Twin of queue/lua/use/ring.lua."""

from __future__ import annotations

FIRST, NORMAL, LAST = 0, 1, 2


def urgency(*, priority: int, missing_count: int, quorum: int, was_held: bool) -> int:
    """The class in which a job waits; a lower one is served first.

    One class before its group's priority is what somebody had begun already (its prefix may still be cached, and its
    group is older), and what belongs to a group with at most a quarter of its quorum missing: a group is of use only
    when it is complete.
    """
    is_nearly_complete = missing_count * 4 <= quorum
    return max(FIRST, priority - 1) if was_held or is_nearly_complete else priority
