"""Which consumed groups are kept: what is newest stays, what is old is thinned, and the bounds hold."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.queue.keeping import KEPT_COUNT_MAX, KEPT_MS_MAX, REST, KeptGroup, to_drop


def kept(sizes: list[int], *, step_ms: int = 1_000, first_ms: int = 0) -> list[KeptGroup]:
    return [KeptGroup(f"{n}-0", f"g{n}", first_ms + n * step_ms, size) for n, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=300), st.integers(1, 50_000))
def test_what_stays_fits_and_the_newest_goes_last(sizes: list[int], bytes_max: int) -> None:
    groups = kept(sizes)
    gone = to_drop(groups, bytes_max, groups[-1].ended_ms)
    stays = [each for index, each in enumerate(groups) if index not in set(gone)]
    assert gone == sorted(set(gone))
    assert sum(each.size_bytes for each in stays) <= bytes_max * REST
    if sum(sizes) <= bytes_max * REST:
        assert not gone
    if gone and stays:
        assert stays[-1] is groups[-1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=8, max_size=40), st.data())
def test_of_the_older_half_what_is_nearest_to_its_neighbours_goes_first(
    told: list[tuple[int, int]], data: st.DataObject
) -> None:
    times = accumulate(gap_ms for gap_ms, _ in told)
    groups = [KeptGroup(f"{n}-0", f"g{n}", at, size) for n, (at, (_, size)) in enumerate(zip(times, told, strict=True))]
    middle, size = len(groups) // 2, sum(each.size_bytes for each in groups)
    bytes_max = data.draw(st.integers(0, 2 * size + 2))
    stays, gone = list(range(len(groups))), []
    while size > bytes_max * REST:
        inner = [at for at in range(1, len(stays) - 1) if stays[at] < middle]

        def cost(at: int) -> tuple[float, int]:
            gap_ms = groups[stays[at + 1]].ended_ms - groups[stays[at - 1]].ended_ms
            return (gap_ms + 1) / (groups[stays[at]].size_bytes + 1), stays[at]

        gone.append(stays.pop(min(inner, key=cost) if inner else 0))
        size -= groups[gone[-1]].size_bytes
    assert to_drop(groups, bytes_max, groups[-1].ended_ms) == sorted(gone)


def test_groups_beyond_the_count_go_and_what_is_too_old_goes_first() -> None:
    groups = kept([1] * (KEPT_COUNT_MAX + 1))
    assert len(groups) - len(to_drop(groups, 1 << 30, groups[-1].ended_ms)) <= KEPT_COUNT_MAX * REST
    old = kept([1] * 10, step_ms=KEPT_MS_MAX // 4)
    assert to_drop(old, 1 << 30, old[-1].ended_ms) == [0, 1, 2, 3, 4, 5]


def test_a_night_is_spread_over_what_is_kept() -> None:
    """A group every four seconds for a day, 100 may stay: each third of the day is there, and the last two minutes."""
    held, held_bytes = list[KeptGroup](), 0
    for second in range(0, 86_400, 4):
        held.append(KeptGroup(f"{second * 1000}-0", f"g{second}", second * 1000, 10))
        held_bytes += 10
        if held_bytes > 1_000:
            gone = set(to_drop(held, 1_000, second * 1000))
            held = [each for index, each in enumerate(held) if index not in gone]
            held_bytes = 10 * len(held)
    hours = [each.ended_ms / 3_600_000 for each in held]
    assert hours[0] == 0
    assert min(sum(low <= hour < low + 8 for hour in hours) for low in (0, 8, 16)) >= 8
    assert sum(hour > 24 - 2 / 60 for hour in hours) >= 29
