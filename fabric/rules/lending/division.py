"""Divides workers between the runs of their model, by weight: pure functions of what workers bring and runs need.

- Where workers cannot be divided by weight, runs take turns: `settle` keeps, for every run, the slot-seconds that it
  is owed, and a worker moves when that makes another run the needier one by nearly a worker's slice. It stays that
  long at least: moving costs a weight switch and every cached prefix.
- A run without work gives its share up at once, and is owed nothing once it has had none for a while.
- The cost grows with workers plus moves times kinds of workers (run and slots), not with workers times moves.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence

from .capacity_facts import CapacityRule, Grant, RunFacts

STAY_FRACTION = 0.9  # of a worker's slots: how much needier another run must be; at 1 a new run might wait for ever


def settle(
    owed: Mapping[str, float], grants: Sequence[Grant], runs: Sequence[RunFacts], passed_s: float, rule: CapacityRule
) -> dict[str, float]:
    """Count what every run is owed after `grants` were in force for `passed_s`, in slot-seconds.

    Each run with work was due a share, by weight, of the slots that served runs of its model. The debts of all runs of
    a model add up to 0, so a run that is new, or comes back, starts level; and no debt exceeds two slices of all
    slots, whatever happened.
    """
    given: dict[str | None, int] = {}
    for grant in grants:
        given[grant.run_id] = given.get(grant.run_id, 0) + grant.slot_count
    found: dict[str, float] = {}
    for key in dict.fromkeys(run.pool_key for run in runs):
        fitting = [run for run in runs if run.pool_key == key and run.has_weights]
        sharing = [run for run in fitting if run.open_count > 0]
        counted = [run for run in fitting if run.open_count > 0 or run.idle_s < rule.take_back_after_s]
        served = {run.run_id: given.get(run.run_id, 0) for run in sharing}
        slots, weights = sum(served.values()), sum(run.weight for run in sharing)
        debts = {run.run_id: owed.get(run.run_id, 0.0) for run in counted}
        for run in sharing:
            debts[run.run_id] += (slots * run.weight / weights - served[run.run_id]) * passed_s
        mean = sum(debts.values()) / max(1, len(debts))
        bound = 2 * rule.slice_s * max(slots, 1)
        found |= {name: max(-bound, min(bound, debt - mean)) for name, debt in debts.items()}
    return found


def divide(
    offers: Mapping[str, int], own: Mapping[str, str | None], runs: Sequence[RunFacts], rule: CapacityRule
) -> dict[str, RunFacts]:
    """Choose the run that each of these workers, all of one model, should serve if it serves any.

    Workers stay where they are, the rest go where most is lacking, and then, one by one, whoever is missed least
    moves to where most is lacking, as long as that is worth it.

    Args:
        offers: slots of each worker, those that are taken first in front. own: the run that each serves now.
    """
    if not runs:
        return {}
    division = _Division(offers, runs, rule)
    by_id = {run.run_id: run for run in runs}
    strangers = []
    for name in offers:
        run = by_id.get(own.get(name) or "")
        if run is None:
            strangers.append(name)
        else:
            division.put(name, run)
    for name in strangers:
        division.put(name, division.neediest() if offers[name] else runs[0])
    if len(runs) > 1:
        for _ in offers:
            if not division.move():
                break
    return division.places


class _Division:
    """Workers of one model and the runs they serve, while that is being decided. `offers`: slots of each worker."""

    def __init__(self, offers: Mapping[str, int], runs: Sequence[RunFacts], rule: CapacityRule) -> None:
        self.places: dict[str, RunFacts] = {}
        self._offers = offers
        self._names = list(offers)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._runs = runs
        self._given = dict.fromkeys((run.run_id for run in runs), 0)
        self._kinds: dict[tuple[str, int], list[int]] = {}  # (run, slots) → its workers' indices, ascending
        scale = sum(offers.values()) / sum(run.weight for run in runs)
        payback = STAY_FRACTION / rule.slice_s  # no worker can then change hands twice within a slice
        self._due = {run.run_id: scale * run.weight + run.owed * payback for run in runs}
        self._by_id = {run.run_id: run for run in runs}

    def put(self, worker_id: str, run: RunFacts) -> None:
        """Let a worker serve this run."""
        before, slots, index = self.places.get(worker_id), self._offers[worker_id], self._index[worker_id]
        self.places[worker_id] = run
        if not slots:
            return
        if before is not None:
            self._given[before.run_id] -= slots
            self._kinds[before.run_id, slots].remove(index)
        self._given[run.run_id] += slots
        insort(self._kinds.setdefault((run.run_id, slots), []), index)

    def neediest(self) -> RunFacts:
        """Return the run that lacks most, among runs that have work for more."""
        wanting = [run for run in self._runs if run.open_count > self._given[run.run_id]]
        return max(wanting or self._runs, key=lambda run: (self._lack(run), run.run_id))

    def move(self) -> bool:
        """Move whoever is missed least to where most is lacking; False when that is not worth it."""
        goal = self.neediest()
        kinds = [(self._worth(kind, goal), -indices[0]) for kind, indices in self._kinds.items() if indices]
        worth, index = max(kinds, default=(0.0, 0))
        if worth <= 1e-9:
            return False
        self.put(self._names[-index], goal)
        return True

    def _worth(self, kind: tuple[str, int], goal: RunFacts) -> float:
        """Count the slots by which a move evens things out; infinite where the worker's own run has no use for it."""
        own, slots = self._by_id[kind[0]], kind[1]
        if own is goal or goal.open_count <= self._given[goal.run_id]:
            return 0.0
        if own.open_count <= self._given[own.run_id] - slots:
            return math.inf
        return self._lack(goal) - self._lack(own) - slots * (1 + STAY_FRACTION)

    def _lack(self, run: RunFacts) -> float:
        """Count the slots that a run lacks of its share, and of what it is owed."""
        return self._due[run.run_id] - self._given[run.run_id]
