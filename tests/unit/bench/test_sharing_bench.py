"""Waits between runs are found wherever they are, and what breaks the promise is named."""

from __future__ import annotations

from typing import Any

from rollfab.deploy.replay.figures import Report
from tests.bench.sharing.main import FULL, Look, fair_turns_s, faults, waits_s


def test_the_longest_wait_is_found_at_the_beginning_in_the_middle_and_at_the_end() -> None:
    times = (0.0, 1.0, 2.0, 5.0, 6.0, 7.0)
    counts = {"first": (0, 0, 0, 1, 2, 3), "middle": (0, 1, 1, 2, 3, 4), "last": (0, 1, 2, 3, 3, 3), "never": (0,) * 6}
    looks = [Look(at, {name: each[index] for name, each in counts.items()}) for index, at in enumerate(times)]
    assert waits_s(looks) == [5.0, 4.0, 3.0, 7.0]


def test_a_fair_turn_is_a_slice_for_all_by_weight_and_one_of_its_own() -> None:
    assert fair_turns_s([1.0] * 20, 2) == [100.0] * 20
    assert fair_turns_s([2.0, 1.0], 1) == [15.0, 30.0]


def test_a_fair_turn_is_longer_where_switches_take_long() -> None:
    quick, slow = fair_turns_s([1.0, 1.0, 0.1], 2), fair_turns_s([1.0, 1.0, 0.1], 2, switch_s=5.0)
    assert quick == fair_turns_s([1.0, 1.0, 0.1], 2, switch_s=1.0)
    assert all(long >= 2 * short for short, long in zip(quick, slow, strict=True))


def test_a_case_has_a_run_of_a_tenth_of_the_others_weight() -> None:
    assert any(min(weights) <= 0.1 * max(weights) for weights in FULL.cases)


def test_what_was_promised_and_not_kept_is_named() -> None:
    def told(**row: Any) -> list[str]:
        good = {"longest_wait_fair_turns": 2.9, "tokens": [5, 5]}
        return faults(Report(name="sharing", params={}, results={"rows": [good | row]}, baselines={}, ratio={}))

    assert told() == []
    assert told(longest_wait_fair_turns=3.1) == ["a run waited 3.1 fair turns, 3 are promised"]
    assert told(tokens=[9, 0]) == ["1 runs were never served"]
