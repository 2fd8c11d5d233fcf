"""The tree of relays: one relay per node, a tree of nodes in each region, one crossing between regions.

- A node's relay is the holder whose name hashes lowest. The nodes of a region stand in the order of their hashes, and
  the node at place i fetches from the node at place (i - 1) div FAN_OUT: a tree as flat as it can be.
- The first node of a region is its gateway: it fetches from a node of the home region, where the broker is, chosen by
  rendezvous, or from the broker where there is none. The first node at home fetches from the broker.
- An edge leads to a node that hashes lower in the same region, or home, whatever each node knows about the others. So
  there is no circle among nodes that serve, even while views differ.
- A node that comes or goes changes nothing for those above it. Of the others about one in five gets another parent,
  which costs it a connection; nothing else is kept between the two ends of an edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from ..format.manifest import Holder

FAN_OUT = 4  # nodes of a region that fetch from one

Place = tuple[str, str]  # region, node


def ancestors(me: Holder, holders: Iterable[Holder], *, home_region: str = "") -> list[Holder]:
    """Return the relays above my node, nearest first; behind the last of them is the broker.

    Args:
        me: any process of the node; it may be among the holders or not. A node that serves nobody stands last.
        holders: all that are known; those without an address serve nobody.
        home_region: where the broker is.

    Returns:
        Holders of other nodes; empty when this node fetches from the broker.
    """
    relays = _relays(holders)
    here = _place(me)
    places = sorted(relays if here in relays or not me.address else {*relays, here}, key=_rank)
    near = [place for place in places if place[0] == here[0]]
    above = _climb(near if here in near else [*near, here], here)
    home = [place for place in places if place[0] == home_region]
    if here[0] != home_region and home:
        door = min(home, key=lambda place: _hash(here[0], *place))  # the region's, not the node's: one crossing
        above += [door, *_climb(home, door)]
    return [relays[place] for place in above]


def _relays(holders: Iterable[Holder]) -> dict[Place, Holder]:
    """Choose the relay of each node among its holders that serve."""
    relays: dict[Place, Holder] = {}
    for holder in holders:
        known = relays.get(_place(holder))
        if holder.address and (known is None or _hash(holder.holder_id) < _hash(known.holder_id)):
            relays[_place(holder)] = holder
    return relays


def _climb(order: Sequence[Place], start: Place) -> list[Place]:
    """Return the places above `start` in the tree over `order`, nearest first."""
    above = []
    index = order.index(start)
    while index > 0:
        index = (index - 1) // FAN_OUT
        above.append(order[index])
    return above


def _place(holder: Holder) -> Place:
    """Return a holder's place; a holder that names no node is a node by itself."""
    return holder.region, holder.node or holder.holder_id


def _rank(place: Place) -> tuple[int, Place]:
    return _hash(*place), place


def _hash(*names: str) -> int:
    return xxhash.xxh3_64_intdigest("\0".join(names).encode())
