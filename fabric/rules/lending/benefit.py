"""The benefit gate: does one more borrowed worker end a run's open trajectories sooner, or does it hold some up?

All times are in *slot times*: what the remaining work of a mean trajectory takes in one slot of a dedicated worker.

    slots that are there:   max(1, N / S) + k - 1
    one more worker:        C + max(k / f, k - 1)

N: open trajectories. S: slots given already, each counted with its speed. f: the borrowed worker's speed in dedicated
slots (its open fraction, or what was measured). C: wake + fetch + computing prefixes again. k: how much longer than
the mean a trajectory may be (tail_factor).

- The first line is when the slots that are there have emptied the queue and ended a long trajectory. The second is
  when a long trajectory ends that the borrowed worker takes now. It is lent only while that is no later, so what it
  takes would not have ended sooner elsewhere, and the step is never longer than without it.
- A worker that gives a third of its time is lent only where the queue is more than five slot times long: borrowed
  for less, it makes a synchronous step 0.4 to 0.96 times as fast, for stragglers sit on it.
- Where nothing is given yet, any worker is better than none.

Source: PEARL's benefit gate (lend only what pays for its activation), with stragglers counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .capacity_facts import CapacityRule, WorkerFacts

__all__ = ["Backlog", "finish_with", "finish_without", "is_worth", "slot_time_s", "speed_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A run's work and who has it. speed: of the slots given so far, in dedicated slots. slot_s: a slot time."""

    open_count: int
    speed: float
    slot_s: float | None = None


def slot_time_s(left_tokens: float | None, slot_tokens_per_s: float | None) -> float | None:
    """Seconds of one slot time; None: nobody knows the work left, or how fast a dedicated slot is."""
    if not left_tokens or not slot_tokens_per_s:
        return None
    return left_tokens / slot_tokens_per_s


def speed_of(worker: WorkerFacts, slot_tokens_per_s: float | None) -> float:
    """The speed of a worker's slot in dedicated ones: measured while it was lent, else what its guard lets through."""
    if worker.lend is None:
        return 1.0
    if worker.slot_tokens_per_s is not None and slot_tokens_per_s:
        return worker.slot_tokens_per_s / slot_tokens_per_s
    return 1.0 if worker.open_fraction is None else worker.open_fraction


def finish_without(backlog: Backlog, rule: CapacityRule) -> float:
    """When the slots that are there have ended everything, in slot times."""
    if backlog.speed <= 0:
        return math.inf
    return max(1.0, backlog.open_count / backlog.speed) + rule.tail_factor - 1


def finish_with(worker: WorkerFacts, speed: float, slot_s: float | None, rule: CapacityRule) -> float:
    """When a borrowed worker ends what it takes now, in slot times.

    Where slot times are not known in seconds, waking and fetching count as nothing. One that is lent has paid already.
    """
    if speed <= 0:
        return math.inf
    cost = 0.0
    if not worker.is_lent:
        setup_s = (worker.activation_ms + worker.fetch_ms) / 1000
        cost = rule.refill_fraction / speed + (setup_s / slot_s if slot_s else 0.0)
    return cost + max(rule.tail_factor / speed, rule.tail_factor - 1)


def is_worth(worker: WorkerFacts, speed: float, backlog: Backlog, rule: CapacityRule) -> bool:
    """Whether this worker ends what it would take no later than the slots that are there; a lent one has some grace."""
    grace = rule.keep_factor if worker.is_lent else 1.0
    return finish_with(worker, speed, backlog.slot_s, rule) <= finish_without(backlog, rule) * grace
