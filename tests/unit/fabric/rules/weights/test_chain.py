"""The chain of keyframes, deltas and jumps: the cheapest way, bounded, and never cut under a reader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import BrokerError, ChainBroken, VersionConflict
from rollfab.fabric.rules.weights import publish
from rollfab.fabric.rules.weights.chain import (
    DELTA,
    FOLD_COUNT,
    GRACE_COUNT,
    JUMPS,
    KEYFRAME,
    Jump,
    Link,
    garbage,
    jumps_due,
    keyframe_due,
    newest_keyframe,
    plan,
    readable_versions,
)
from rollfab.fabric.rules.weights.publish import refusal
from tests.support.tried import tried

SHORT, LONG = JUMPS


def link(version: int, base: int = -1, *, size: int = 10, epoch: int = 1, kind: str = "") -> Link:
    kind = kind or (KEYFRAME if base < 0 else DELTA)
    return Link(version=version, base_version=base, kind=kind, epoch=epoch, payload_bytes=size, chunk_count=1)


def deltas(first: int, last: int, *, size: int = 10) -> list[Link]:
    """Deltas into the versions `first` to `last`."""
    return [link(version, version - 1, size=size) for version in range(first, last + 1)]


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


def test_a_gap_in_the_chain_is_an_error() -> None:
    with pytest.raises(ChainBroken, match="from version 0 to 2"):
        plan(0, 2, [link(2, 1)])


def test_of_ways_with_the_same_bytes_the_shorter_is_taken() -> None:
    links = [link(1, 0, size=0), link(2, 1, size=0), link(2, 0, size=0, kind=SHORT)]

    assert [step.kind for step in plan(0, 2, links)] == [SHORT]
    assert [step.kind for step in plan(0, 2, links[::-1])] == [SHORT]


def test_a_keyframe_is_due_when_the_deltas_weigh_as_much() -> None:
    links = [link(0, size=25), link(1, 0), link(2, 1)]

    assert keyframe_due(0, [])
    assert not keyframe_due(2, links)
    assert keyframe_due(3, [*links, link(3, 2)])
    assert not keyframe_due(2, links, link_count_max=2)
    assert keyframe_due(2, links, link_count_max=1)
    assert not keyframe_due(3, [*links, link(3, 2), link(3, 0, size=25, kind=SHORT)])


def spans(jumps: list[Jump]) -> list[tuple[str, int, int]]:
    return [(jump.kind, jump.base_version, jump.version) for jump in jumps]


def test_eight_jumps_make_a_longer_one_due() -> None:
    shorts = [link(8 * count, 8 * count - 8, kind=SHORT) for count in range(1, 9)]
    links = [link(0), *deltas(1, 64)]

    assert spans(jumps_due(64, [*links, *shorts])) == [(LONG, 0, 64)]
    assert jumps_due(64, [*links, *shorts, link(64, 0, kind=LONG)]) == []
    assert spans(jumps_due(66, [*shorts, *deltas(65, 66)])) == [(LONG, 0, 64)]  # also where it failed at first
    assert jumps_due(66, [*shorts, *deltas(66, 66)]) == []  # a gap: they do not lead to the head
    late = [link(64, 0, kind=LONG), *deltas(60, 72)]  # the shorts are gone, a receiver is at 59
    assert spans(jumps_due(72, late)) == [(SHORT, 64, 72)]


def test_counting_begins_anew_at_a_keyframe_in_the_chain() -> None:
    restarted = [link(0), *deltas(1, 5), link(6, epoch=2), *deltas(7, 13)]

    assert jumps_due(13, restarted) == []
    assert spans(jumps_due(14, [*restarted, link(14, 13)])) == [(SHORT, 6, 14)]
    beside = [link(0), *deltas(1, 12), link(5)]
    assert jumps_due(12, beside) == []
    assert spans(jumps_due(13, [*beside, link(13, 12)])) == [(SHORT, 5, 13)]


@dataclass
class Life:
    """A publisher that follows the rules. jump_bytes: of each kind; by what they fold where None."""

    key_bytes: int
    jump_bytes: tuple[int, int] | None = None
    head: int = -1
    published_bytes: int = 0
    links: list[Link] = field(default_factory=list)
    held_versions: set[int] = field(default_factory=set)
    seen: set[tuple[str, int, int]] = field(default_factory=set)
    keyframes: list[int] = field(default_factory=list)
    restarts: set[int] = field(default_factory=set)
    can_fold: bool = True

    def restart(self, version: int) -> None:
        self.restarts.add(version)
        self.head = version
        self.keyframe()

    def step(self, version: int, size: int, fold_fraction: float = 0.0) -> None:
        """A delta, and all that is due beside it."""
        self.put(link(version, self.head, size=size))
        self.head = version
        while self.can_fold and (due := jumps_due(version, self.links)):
            for jump in due:
                self.put(link(jump.version, jump.base_version, size=self.size_of(jump, fold_fraction), kind=jump.kind))
        if keyframe_due(version, self.links):
            self.keyframe()

    def keyframe(self) -> None:
        self.put(link(self.head, size=self.key_bytes))
        self.keyframes.append(self.head)

    def put(self, new: Link) -> None:
        self.links.append(new)
        self.published_bytes += new.payload_bytes
        name = (new.kind, new.base_version, new.version)
        assert name not in self.seen, "published twice"
        self.seen.add(name)

    def clean(self) -> None:
        dropped = set(garbage(self.head, self.links, held_versions=self.held_versions))
        self.links = [item for item in self.links if item not in dropped]

    def size_of(self, jump: Jump, fold_fraction: float) -> int:
        assert len(jump.sources) == FOLD_COUNT
        assert all(source in self.links for source in jump.sources)
        bases = [jump.base_version, *(source.version for source in jump.sources)]
        assert [source.base_version for source in jump.sources] == bases[:-1] and bases[-1] == jump.version
        if self.jump_bytes is not None:
            return self.jump_bytes[JUMPS.index(jump.kind)]
        sizes = [source.payload_bytes for source in jump.sources]
        return max(sizes) + int((sum(sizes) - max(sizes)) * fold_fraction)

    def bytes_of(self, kind: str) -> int:
        return sum(item.payload_bytes for item in self.links if kind in ("", item.kind))


def cost(have: int | None, life: Life) -> int:
    return sum(step.payload_bytes for step in plan(have, life.head, life.links))


def assert_readable(life: Life, versions: Iterable[int]) -> None:
    """These can be read by a newcomer, and of the others just those that are said to be."""
    readable = readable_versions(life.head, life.links)
    assert set(versions) <= readable
    for version in {item.version for item in life.links}:
        if version in readable:
            assert plan(None, version, life.links)
        else:
            with pytest.raises(ChainBroken):
                plan(None, version, life.links)


SIZES = st.sampled_from([0, 1, 2, 4, 9, 30, 80, 99, 100, 101, 130])
EVENTS = st.one_of(
    st.tuples(st.just("step"), SIZES, st.integers(1, 3)),
    st.tuples(st.just("steps"), SIZES, st.integers(1, 70)),
    st.tuples(st.just("steps"), SIZES, st.integers(1, 20)),
    st.tuples(st.just("join"), st.just(0), st.integers(0, 40)),
    st.tuples(st.just("leave"), st.just(0), st.integers(0, 40)),
    st.tuples(st.just("restart"), st.just(0), st.integers(1, 3)),
    st.tuples(st.just("fold"), st.just(0), st.integers(0, 1)),
)


@settings(max_examples=tried(60), deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=25), st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5]))
def test_a_life_of_publishing_stays_bounded_and_readable(
    history: list[tuple[str, int, int]], fold_fraction: float
) -> None:
    # Given a run whose keyframes have 100 bytes, receivers that come, stay behind and go, and trainers that start again
    life = Life(100)
    life.restart(0)
    largest = dict.fromkeys((DELTA, *JUMPS), 0)
    for event, size, count in history:
        if event == "join":
            life.held_versions.add(max(-1, life.head - count))
        elif event == "leave":
            life.held_versions = {version for version in life.held_versions if version < life.head - count}
        elif event == "fold":  # for a while folding fails
            life.can_fold = bool(count)
        for _ in range({"steps": count, "step": 1, "restart": 1}.get(event, 0)):
            if event == "restart":
                life.restart(life.head + count)
            else:
                life.step(life.head + (count if event == "step" else 1), size, fold_fraction)
            for item in life.links:
                largest[item.kind] = max(largest.get(item.kind, 0), item.payload_bytes)
            newest = newest_keyframe(life.head, life.links)
            assert newest is not None
            joiner = cost(newest.version, life)
            near = max((version for version in life.held_versions if version >= 0), default=life.head)
            near_cost = cost(near, life)
            last = sorted({item.version for item in life.links})[-GRACE_COUNT - 1 :]
            could_be_read = readable_versions(life.head, life.links) & set(last)

            # When it cleans up
            life.clean()

            # Then what is held is bounded, and so is a joiner's way, which has lost nothing
            bound = 4 * 100 + 2 * GRACE_COUNT * largest[DELTA] + largest[SHORT] + largest[LONG]
            bound += 100 * len(life.restarts & set(last))  # keyframes that were not due
            assert life.bytes_of("") <= bound or fold_fraction > 1  # a jump larger than what it folds: none is
            assert joiner == cost(newest.version, life) <= 100
            assert plan(None, life.head, life.links)
            # And the last versions can all be read, as what says so says
            assert set(last) == could_be_read
            assert_readable(life, last)
            # And every receiver still finds one; the one that is least far behind, the cheapest
            for version in life.held_versions:
                assert plan(None if version < 0 else version, life.head, life.links)
            assert cost(near, life) == near_cost


def test_a_model_of_half_a_billion_parameters_is_published_for_an_eightieth_of_its_bytes() -> None:
    dense_bytes, megabyte = 988_000_000, 1_000_000
    life = Life(676 * megabyte, (23 * megabyte, 55 * megabyte))
    life.restart(0)
    held_max = 0

    for version in range(1, 1300):
        if version == 256:
            ratio = 256 * dense_bytes / life.published_bytes
        life.step(version, 6_200_000)
        life.clean()
        held_max = max(held_max, life.bytes_of(""))

    assert ratio >= 60
    assert round(ratio) == 81  # as keyframe_due says, and …
    assert life.keyframes == [0, 631, 1262]
    assert held_max < 2_100 * megabyte  # … as garbage says


def test_a_jump_that_is_of_no_use_is_still_not_made_twice() -> None:
    life = Life(10_000, (5, 500))
    life.restart(0)

    for version in range(1, 200):
        life.step(version, 10)
        life.clean()

    assert {name for name in life.seen if name[0] == LONG} == {(LONG, 0, 64), (LONG, 64, 128), (LONG, 128, 192)}


def test_the_older_chain_is_kept_for_a_while() -> None:
    links = [link(0), link(1, 0), link(1), *deltas(2, 1 + GRACE_COUNT)]

    assert garbage(1, links) == []
    assert garbage(GRACE_COUNT, links) == []
    assert {(item.version, item.kind) for item in garbage(1 + GRACE_COUNT, links)} == {(0, KEYFRAME), (1, DELTA)}


def test_what_a_jump_replaces_goes_when_nobody_can_be_reading_it_any_more() -> None:
    links = [link(0, size=100), *deltas(1, 16), link(8, 0, size=20, kind=SHORT)]

    assert garbage(15, links[:16] + links[17:]) == []  # head 7 may still be wanted
    assert {item.version for item in garbage(16, [*links, link(16, 8, size=20, kind=SHORT)])} == set(range(1, 9))


def test_a_receiver_keeps_its_way_and_one_too_far_behind_takes_the_keyframe() -> None:
    links = [link(0, size=100), *deltas(1, 40), *(link(end, end - 8, size=20, kind=SHORT) for end in range(8, 41, 8))]
    way = [(DELTA, 6), (DELTA, 7), (DELTA, 8)]

    def left(*held: int) -> list[Link]:
        gone = garbage(40, links, held_versions=held)
        return [item for item in links if item not in gone]

    assert not any(item.kind == DELTA and item.version <= 32 for item in left())
    assert [(item.kind, item.version) for item in left(5) if item.kind == DELTA and item.version <= 32] == way
    assert left(39) == left(-1) == left()
    crowd = left(*range(1, 32))
    assert sum(item.payload_bytes for item in crowd) <= sum(item.payload_bytes for item in left()) + 100
    assert [step.kind for step in plan(25, 40, crowd)] == [DELTA] * 7 + [SHORT]
    assert plan(1, 40, crowd)[0].kind == KEYFRAME


def test_jumps_that_a_longer_one_will_fold_stay_though_no_way_takes_them() -> None:
    shorts = [link(end, end - 8, size=100, kind=SHORT) for end in range(8, 41, 8)]
    links = [link(0, size=1000), *deltas(1, 40, size=1), *shorts]

    assert [item for item in garbage(40, links) if item in shorts] == []


def test_of_the_long_jumps_before_a_keyframe_the_last_alone_stays() -> None:
    longs = [link(64, 0, kind=LONG), link(128, 64, kind=LONG)]
    links = [link(0, size=1000), *deltas(1, 200), *longs, link(190, size=50)]

    assert [item for item in garbage(200, links) if item in longs] == longs[:1]


def test_the_first_version_is_held_as_any_other() -> None:
    links = [link(0, size=100), *deltas(1, 40, size=1), link(40, size=100)]

    assert {item.version for item in garbage(40, links) if item.kind == DELTA} == set()
    later = [*links, *deltas(41, 60, size=1)]
    assert {item.version for item in garbage(60, later) if item.kind == DELTA} == set(range(1, 41))
    assert {item.version for item in garbage(60, later, held_versions=[0]) if item.kind == DELTA} == set()


def test_nothing_is_kept_for_a_receiver_that_a_keyframe_brings_there_for_less() -> None:
    last = 30 + GRACE_COUNT // 2
    links = [link(0, size=100), *deltas(1, last, size=2), link(20, size=5), link(30, size=100)]

    gone = garbage(last, links, held_versions=[10])

    assert {item.version for item in gone if item.kind == DELTA} == set(range(1, 21))


def test_a_refusal_says_who_and_what_next() -> None:
    old = link(5, 4, epoch=1)

    taken = refusal(publish.TAKEN_OVER, "r", old, head_version=4, epoch=2)
    lost = refusal(publish.TAKEN_OVER, "r", old, head_version=-1, epoch=0)
    stale = refusal(publish.NOT_NEWER, "r", old, head_version=7, epoch=1)

    assert "another publisher took over run 'r'" in str(taken)
    assert "lost its data" in str(lost)
    beside = refusal(publish.NOT_BESIDE, "r", link(5, 0, kind=SHORT), head_version=4, epoch=1)
    assert "jump-8 from version 0 to 5 of run 'r'" in str(beside) and "head is 4" in str(beside)
    assert "version 5 of run 'r' is not newer than its head, version 7: publish 8 or higher" in str(stale)
    assert isinstance(taken, VersionConflict)
    assert isinstance(refusal(publish.NO_MANIFEST, "r", old, head_version=4, epoch=1), BrokerError)
