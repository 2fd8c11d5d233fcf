"""Who fetches from whom, over any set of nodes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.delivery.tree import FAN_OUT, ancestors
from rollfab.fabric.format.manifest import Holder

HOME = "home"
REGIONS = [HOME, "east", "west"]


def holder(node: str, region: str, *, name: str = "", version: int = 0) -> Holder:
    name = name or f"{region}-{node}-0"
    return Holder(name, version, f"relay://secret@{name}:1", node, region)


nodes = st.lists(
    st.tuples(st.integers(0, 400).map(str), st.sampled_from(REGIONS)), min_size=1, max_size=60, unique=True
)


def parent_of(me: Holder, holders: list[Holder]) -> Holder | None:
    return next(iter(ancestors(me, holders, home_region=HOME)), None)


@given(nodes)
def test_every_way_leads_to_the_broker_in_few_steps(places: list[tuple[str, str]]) -> None:
    holders = [holder(*place) for place in places]

    for me in holders:
        above = ancestors(me, holders, home_region=HOME)

        assert len({*above, me}) == len(above) + 1
        levels = [
            math.ceil(math.log(max(1, sum(other.region == region for other in holders)), FAN_OUT)) + 1
            for region in {me.region, HOME}
        ]
        assert len(above) <= sum(levels)
        if above:
            assert ancestors(above[0], holders, home_region=HOME) == above[1:]


@given(nodes)
def test_each_region_is_crossed_once_and_no_relay_feeds_many(places: list[tuple[str, str]]) -> None:
    holders = [holder(*place) for place in places]

    edges = [(me, parent_of(me, holders)) for me in holders]

    for region in {me.region for me in holders}:
        entering = [me for me, parent in edges if me.region == region and (parent is None or parent.region != region)]
        assert len(entering) == 1
    for relay in holders:
        inside = [me for me, parent in edges if parent == relay and me.region == relay.region]
        assert len(inside) <= FAN_OUT
    if any(me.region == HOME for me in holders):
        assert [me.region for me, parent in edges if parent is None] == [HOME]


@given(nodes, st.data())
def test_there_is_no_circle_even_while_views_differ(places: list[tuple[str, str]], data: st.DataObject) -> None:
    holders = [holder(*place) for place in places]

    parents = {}
    for me in holders:
        view = data.draw(st.lists(st.sampled_from(holders), unique=True)) if len(holders) < 12 else holders[::2]
        parents[me] = parent_of(me, view)

    for me in holders:
        seen, at = {me}, parents[me]
        while at is not None:
            assert at not in seen
            seen.add(at)
            at = parents[at]


@given(nodes)
def test_who_comes_changes_nothing_for_those_before(places: list[tuple[str, str]]) -> None:
    holders = [holder(node, HOME) for node in dict(places)]
    *before, comer = holders

    unchanged = [me for me in before if parent_of(me, before) == parent_of(me, holders)]

    for relay in ancestors(comer, holders, home_region=HOME):
        assert relay in unchanged


def test_a_node_has_one_relay_and_never_asks_itself() -> None:
    here = [holder("a", HOME, name=f"a{index}") for index in range(3)]
    there = [holder("b", HOME, name=f"b{index}") for index in range(3)]

    chains = [ancestors(me, [*here, *there], home_region=HOME) for me in (*here, *there)]

    assert sorted(len(chain) for chain in chains) == [0, 0, 0, 1, 1, 1]
    assert len({chain[0] for chain in chains if chain}) == 1


def test_who_serves_nobody_is_nobodys_parent_but_has_one() -> None:
    mute = Holder("mute", 3, "", "b", HOME)

    assert ancestors(mute, [holder("a", HOME), mute], home_region=HOME) == [holder("a", HOME)]
    assert ancestors(holder("a", HOME), [holder("a", HOME), mute], home_region=HOME) == []


def test_without_a_relay_at_home_a_region_has_one_door_to_the_broker() -> None:
    holders = [holder(str(index), "east") for index in range(9)]

    assert sum(parent_of(me, holders) is None for me in holders) == 1
