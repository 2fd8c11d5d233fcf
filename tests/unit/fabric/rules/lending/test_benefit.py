"""The benefit gate: a borrowed worker takes nothing that would end sooner without it."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.capacity import (
    Backlog,
    CapacityRule,
    RunFacts,
    WorkerFacts,
    finish_with,
    finish_without,
    is_worth,
    plan,
    slot_time_s,
    speed_of,
)

RULE = CapacityRule()


def borrowed(**facts: object) -> WorkerFacts:
    return WorkerFacts(worker_id="s", model="m", slot_count=16, **{"lend": 16, **facts})  # type: ignore[arg-type]


def backlog(open_count: int, speed: float, slot_s: float | None = None) -> Backlog:
    return Backlog(open_count=open_count, speed=speed, slot_s=slot_s)


def test_any_worker_is_better_than_none() -> None:
    assert is_worth(borrowed(activation_ms=10**6), 0.01, backlog(1, 0.0, 1.0), RULE)


def test_a_worker_that_gives_no_time_is_never_lent() -> None:
    assert not is_worth(borrowed(), 0.0, backlog(10**6, 1.0), RULE)


@pytest.mark.parametrize(("speed", "queue"), [(1.0, 1.05), (0.8, 1.6), (0.5, 3.1), (0.3, 5.9)])
def test_the_slower_the_worker_the_longer_the_queue_must_be(speed: float, queue: float) -> None:
    # Given slots for 1000 trajectories, and so many times as many that are open
    assert is_worth(borrowed(), speed, backlog(int(1000 * (queue + 0.1)), 1000.0), RULE)
    assert not is_worth(borrowed(), speed, backlog(int(1000 * (queue - 0.1)), 1000.0), RULE)


def test_getting_ready_must_take_less_time_than_it_saves() -> None:
    # Given a queue that the slots given work off in four slot times, of ten seconds each
    asleep = borrowed(activation_ms=5_000, fetch_ms=10_000)
    assert is_worth(asleep, 1.0, backlog(400, 100.0, 10.0), RULE)
    # Then fifteen seconds pay, and forty do not; nor do fifteen where trajectories take a second
    assert not is_worth(borrowed(activation_ms=40_000), 1.0, backlog(400, 100.0, 10.0), RULE)
    assert not is_worth(asleep, 1.0, backlog(400, 100.0, 1.0), RULE)
    # And under a lease it has been paid already
    assert is_worth(borrowed(activation_ms=40_000, is_lent=True), 1.0, backlog(400, 100.0, 10.0), RULE)


def test_a_speed_is_what_was_measured_else_what_the_guard_lets_through() -> None:
    assert speed_of(borrowed(open_fraction=0.4), 50.0) == 0.4
    assert speed_of(borrowed(open_fraction=0.4, slot_tokens_per_s=10.0), 50.0) == 0.2
    assert speed_of(borrowed(open_fraction=0.4, slot_tokens_per_s=10.0), None) == 0.4
    assert speed_of(borrowed(), None) == 1.0
    assert slot_time_s(100.0, 50.0) == 2.0
    assert slot_time_s(None, 50.0) is slot_time_s(100.0, None) is None


# ---- against a step that is played through


def step_s(jobs: list[float], speeds: list[tuple[float, float]]) -> float:
    """When the last job has ended, where every slot takes the next one as it becomes free.

    jobs: seconds in a dedicated slot. speeds: of each slot, (its speed, from when on it takes jobs).
    """
    free = [(from_s, -speed) for speed, from_s in speeds]
    heapq.heapify(free)
    end_s = 0.0
    for job in jobs:
        at_s, speed = heapq.heappop(free)
        at_s += job / -speed
        end_s = max(end_s, at_s)
        heapq.heappush(free, (at_s, speed))
    return end_s


@given(
    st.integers(1, 12),
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 1.0), st.integers(0, 30_000)), max_size=6),
    st.floats(0.5, 20.0),
)
def test_what_borrowed_workers_take_first_never_ends_after_the_step_without_them(
    dedicated: int, open_count: int, serving: list[tuple[int, float, int]], slot_s: float
) -> None:
    # Given equal trajectories, dedicated slots, and borrowed workers of any speed that have to wake up
    workers = [WorkerFacts(worker_id="d", model="m", slot_count=dedicated, slot_tokens_per_s=1.0)]
    workers += [
        WorkerFacts(worker_id=f"s{n}", model="m", slot_count=slots, lend=slots, open_fraction=speed, activation_ms=ms)
        for n, (slots, speed, ms) in enumerate(serving)
    ]
    facts = {"model": "m", "weight": 1.0, "has_weights": True, "idle_s": 0.0, "left_tokens": slot_s}
    run = RunFacts(run_id="r", open_count=open_count, **facts)  # type: ignore[arg-type]
    # When the plan lends some of them
    grants = plan(workers, [run], RULE)
    lent = [worker for worker, grant in zip(workers[1:], grants[1:], strict=True) if grant.slot_count]
    # Then none of them ends the first thing that it takes later than the dedicated slots would have ended everything
    alone_s = step_s([slot_s] * open_count, [(1.0, 0.0)] * dedicated)
    for worker in lent:
        assert worker.activation_ms / 1000 + slot_s / (worker.open_fraction or 0) <= alone_s + 1e-6
    # And where they take one each and leave the rest to the others, the step is no longer
    slots = [(worker.activation_ms / 1000 + slot_s / (worker.open_fraction or 0)) for worker in lent]
    taken = min(open_count, sum(worker.slot_count for worker in lent))
    rest_s = step_s([slot_s] * (open_count - taken), [(1.0, 0.0)] * dedicated)
    assert max([rest_s, *slots]) <= alone_s + 1e-6


@given(st.integers(1, 1000), st.floats(0.1, 500), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_a_faster_worker_is_never_refused_where_a_slower_one_is_taken(
    open_count: int, given_speed: float, one: float, other: float
) -> None:
    slow, fast = sorted((one, other))
    work = backlog(open_count, given_speed)
    assert is_worth(borrowed(), slow, work, RULE) <= is_worth(borrowed(), fast, work, RULE)
    assert finish_with(borrowed(), fast, None, RULE) <= finish_with(borrowed(), slow, None, RULE)
    assert finish_without(work, RULE) >= finish_without(backlog(open_count, given_speed + 1), RULE)
    assert math.isinf(finish_without(backlog(open_count, 0.0), RULE))
