"""When a fold is worth asking for, and whom to ask."""

from __future__ import annotations

import pytest

from rollfab.fabric.rules.catch_up import ASK_COUNT_MAX, SOURCE_BYTES_MAX, folded_bytes, is_worth_asking, whom_to_ask
from rollfab.fabric.rules.chain import DELTA, JUMPS, KEYFRAME, Link
from rollfab.fabric.weights.manifest import Holder

MB = 1_000_000
HOME = "home"


def link(base_version: int, version: int, size: int, kind: str = DELTA) -> Link:
    return Link(version=version, base_version=base_version, kind=kind, epoch=1, payload_bytes=size, chunk_count=1)


def deltas(count: int, size: int) -> list[Link]:
    return [link(version, version + 1, size) for version in range(count)]


def short_jumps(count: int, size: int) -> list[Link]:
    return [link(8 * place, 8 * place + 8, size, JUMPS[0]) for place in range(count)]


def holder(name: str, version: int, region: str = HOME, *, node: str = "") -> Holder:
    return Holder(name, version, f"relay://secret@{name}:1", node or name, region)


@pytest.mark.parametrize(
    ("way", "measured_bytes"),
    [
        (deltas(8, 6_200_000), 23 * MB),
        (deltas(40, 6_200_000), 43 * MB),
        (short_jumps(5, 23 * MB), 43 * MB),
        (short_jumps(8, 23 * MB), 55 * MB),
    ],
)
def test_the_estimate_is_near_what_real_updates_have_and_not_below(way: list[Link], measured_bytes: int) -> None:
    assert 0.9 <= folded_bytes(way) / measured_bytes <= 1.5


@pytest.mark.parametrize(
    ("way", "missing_fraction", "expected"),
    [
        (short_jumps(5, 23 * MB), 1.0, True),
        (deltas(7, 6_200_000), 1.0, True),
        (deltas(2, 6_200_000), 1.0, False),  # it would spare little
        (short_jumps(1, 200 * MB), 1.0, False),  # nothing to fold
        ([], 1.0, False),
        (short_jumps(5, 23 * MB), 0.5, False),  # the node has half of it
        ([link(-1, 7, 676 * MB, KEYFRAME), *deltas(40, 6_200_000)], 1.0, False),
        (short_jumps(8, SOURCE_BYTES_MAX // 7), 1.0, False),  # too much for a relay
    ],
)
def test_a_fold_is_asked_for_where_it_spares_enough(way: list[Link], missing_fraction: float, expected: bool) -> None:
    missing_bytes = int(missing_fraction * sum(each.payload_bytes for each in way))

    assert is_worth_asking(way, missing_bytes, saved_bytes_min=16 * MB) == expected


def test_relays_that_saw_the_version_or_are_near_the_broker_are_asked_and_never_our_own_node() -> None:
    me = holder("me", 3, "east", node="mine")
    near_behind, near = holder("near-behind", 3, "east"), holder("near", 43, "east")
    door_behind, far_behind, far = holder("door", 3), holder("far-behind", 42, "west"), holder("far", 44, "west")
    sibling, mute = holder("sibling", 43, "east", node="mine"), Holder("mute", 43, "", "mute", "east")
    known = [me, far, near_behind, sibling, mute, door_behind, far_behind, near]

    asked = whom_to_ask(me, known, 43, home_region=HOME)

    assert set(asked) == {near, door_behind, far}
    assert asked.index(near) < asked.index(far)


def test_all_processes_of_a_node_ask_the_same_few_relays() -> None:
    known = [holder(f"peer-{place}", 43) for place in range(20)]

    asked = [whom_to_ask(holder(f"me-{place}", 3, node="mine"), known, 43, home_region=HOME) for place in range(8)]

    assert len(asked[0]) == ASK_COUNT_MAX
    assert asked == [asked[0]] * 8
