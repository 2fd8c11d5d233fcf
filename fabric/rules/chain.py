"""Which manifests lead from one version to another, when a keyframe is due, and what may be deleted.

A link is a manifest seen from afar. A delta leads from its base to its version; a keyframe leads from nothing to its
version. One version may have both: those who hold the base take the delta, those who join late the keyframe.

- `plan` is a shortest path by bytes, so links that skip versions need no other rule.
- A keyframe is due when the deltas since the last one reach its bytes: a late joiner never fetches much more than
  two keyframes' worth.
- The broker holds at most two keyframes and their deltas: with K the bytes of a keyframe and D those of the largest
  delta, no more than 4 K + 2 D, and 1 K + D of it leaves when the newer keyframe is `GRACE_COUNT` versions old. While
  a keyframe is being written it comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ChainBroken

KEYFRAME = "keyframe"
DELTA = "delta"
DELTA_COUNT_MAX = 64  # a joiner's round trips and digests, whatever the bytes
GRACE_COUNT = 8  # versions for which readers of the older keyframe may still be fetching it


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A manifest's place in the chain. base_version is -1 for a keyframe; epoch is its publisher's."""

    version: int
    base_version: int
    kind: str
    epoch: int
    payload_bytes: int
    chunk_count: int


def plan(have: int | None, goal: int, links: Sequence[Link]) -> list[Link]:
    """The cheapest links from the version a receiver holds to `goal`, in the order to apply them.

    Args:
        have: version held, None for nothing usable.
        goal: version wanted.
        links: manifests the broker holds, in any order; those above `goal` are not looked at.

    Returns:
        Links; empty when have == goal. A plan that starts with a keyframe does not need `have`.

    Raises:
        ChainBroken: no way leads there.
    """
    if have == goal:
        return []
    cost: dict[int, int] = {} if have is None else {have: 0}
    last: dict[int, Link] = {}
    forward = (link for link in links if link.base_version < link.version <= goal)  # any other could be a circle
    usable = sorted(forward, key=lambda link: link.version)
    for link in usable:
        base_cost = 0 if link.kind == KEYFRAME else cost.get(link.base_version)
        if base_cost is None or link.version == have:
            continue
        total = base_cost + link.payload_bytes
        if link.version not in cost or total < cost[link.version]:
            cost[link.version] = total
            last[link.version] = link
    if goal not in last:
        raise ChainBroken(
            f"no chain of held weights leads from version {have} to {goal}: publish a keyframe", have=have, goal=goal
        )
    steps = [last[goal]]
    while steps[-1].kind != KEYFRAME and steps[-1].base_version != have:
        steps.append(last[steps[-1].base_version])
    return steps[::-1]


def keyframe_due(head: int, links: Sequence[Link], *, delta_count_max: int = DELTA_COUNT_MAX) -> bool:
    """Whether a keyframe of `head` should be published beside its delta.

    True when none is held, or the cheapest way from the newest one to `head` has as many bytes as it has, or more than
    `delta_count_max` deltas.
    """
    keyframe = newest_keyframe(head, links)
    if keyframe is None:
        return True
    try:
        deltas = plan(keyframe.version, head, links)
    except ChainBroken:
        return True
    return len(deltas) >= delta_count_max or sum(link.payload_bytes for link in deltas) > keyframe.payload_bytes


def newest_keyframe(head: int, links: Sequence[Link]) -> Link | None:
    """The keyframe with the highest version not above `head`."""
    keyframes = [link for link in links if link.kind == KEYFRAME and link.version <= head]
    return max(keyframes, key=lambda link: link.version, default=None)


def garbage(head: int, links: Sequence[Link], *, grace_count: int = GRACE_COUNT) -> list[Link]:
    """Links that may be deleted now; never one that a receiver of the newest keyframe's chain needs.

    Kept are the newest keyframe and everything after it, and the keyframe before it with its deltas until the newest
    is `grace_count` versions old. A receiver further behind finds the newest keyframe.
    """
    newest = newest_keyframe(head, links)
    if newest is None:
        return []
    oldest_kept = newest.version
    if head - newest.version < grace_count:
        before = newest_keyframe(newest.version - 1, links)
        oldest_kept = before.version if before else min(link.version for link in links)
    return [link for link in links if link.version < oldest_kept or _leads_only_into(link, oldest_kept)]


def _leads_only_into(link: Link, version: int) -> bool:
    """A delta into the oldest kept keyframe's own version: nobody holds its base any more in a kept chain."""
    return link.version == version and link.kind != KEYFRAME
