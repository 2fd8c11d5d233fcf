"""Whether a receiver far behind asks a relay to fold what it is missing into one version, and which relay.

- A fold is fewer bytes than its sources, as much of what changes has changed before; it costs a processor's time at
  the relay. So it is asked for where it spares enough bytes, by an estimate: what it is shows once it is made.
- What the node has already costs nothing, and is not worth asking for.
- All processes of a node ask the same relay, so that it folds once for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..weights.manifest import Holder
from .chain import KEYFRAME, Link
from .relay_tree import ancestors, peers

GROWTH = 0.6  # n versions as one have about n ** GROWTH times a delta's bytes: real ones 8 ** 0.63 and 40 ** 0.53
SOURCE_BYTES_MAX = 1 << 30  # folded at once: about a minute of one processor
ASK_COUNT_MAX = 3  # relays that may refuse before the ordinary way is taken


def folded_bytes(way: Sequence[Link]) -> int:
    """About how many bytes the links of a way have once they are folded. No keyframe is among them."""
    deltas = sum((link.version - link.base_version) ** GROWTH for link in way)
    delta_bytes = sum(link.payload_bytes for link in way) / deltas
    return int(delta_bytes * (way[-1].version - way[0].base_version) ** GROWTH)


def is_worth_asking(way: Sequence[Link], missing_bytes: int, *, saved_bytes_min: int) -> bool:
    """Whether to ask for a fold of a way.

    Args:
        way: the cheapest there is, as `plan` gives it.
        missing_bytes: of its links, what the node does not have.
        saved_bytes_min: fewer are not worth a relay's time.
    """
    if len(way) < 2 or any(link.kind == KEYFRAME for link in way):
        return False
    if sum(link.payload_bytes for link in way) > SOURCE_BYTES_MAX:
        return False
    return missing_bytes - folded_bytes(way) >= saved_bytes_min


def whom_to_ask(me: Holder, holders: Iterable[Holder], goal: int, *, home_region: str = "") -> list[Holder]:
    """Who could fold what leads to version `goal`: the relays above my node, nearest first, then other peers.

    Of these only who has that version, so that it has seen what leads there, or is near the broker.
    """
    known = list(holders)
    node = replace(me, holder_id=me.node or me.holder_id)
    order = [*ancestors(me, known, home_region=home_region), *peers(node, known, goal)]
    fit = dict.fromkeys(
        each for each in order if _node(each) != _node(me) and (each.version >= goal or each.region == home_region)
    )
    return list(fit)[:ASK_COUNT_MAX]


def _node(holder: Holder) -> tuple[str, str]:
    return holder.region, holder.node or holder.holder_id
