"""Durations are counted by bucket, and reported so that each counts once."""

from __future__ import annotations

import math
import threading

import pytest

from rollfab.fabric.rules.queue.timings import (
    BOUNDS_S,
    BUCKET_COUNT,
    RUN_COUNT_MAX,
    SECONDS_MAX,
    SUM,
    RunTimings,
    Timings,
)


def test_buckets_double_from_a_millisecond_to_more_than_an_hour() -> None:
    assert (BOUNDS_S[0], BOUNDS_S[1], BOUNDS_S[-1], BUCKET_COUNT) == (0.001, 0.002, 4194.304, 24)


@pytest.mark.parametrize("place", range(BUCKET_COUNT - 1))
def test_a_bound_is_the_largest_duration_of_its_bucket(place: int) -> None:
    timings, above = RunTimings(), math.nextafter(BOUNDS_S[place], math.inf)
    timings.note("ttft", BOUNDS_S[place])
    timings.note("ttft", above)
    counts, _ = timings.read()
    assert [counts["ttft", place], counts["ttft", place + 1]] == [1, 1]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1e-9, SECONDS_MAX * 1.01, 1e300])
def test_what_is_no_duration_is_left_out(seconds: float) -> None:
    timings = RunTimings()
    timings.note("ttft", seconds, "g.0")
    assert timings.read() == ({}, {})


def test_nothing_takes_no_time() -> None:
    timings = RunTimings()
    timings.note("ttft", 0.0, "g.0")
    assert timings.read() == ({("ttft", 0): 1}, {("ttft", 0): (0.0, "g.0")})


def test_a_reading_tells_what_is_new() -> None:
    timings = RunTimings()
    timings.note("turn", 1.0, "g.0")
    timings.note("turn", 1.0, "g.1")
    assert timings.read() == ({("turn", 10): 2, ("turn", SUM): 2_000_000}, {("turn", 10): (1.0, "g.1")})
    assert timings.read() == ({}, {})
    timings.note("turn", 0.5)
    assert timings.read() == ({("turn", 9): 1, ("turn", SUM): 500_000}, {})


def test_a_report_is_the_same_until_it_is_heard() -> None:
    timings = Timings("p")
    timings.of("r").note("turn", 1.0)
    (first,) = timings.reports()
    timings.of("r").note("turn", 1.0)
    assert timings.reports() == [first]
    timings.heard()
    (second,) = timings.reports()
    assert (second.counts["turn", 10], second.number) == (1, "p.2")
    timings.heard()
    assert timings.reports() == []


def test_only_so_many_runs_are_kept_and_one_that_comes_again_begins_anew() -> None:
    timings = Timings("p")
    timings.of("first").note("turn", 1.0)
    timings.reports()
    timings.heard()
    for index in range(RUN_COUNT_MAX):
        timings.of(f"r{index}")
    timings.of("first").note("turn", 1.0)
    (report,) = timings.reports()
    assert report.counts == {("turn", 10): 1, ("turn", SUM): 1_000_000}


def test_a_reader_in_another_thread_loses_and_doubles_nothing() -> None:
    timings, count, total = RunTimings(), 20_000, 0
    writer = threading.Thread(target=lambda: [timings.note("turn", 0.001 * (n % 50), "g.0") for n in range(count)])
    writer.start()
    while writer.is_alive():
        total += sum(by for (_, place), by in timings.read()[0].items() if place != SUM)
    total += sum(by for (_, place), by in timings.read()[0].items() if place != SUM)
    assert total == count
