"""Plans which manifests lead from one version to another, when jumps and keyframes are due, and what may be deleted.

A link is a manifest seen from afar. A delta leads from the version before to its own, a jump over several to the same
version as the last delta it folds; a keyframe leads from nothing to its version. So several links may lead into one
version, told apart by kind and base.

- `plan` is a shortest path by bytes, so links that skip versions need no other rule.
- Every FOLD_COUNT deltas are folded into a jump, every FOLD_COUNT of those into a longer one; counting begins anew at
  every keyframe. Links are counted, never version numbers, for a trainer may skip some.
- A keyframe is due when it is cheaper than the way from the last one; `keyframe_due` says how rare that is.
- Deleted is what no reader needs; `garbage` says what that leaves on the broker. The last versions can all be read,
  whatever a version changes; what is held of older ones serves receivers that hold their bases.
- All rules look only at the links that are held, so a publisher that takes over goes on where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ...contract.errors import ChainBroken

KEYFRAME = "keyframe"
DELTA = "delta"
JUMPS = ("jump-8", "jump-64")  # each folds FOLD_COUNT of the kind before it
FOLD_COUNT = 8
LINK_COUNT_MAX = 64  # a joiner's round trips and digests, whatever the bytes; at 0.5 B parameters it has at most 24
GRACE_COUNT = 8  # versions before the head that can be read, also by who is still on the way to one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A manifest's place in the chain. base_version is -1 for a keyframe; epoch is its publisher's."""

    version: int
    base_version: int
    kind: str
    epoch: int
    payload_bytes: int
    chunk_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A jump that should be made. sources: the held links that it folds, in order, end to end."""

    kind: str
    base_version: int
    version: int
    sources: tuple[Link, ...]


def plan(have: int | None, goal: int, links: Sequence[Link]) -> list[Link]:
    """Find the cheapest links from the version a receiver holds to `goal`, in the order to apply them.

    Of ways with the same bytes, one with the fewest links.

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
    cost: dict[int, tuple[int, int]] = {} if have is None else {have: (0, 0)}
    last: dict[int, Link] = {}
    forward = (link for link in links if link.base_version < link.version <= goal)  # any other could be a circle
    usable = sorted(forward, key=lambda link: link.version)
    for link in usable:
        base_cost = (0, 0) if link.kind == KEYFRAME else cost.get(link.base_version)
        if base_cost is None or link.version == have:
            continue
        total = (base_cost[0] + link.payload_bytes, base_cost[1] + 1)
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


def jumps_due(head: int, links: Sequence[Link]) -> list[Jump]:
    """List the jumps that should be published now beside what they fold, in the order to publish them.

    The same links always give the same jumps, and never one that is held. Ask again when they are out, and before a
    keyframe of the same version is: the last short jump may complete a longer one.
    """
    jumps = []
    for kind, sources in zip(JUMPS, _unfolded(head, links), strict=True):
        for start in range(0, len(sources) - FOLD_COUNT + 1, FOLD_COUNT):
            part = tuple(sources[start : start + FOLD_COUNT])
            jumps.append(Jump(kind=kind, base_version=part[0].base_version, version=part[-1].version, sources=part))
    return jumps


def keyframe_due(head: int, links: Sequence[Link], *, link_count_max: int = LINK_COUNT_MAX) -> bool:
    """Tell whether a keyframe of `head` should be published beside its delta.

    True when none is held, or the cheapest way from the newest one to `head` has more bytes than it, or more than
    `link_count_max` links.

    0.5 B parameters at 1 % density: keyframe 676 MB, deltas 6.2 MB, jumps 23 and 55 MB. The way has at most 7 deltas,
    7 short jumps and n long ones: it outgrows the keyframe with the ninth or tenth long one, so a keyframe is published
    every 631 versions (without jumps, every 110). Bytes per version, with all of it: 6.2 + 23/8 + 55/64 + 676/631
    = 11.0 MB, 89 times under the dense 988 MB; over the first 256 versions, 81 times.
    """
    keyframe = newest_keyframe(head, links)
    if keyframe is None:
        return True
    way = way_to(keyframe.version, head, [link for link in links if link.kind != KEYFRAME])
    if not way and keyframe.version != head:
        return True
    return len(way) > link_count_max or sum(link.payload_bytes for link in way) > keyframe.payload_bytes


def newest_keyframe(head: int, links: Sequence[Link]) -> Link | None:
    """Find the keyframe with the highest version not above `head`."""
    keyframes = [link for link in links if link.kind == KEYFRAME and link.version <= head]
    return max(keyframes, key=lambda link: link.version, default=None)


def readable_versions(head: int, links: Iterable[Link]) -> set[int]:
    """Find the versions up to `head` that a newcomer can read: a chain of these links leads there from a keyframe."""
    found: set[int] = set()
    for link in sorted(links, key=lambda link: (link.version, link.kind != KEYFRAME)):
        if link.version <= head and (link.kind == KEYFRAME or link.base_version in found):
            found.add(link.version)
    return found


def garbage(head: int, links: Sequence[Link], *, held_versions: Collection[int] = ()) -> list[Link]:
    """List the links that may be deleted now: all but

    - the newest keyframe;
    - the head and the GRACE_COUNT versions before it, whole: their keyframes, deltas and jumps, and the cheapest way
      to each of them from the keyframe before it, so that all of them can be read;
    - the cheapest ways from versions that live receivers hold, those nearest to the head first, while all that only
      they need is no more bytes than the newest keyframe: whoever is further behind takes that one;
    - what coming jumps will fold, and the last long jump, for it says what was folded;
    - what is above the head: it is being published.

    With K the bytes of the largest keyframe, D of the largest delta, J of the largest jump of each kind, and jumps that
    are no larger than what they fold together, the broker holds at most 4 K + 2 GRACE_COUNT D + J8 + J64. That is the
    oldest keyframe and the way from it to the oldest of these versions (`keyframe_due`: at most K), the receivers' K,
    the last versions' deltas, and their keyframes: one, and one more for every K bytes of these deltas. A keyframe that
    is published before it is due (a trainer that starts again, a repair) comes on top while it is one of the last, and
    so does what is being published, until it is cleaned up after.
    0.5 B parameters: at most 2.9 GB; without receivers far behind, 0.7 to 2.1 GB.

    Args:
        held_versions: what live receivers hold; below 0: nothing yet.
    """
    newest = newest_keyframe(head, links)
    if newest is None:
        return []
    goals = sorted({link.version for link in links if link.version <= head})[-GRACE_COUNT - 1 :]
    steps = [link for link in links if link.kind != KEYFRAME]
    kept = {newest} | {link for link in links if link.version > goals[0]}
    for part in _unfolded(head, links):
        kept.update(part)
    long_jumps = [link for link in steps if link.kind == JUMPS[-1]]
    kept.update(sorted(long_jumps, key=lambda link: link.version)[-1:])
    for goal in goals:
        kept.update(_whole_way(goal, links, steps))
    roots = [link for link in kept if link.kind == KEYFRAME]
    room_bytes = newest.payload_bytes
    for held in sorted({version for version in held_versions if 0 <= version < goals[0]}, reverse=True):
        needed = _ways(held, goals, [*steps, *roots]) - kept
        size = sum(link.payload_bytes for link in needed)
        if size <= room_bytes:
            room_bytes -= size
            kept |= needed
    return [link for link in links if link not in kept]


def _whole_way(goal: int, links: Sequence[Link], steps: Sequence[Link]) -> list[Link]:
    """Find the way to a version from the keyframe before it, that included; from any other where it leads nowhere."""
    root = newest_keyframe(goal, links)
    if root is None or root.version == goal:
        return [] if root is None else [root]
    way = way_to(root.version, goal, steps)
    return [root, *way] if way else way_to(None, goal, links)


def _unfolded(head: int, links: Sequence[Link]) -> list[list[Link]]:
    """List, for each kind of JUMPS, the links up to `head` that it will fold, end to end, in order.

    Those since the last jump of that kind or a longer one, or since the keyframe or gap that the chain begins with.
    """
    found, at = [], head
    for level, source_kind in enumerate((DELTA, *JUMPS[:-1])):
        ends = {link.version for link in links if link.kind == KEYFRAME or link.kind in JUMPS[level:]}
        into = {link.version: link for link in links if link.kind == source_kind and link.base_version < link.version}
        steps: list[Link] = []
        while at not in ends and at in into:
            steps.append(into[at])
            at = into[at].base_version
        found.append(steps[::-1])
    return found


def _ways(have: int, goals: Iterable[int], links: Sequence[Link]) -> set[Link]:
    """Collect all links of the cheapest ways from a version to several others."""
    return {link for goal in goals for link in way_to(have, goal, links)}


def way_to(have: int | None, goal: int, links: Sequence[Link]) -> list[Link]:
    """Plan as `plan` does; empty where no way leads there."""
    try:
        return plan(have, goal, links)
    except ChainBroken:
        return []
