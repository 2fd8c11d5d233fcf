"""The chain of keyframes and deltas: the cheapest way, bounded, and never cut under a reader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.errors import BrokerError, ChainBroken, VersionConflict
from rollfab.fabric.rules import publish
from rollfab.fabric.rules.chain import DELTA, GRACE_COUNT, KEYFRAME, Link, garbage, keyframe_due, plan
from rollfab.fabric.rules.publish import HeadFacts, may_advance, may_put, refusal


def link(version: int, base: int = -1, *, size: int = 10, epoch: int = 1) -> Link:
    kind = KEYFRAME if base < 0 else DELTA
    return Link(version=version, base_version=base, kind=kind, epoch=epoch, payload_bytes=size, chunk_count=1)


CHAIN = [link(0, size=100), link(1, 0), link(2, 1), link(3, 2), link(3, size=100), link(4, 3), link(5, 4)]


@pytest.mark.parametrize(
    ("have", "goal", "expected"),
    [
        (4, 5, [5]),
        (2, 5, [3, 4, 5]),
        (5, 5, []),
        (None, 0, [0]),
        (None, 2, [0, 1, 2]),
        (None, 5, [3, 4, 5]),
        (77, 5, [3, 4, 5]),  # ahead of the head: what it holds is of no use
    ],
)
def test_the_plan_is_the_cheapest_way(have: int | None, goal: int, expected: list[int]) -> None:
    assert [step.version for step in plan(have, goal, CHAIN)] == expected


def test_a_keyframe_is_taken_where_the_deltas_are_more_bytes() -> None:
    links = [link(0, size=100), link(1, 0, size=60), link(2, 1, size=60), link(2, size=100)]

    assert [step.kind for step in plan(0, 2, links)] == [KEYFRAME]
    assert [step.kind for step in plan(1, 2, links)] == [DELTA]


def test_a_link_that_skips_versions_is_taken_where_it_is_cheaper() -> None:
    links = [*CHAIN, link(5, 1, size=15)]

    assert [(step.base_version, step.version) for step in plan(1, 5, links)] == [(1, 5)]
    assert [(step.base_version, step.version) for step in plan(4, 5, links)] == [(4, 5)]


def test_a_gap_in_the_chain_is_an_error() -> None:
    with pytest.raises(ChainBroken, match="from version 0 to 2"):
        plan(0, 2, [link(2, 1)])


def test_a_keyframe_is_due_when_the_deltas_weigh_as_much() -> None:
    links = [link(0, size=25), link(1, 0), link(2, 1)]

    assert keyframe_due(0, [])
    assert not keyframe_due(2, links)
    assert keyframe_due(3, [*links, link(3, 2)])
    assert keyframe_due(2, links, delta_count_max=2)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What a publisher meets: (step or restart, bytes of its delta)."""
    kinds = st.sampled_from(["step", "step", "step", "step", "step", "step", "restart"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 120)), min_size=1, max_size=120))


@given(histories())
def test_a_life_of_publishing_stays_bounded_and_readable(history: list[tuple[str, int]]) -> None:
    # Given a keyframe of 100 bytes and a publisher that follows the rules
    links: list[Link] = [link(0, size=100)]
    largest = 0
    for version, (event, size) in enumerate(history, start=1):
        if event == "restart":
            links.append(link(version, size=100))
        else:
            links.append(link(version, version - 1, size=size))
            largest = max(largest, size)
            if keyframe_due(version, links):
                links.append(link(version, size=100))

        # When it cleans up
        dropped = garbage(version, links)
        links = [item for item in links if item not in dropped]

        # Then what is held is bounded, a newcomer's way too, and a receiver that kept up finds its delta
        assert sum(item.payload_bytes for item in links) <= 4 * 100 + 2 * largest
        newcomer = plan(None, version, links)
        assert newcomer[0].kind == KEYFRAME
        assert sum(step.payload_bytes for step in newcomer) <= 2 * 100 + largest
        newest = max(item.version for item in links if item.kind == KEYFRAME)
        for have in range(max(newest, version - 3), version):
            assert plan(have, version, links)
        if event == "step":
            assert plan(version - 1, version, links)


def test_the_older_chain_is_kept_for_a_while() -> None:
    links = [link(0), link(1, 0), link(1), *(link(version, version - 1) for version in range(2, 2 + GRACE_COUNT))]

    assert garbage(1, links) == []
    assert garbage(GRACE_COUNT, links) == []
    assert {(item.version, item.kind) for item in garbage(1 + GRACE_COUNT, links)} == {(0, KEYFRAME), (1, DELTA)}


HEAD = HeadFacts(version=4, epoch=2, kind=DELTA, moved_by=2)


@pytest.mark.parametrize(
    ("candidate", "is_known", "code"),
    [
        (link(5, 4, epoch=2), True, publish.GRANTED),
        (link(9, epoch=2), True, publish.GRANTED),
        (link(5, 4, epoch=2), False, publish.NO_MANIFEST),
        (link(5, 3, epoch=2), True, publish.WRONG_BASE),
        (link(4, 3, epoch=2), True, publish.ALREADY),
        (link(4, epoch=2), True, publish.NOT_NEWER),
        (link(3, 2, epoch=2), True, publish.NOT_NEWER),
        (link(5, 4, epoch=1), True, publish.TAKEN_OVER),
        (link(5, 4, epoch=3), True, publish.TAKEN_OVER),
    ],
)
def test_the_head_moves_up_by_its_publisher_only(candidate: Link, is_known: bool, code: int) -> None:
    assert may_advance(HEAD, candidate, is_known=is_known) == code


@pytest.mark.parametrize(
    ("candidate", "is_known", "is_same", "code"),
    [
        (link(5, 4, epoch=2), False, False, publish.GRANTED),
        (link(5, 4, epoch=2), True, False, publish.GRANTED),  # never was the head: may be replaced
        (link(4, epoch=2), False, False, publish.GRANTED),
        (link(4, epoch=2), True, True, publish.ALREADY),
        (link(4, epoch=2), True, False, publish.OTHER_CONTENT),
        (link(4, 3, epoch=2), True, False, publish.OTHER_CONTENT),
        (link(3, epoch=2), False, False, publish.OTHER_CONTENT),
        (link(5, 4, epoch=1), False, False, publish.TAKEN_OVER),
    ],
)
def test_what_was_published_never_changes(candidate: Link, is_known: bool, is_same: bool, code: int) -> None:
    assert may_put(HEAD, candidate, is_known=is_known, is_same=is_same) == code


def test_a_refusal_says_who_and_what_next() -> None:
    old = link(5, 4, epoch=1)

    taken = refusal(publish.TAKEN_OVER, "r", old, head_version=4, epoch=2)
    lost = refusal(publish.TAKEN_OVER, "r", old, head_version=-1, epoch=0)
    stale = refusal(publish.NOT_NEWER, "r", old, head_version=7, epoch=1)

    assert "another publisher took over run 'r'" in str(taken)
    assert "lost its data" in str(lost)
    assert "version 5 of run 'r' is not newer than its head, version 7: publish 8 or higher" in str(stale)
    assert isinstance(taken, VersionConflict)
    assert isinstance(refusal(publish.NO_MANIFEST, "r", old, head_version=4, epoch=1), BrokerError)
