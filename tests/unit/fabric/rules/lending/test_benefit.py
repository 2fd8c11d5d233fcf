"""The benefit gate: a borrowed worker is lent and kept only while a run gets on faster with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.capacity import Backlog, is_worth, plan, slot_time_s, speed_of
from rollfab.fabric.rules.lending.capacity_facts import CapacityRule, RunFacts, WorkerFacts

RULE = CapacityRule()


def borrowed(**facts: object) -> WorkerFacts:
    return WorkerFacts(worker_id="s", model="m", slot_count=16, **{"lend": 16, **facts})  # type: ignore[arg-type]


def backlog(open_count: int, slot_count: int, slot_s: float | None = None) -> Backlog:
    return Backlog(open_count=open_count, slot_count=slot_count, speed=float(slot_count), slot_s=slot_s)


def run(open_count: int, slot_s: float | None = None) -> RunFacts:
    facts = {"run_id": "r", "model": "m", "weight": 1.0, "has_weights": True, "idle_s": 0.0, "left_tokens": slot_s}
    return RunFacts(open_count=open_count, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("speed", [1e-6, 0.01, 1.0])
def test_any_worker_that_generates_at_all_is_better_than_none(speed: float) -> None:
    assert is_worth(borrowed(activation_ms=10**6), speed, backlog(1, 0, 1.0), RULE)


def test_a_worker_that_gives_no_time_is_never_lent() -> None:
    assert not is_worth(borrowed(), 0.0, backlog(10**6, 1), RULE)
    assert not is_worth(borrowed(), 0.0, backlog(10**6, 0), RULE)


@pytest.mark.parametrize(("speed", "more"), [(1.0, 0), (0.75, 4), (0.5, 8), (0.25, 12)])
def test_a_worker_is_kept_while_it_makes_more_than_its_slots_keep_from_faster_ones(speed: float, more: int) -> None:
    # Given sixteen slots under a lease, beside a hundred faster ones
    lent = borrowed(is_lent=True)
    assert is_worth(lent, speed, backlog(100 + more + 1, 100), RULE)
    assert not is_worth(lent, speed, backlog(100 + more, 100), RULE)


@pytest.mark.parametrize(("speed", "more"), [(1.0, 5), (0.5, 18), (0.25, 32)])
def test_a_lease_is_begun_only_where_it_makes_up_for_a_prefix_computed_twice(speed: float, more: int) -> None:
    # Given a worker that is awake, beside a hundred slots: a twentieth of a trajectory is five of a hundred
    assert is_worth(borrowed(), speed, backlog(100 + more + 1, 100), RULE)
    assert not is_worth(borrowed(), speed, backlog(100 + more, 100), RULE)


def test_beside_slots_as_slow_as_its_own_a_worker_keeps_nothing_from_faster_ones() -> None:
    slow = Backlog(open_count=101, slot_count=100, speed=50.0, fastest=0.5)
    assert is_worth(borrowed(is_lent=True), 0.5, slow, RULE)
    assert not is_worth(borrowed(is_lent=True), 0.5, dataclasses.replace(slow, fastest=1.0), RULE)


def test_getting_ready_must_take_less_time_than_the_queue_lasts() -> None:
    # Given a queue that the slots given work off in three slot times, of ten seconds each
    asleep = borrowed(activation_ms=5_000, fetch_ms=10_000)
    assert is_worth(asleep, 1.0, backlog(400, 100, 10.0), RULE)
    # Then fifteen seconds pay, and thirty do not; nor do fifteen where trajectories take a second
    assert not is_worth(borrowed(activation_ms=30_000), 1.0, backlog(400, 100, 10.0), RULE)
    assert not is_worth(asleep, 1.0, backlog(400, 100, 1.0), RULE)
    # And under a lease it has been paid already
    assert is_worth(borrowed(activation_ms=30_000, is_lent=True), 1.0, backlog(400, 100, 10.0), RULE)


def test_a_speed_is_what_was_measured_else_what_the_guard_lets_through() -> None:
    assert speed_of(borrowed(open_fraction=0.4), 50.0) == 0.4
    assert speed_of(borrowed(open_fraction=0.4, slot_tokens_per_s=10.0), 50.0) == 0.2
    assert speed_of(borrowed(open_fraction=0.4, slot_tokens_per_s=10.0), None) == 0.4
    assert speed_of(borrowed(), None) == 1.0
    assert slot_time_s(100.0, 50.0) == 2.0
    assert slot_time_s(None, 50.0) is slot_time_s(100.0, None) is None


@given(st.integers(1, 1000), st.integers(0, 500), st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.booleans())
def test_a_faster_worker_is_never_refused_where_a_slower_one_is_taken(
    open_count: int, slot_count: int, one: float, other: float, is_lent: bool
) -> None:
    slow, fast = sorted((one, other))
    work = backlog(open_count, slot_count, 10.0)
    worker = borrowed(is_lent=is_lent, activation_ms=0 if is_lent else 2000)
    assert is_worth(worker, slow, work, RULE) <= is_worth(worker, fast, work, RULE)


# ---- against the speed of all slots together

serving_workers = st.lists(st.tuples(st.integers(1, 8), st.floats(0.05, 1.0), st.integers(0, 30_000)), max_size=6)


def pool(dedicated: int, serving: list[tuple[int, float, int]]) -> list[WorkerFacts]:
    """List a dedicated worker of so many slots, and serving ones: (slots, speed, ms to wake)."""
    workers = [WorkerFacts(worker_id="d", model="m", slot_count=dedicated, slot_tokens_per_s=1.0)]
    for n, (slots, speed, ms) in enumerate(serving):
        facts = {"slot_count": slots, "lend": slots, "open_fraction": speed, "activation_ms": ms}
        workers.append(WorkerFacts(worker_id=f"s{n}", model="m", **facts))  # type: ignore[arg-type]
    return workers


@given(st.integers(0, 12), st.integers(1, 80), serving_workers, st.integers(0, 63))
def test_a_run_is_never_slower_with_a_worker_than_without_whoever_has_which_turn(
    dedicated: int, open_count: int, serving: list[tuple[int, float, int]], lent: int
) -> None:
    # Given any workers, some of them lent, and trajectories that all have a turn to run
    workers = pool(dedicated, serving)
    workers = [dataclasses.replace(each, is_lent=bool(lent >> n & 1)) for n, each in enumerate(workers)]
    # When some are lent or kept without a doubt
    grants = plan(workers, [run(open_count, 10.0)], RULE)
    useful = [
        (worker.open_fraction or 0.0, grant.slot_count)
        for worker, grant in zip(workers, grants, strict=True)
        if not grant.is_standing and grant.slot_count and not grant.is_doubted
    ]
    # Then all slots together are no slower than without them, even where those take turns first
    left, speed = open_count, 0.0
    for fraction, slots in useful:
        taken = min(slots, left)
        left, speed = left - taken, speed + taken * fraction
    assert speed + min(left, dedicated) >= min(open_count, dedicated) - 1e-9


# ---- against a step that is played through


@dataclass
class Job:
    """A trajectory. left_s: in a dedicated slot. worker: where it runs, -1: nowhere. refill_s: prefixes made anew."""

    left_s: float
    worker: int = -1
    refill_s: float = 0.0


@dataclass
class Step:
    """A step under the plan's rules: workers take what waits, and turns move on only as a lease ends."""

    workers: list[WorkerFacts]
    jobs: list[Job]
    slot_s: float
    slow_first: bool
    now_s: float = 0.0
    ready_at_s: dict[int, float] = field(default_factory=dict)
    doubt_at_s: dict[int, float] = field(default_factory=dict)
    lease_count: int = 0

    def play(self) -> float:
        """Return when the last trajectory has ended."""
        while self.jobs:
            self._plan()
            self._take()
            self._pass()
        return self.now_s

    def _plan(self) -> None:
        facts = [
            dataclasses.replace(
                each,
                is_lent=n in self.ready_at_s,
                activation_ms=0 if n in self.ready_at_s else each.activation_ms,
                doubt_s=self.now_s - self.doubt_at_s.get(n, self.now_s),
            )
            for n, each in enumerate(self.workers)
        ]
        for n, grant in enumerate(plan(facts, [run(len(self.jobs), self.slot_s)], RULE)):
            if grant.is_doubted:
                self.doubt_at_s.setdefault(n, self.now_s)
            else:
                self.doubt_at_s.pop(n, None)
            if grant.slot_count and n not in self.ready_at_s:
                self.ready_at_s[n] = self.now_s + self.workers[n].activation_ms / 1000
                self.lease_count += n > 0
            elif not grant.slot_count and self.ready_at_s.pop(n, None) is not None:
                self._give_back(n)

    def _give_back(self, worker: int) -> None:
        for job in self.jobs:
            if job.worker == worker:
                again_s = RULE.refill_fraction * self.slot_s
                job.worker, job.left_s, job.refill_s = -1, job.left_s + again_s, job.refill_s + again_s

    def _take(self) -> None:
        ready = [n for n, at_s in self.ready_at_s.items() if at_s <= self.now_s]
        for n in sorted(ready, reverse=self.slow_first):
            free = self.workers[n].slot_count - sum(job.worker == n for job in self.jobs)
            for job in [job for job in self.jobs if job.worker < 0][:free]:
                job.worker = n

    def _pass(self) -> None:
        """Let time pass until a trajectory ends, a worker is ready, or a doubt has lasted."""
        speeds = [1.0 if each.lend is None else each.open_fraction or 0.0 for each in self.workers]
        times = [self.now_s + job.left_s / speeds[job.worker] for job in self.jobs if job.worker >= 0]
        times += [at_s for at_s in self.ready_at_s.values() if at_s > self.now_s]
        times += [at_s + RULE.take_back_after_s + 1e-6 for at_s in self.doubt_at_s.values()]
        until_s = min(times)
        for job in self.jobs:
            if job.worker >= 0:
                job.left_s -= (until_s - self.now_s) * speeds[job.worker]
        self.now_s = until_s
        self.jobs = [job for job in self.jobs if job.left_s > 1e-9]


lengths = st.lists(st.floats(0.1, 60.0), min_size=1, max_size=60)


@given(st.integers(1, 12), lengths, serving_workers, st.booleans())
def test_a_step_ends_when_the_slots_given_have_done_all_and_the_longest_at_the_latest(
    dedicated: int, lengths_s: list[float], serving: list[tuple[int, float, int]], slow_first: bool
) -> None:
    # Given trajectories of any lengths, dedicated slots, and serving workers of any speed that have to wake up
    jobs = [Job(each) for each in lengths_s]
    step = Step(pool(dedicated, serving), list(jobs), sum(lengths_s) / len(lengths_s), slow_first)
    # When the step is played, with whatever the plan lends
    end_s = step.play()
    # Then it is no later than what the slots given promise without lending, but for prefixes and the time of a doubt
    refill_s = sum(job.refill_s for job in jobs)
    longest_s = max(length + job.refill_s for length, job in zip(lengths_s, jobs, strict=True))
    assert end_s <= (sum(lengths_s) + refill_s) / dedicated + longest_s + RULE.take_back_after_s + 0.01


def test_a_long_queue_ends_sooner_with_workers_of_half_the_speed() -> None:
    # Given four trajectories a slot, of 20 to 139 seconds, and as many borrowed slots as dedicated ones, half as fast
    lengths_s = [20.0 + (37 * n) % 120 for n in range(256)]
    alone, lent = (
        Step(pool(64, [(16, 0.5, 2000)] * count), [Job(each) for each in lengths_s], 79.5, True) for count in (0, 4)
    )
    alone_s, lent_s = alone.play(), lent.play()
    # Then a step takes a fifth less time at least, and each is lent once
    assert lent_s < 0.8 * alone_s
    assert lent.lease_count == 4
