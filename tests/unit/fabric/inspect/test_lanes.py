"""Which run held each worker's lease when, put together from samples."""

from __future__ import annotations

from collections.abc import Sequence

from rollfab.fabric.contract.lease_plan import LeaseSample, Sample
from rollfab.fabric.inspect.lanes import GAP_MS, STRETCH_COUNT_MAX, LeaseStretch, lane_names, lanes

MINUTE_MS = 60_000
COUNTS = dict.fromkeys(
    (*("token_count", "rollout_count", "groups_waiting", "dead_count", "worker_count", "running_count"), "slot_count"),
    0,
)


def sample(minute: float, *rows: LeaseSample) -> Sample:
    return Sample(time_ms=int(minute * MINUTE_MS), leases=rows, **COUNTS)


def row(worker_id: str, minute: float, run_id: str, slots: int, guard: str = "") -> LeaseSample:
    return LeaseSample(worker_id, int(minute * MINUTE_MS), run_id, slots, guard)


def told(stretches: Sequence[LeaseStretch]) -> list[tuple[float, float, str | None, int, str | None]]:
    """In minutes."""
    return [
        (each.start_ms / MINUTE_MS, each.end_ms / MINUTE_MS, each.run_id, each.slot_count, each.guard_state)
        for each in stretches
    ]


def test_a_worker_holds_what_a_row_says_until_the_next_one_and_the_last_to_the_last_look() -> None:
    samples = [
        sample(10, row("w1", 9.5, "r1", 8), row("w2", 9.5, "", 0, "shut")),
        sample(11, row("w1", 9.5, "r1", 8), row("w1", 10.25, "r2", 4)),
        sample(12),
    ]
    one, two = lanes(samples, ["w1", "w2"], 9 * MINUTE_MS)
    assert told(one.stretches) == [(9.5, 10.25, "r1", 8, None), (10.25, 12, "r2", 4, None)]
    assert told(two.stretches) == [(9.5, 12, None, 0, "shut")]
    assert lane_names(samples) == ["w1", "w2"]


def test_names_are_in_order_and_not_of_those_that_left_before() -> None:
    names = [f"w{index}" for index in range(9)]
    samples = [
        sample(1, *(row(name, 1, "r1", 8) for name in reversed(names))),
        sample(2, row("w3", 1.5, "", 0, "gone")),
    ]
    assert lane_names(samples) == names
    assert lane_names(samples, 2 * MINUTE_MS) == [name for name in names if name != "w3"]


def test_a_row_that_is_said_again_begins_no_stretch() -> None:
    samples = [sample(10, row("w1", 9, "r1", 8)), sample(12, row("w1", 11, "r1", 8)), sample(13)]
    (lane,) = lanes(samples, ["w1"], 0)
    assert told(lane.stretches) == [(10, 13, "r1", 8, None)]


def test_what_began_before_the_window_is_told_from_its_beginning_and_a_stranger_has_no_stretch() -> None:
    (known, stranger) = lanes([sample(60, row("w1", 3, "r1", 8)), sample(61)], ["w1", "nobody"], 59 * MINUTE_MS)
    assert told(known.stretches) == [(59, 61, "r1", 8, None)]
    assert stranger.stretches == []
    assert lanes([], ["w1"], 0)[0].stretches == []


def test_a_worker_that_left_and_time_in_which_nobody_looked_have_no_stretch() -> None:
    rest = GAP_MS / MINUTE_MS + 7
    samples = [
        sample(1, row("w1", 0, "r1", 8), row("w2", 0, "r1", 8)),
        sample(2, row("w2", 1.5, "", 0, "gone")),
        sample(2 + rest, row("w1", 2 + rest - 0.1, "r1", 8)),
        sample(3 + rest, row("w2", 2.5 + rest, "r1", 2)),
    ]
    one, two = lanes(samples, ["w1", "w2"], 0)
    assert told(one.stretches) == [(0, 2, "r1", 8, None), (2 + rest, 3 + rest, "r1", 8, None)]
    assert told(two.stretches) == [(0, 1.5, "r1", 8, None), (2.5 + rest, 3 + rest, "r1", 2, None)]


def test_of_very_many_short_stretches_those_beside_one_another_are_one_with_the_most_slots() -> None:
    count = 20 * STRETCH_COUNT_MAX
    rows = [row("w1", index / 100, "r1", 1 + index % 7) for index in range(count)]
    samples = [sample(0), *(sample(minute, *rows[100 * (minute - 1) : 100 * minute]) for minute in range(1, 61))]
    (lane,) = lanes(samples, ["w1"], 0)
    assert STRETCH_COUNT_MAX / 2 < len(lane.stretches) <= 2 * STRETCH_COUNT_MAX
    assert all(
        before.end_ms == after.start_ms for before, after in zip(lane.stretches, lane.stretches[1:], strict=False)
    )
    assert {each.slot_count for each in lane.stretches[:-1]} == {7}
