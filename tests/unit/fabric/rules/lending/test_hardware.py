"""When hardware is unlike, and by how much longer a worker leaves a turn to others for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.hardware import KIND_COUNT_MAX, Speeds, read_costs
from rollfab.fabric.rules.queue.placement import PATIENCE_MS_MAX, SEEN_COUNT_MIN, DecodeSpeed, unsuited_s

GOOD, POOR = Speeds("good", 40, 10_000), Speeds("poor", 280, 10_000)
US = st.integers(0, 10**7)


def test_a_kind_that_reads_badly_and_makes_tokens_well_costs_more_and_the_other_less() -> None:
    assert read_costs([GOOD, GOOD, POOR, POOR], {}) == {"good": -120, "poor": 120}


@pytest.mark.parametrize(
    "workers",
    [
        [],
        [GOOD, GOOD],
        [GOOD, Speeds("slow", 400, 100_000)],  # ten times as slow at both
        [GOOD, Speeds("poor", 0, 10_000)],
        [GOOD, Speeds("poor", 280, 0)],
        [Speeds(str(n), 10 * n, 10_000) for n in range(1, KIND_COUNT_MAX + 2)],
    ],
    ids=["none", "of one name", "slower at both", "reading not known", "making not known", "too many kinds"],
)
def test_hardware_is_alike(workers: list[Speeds]) -> None:
    assert read_costs(workers, {}) == {}


def test_a_kind_is_as_fast_as_most_of_its_workers() -> None:
    assert read_costs([GOOD, Speeds("good", 9000, 10_000), GOOD, POOR], {})["good"] < 0


def test_what_is_said_changes_only_with_what_is_worth_it() -> None:
    before = {"good": -110, "poor": 110}
    assert read_costs([GOOD, GOOD, POOR, POOR], before) == before
    nearly = [GOOD, Speeds("poor", 70, 10_000)]
    assert read_costs(nearly, {}) == {} != read_costs(nearly, before)


@given(st.lists(st.builds(Speeds, st.sampled_from("abc"), US, US), max_size=12))
def test_costs_of_all_kinds_make_up_for_one_another(workers: list[Speeds]) -> None:
    costs = read_costs(workers, {})
    known = [each for each in workers if each.prefill_us and each.decode_us]
    assert costs.keys() in (set(), {each.hardware for each in known})
    assert not costs or min(costs.values()) <= 0 <= max(costs.values())


def test_a_turn_is_left_to_others_by_its_tokens_beyond_the_usual_and_never_for_long() -> None:
    assert unsuited_s(3000, 1000, read_cost=100, slot_count=8) == pytest.approx(1.6)
    assert unsuited_s(1000, 3000, read_cost=-100, slot_count=8) == pytest.approx(1.6)
    assert unsuited_s(1000, 3000, read_cost=100, slot_count=8) == unsuited_s(9, 3, read_cost=0, slot_count=8) == 0
    assert unsuited_s(10**9, 0, read_cost=10**6, slot_count=4096) == PATIENCE_MS_MAX / 1000


def test_a_worker_knows_what_a_token_costs_it_once_it_has_made_some() -> None:
    speed = DecodeSpeed()
    for _ in range(SEEN_COUNT_MIN - 1):
        speed.note(100, 2.0)
    assert speed.us_per_made == 0
    speed.note(100, 2.0)
    assert speed.us_per_made == 20_000
