"""Divides workers between the runs of their model, by weight: pure functions of what workers bring and runs need.

- A worker counts by its speed: as many dedicated slots as make the tokens of its slots.
- A run is due its weight's part; of what others have no work for it has its weight's part, too (weighted max-min).
- Where workers cannot be divided so, runs take turns: `settle` keeps, for every run, the seconds of a dedicated slot
  that it is owed, and a worker moves when that makes another run the needier one by nearly what the worker brings in
  a slice. Workers that are alike stay that long at least: moving costs a weight switch and every cached prefix.
- The longer a worker needs for a switch, the longer is its slice: it spends at most a fifth of its time on switches.
  One that is under way to a run arrives there first.
- A worker leaves a run that has no use for it once that has been so for as long as a switch takes (the rule for
  renting skis: Karlin et al., 1988): a run that rests between two steps finds its workers again.
- Nobody is owed what it had no work for, nor owes what nobody else lacked: a run in its tail is in nobody's debt. One
  that rests owes the workers that wait for it.
- Who comes last in the plan's order moves first: a run keeps its dedicated workers for its last trajectories.
- A run without work gives its share up at once, and is owed nothing once it has had none for a while.
- The cost grows with workers plus moves times kinds of workers (run, slots, speed), not with workers times moves.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from .capacity_facts import SWITCH_S_MAX, CapacityRule, Grant, RunFacts

STAY_FRACTION = 0.9  # of what a worker brings: how much needier another run must be; at 1 a new run might wait for ever
SPEED_LEVELS = 8  # of an offer's speed: finer ones would only make more kinds of workers
SLICE_STEP = 1.25  # from one length of slices to the next, likewise


class Offer(NamedTuple):
    """What a worker brings: slots, and the speed of each in dedicated slots.

    slice_s: shortest time for which it serves a run. leave_after_s: how long it stays where it is of no use.
    """

    slot_count: int
    speed: float = 1.0
    slice_s: float = CapacityRule().slice_s
    leave_after_s: float = 0.0

    @property
    def power(self) -> float:
        """In dedicated slots."""
        return self.slot_count * self.speed


def slice_of(switch_s: float, rule: CapacityRule) -> float:
    """Compute the shortest time for which a worker serves a run, in seconds. switch_s: what going to another takes."""
    wanted = min(switch_s, SWITCH_S_MAX) / rule.switch_fraction / rule.slice_s
    return rule.slice_s * SLICE_STEP ** math.ceil(math.log(wanted, SLICE_STEP) - 1e-9) if wanted > 1 else rule.slice_s


def settle(
    owed: Mapping[str, float], grants: Sequence[Grant], runs: Sequence[RunFacts], passed_s: float, rule: CapacityRule
) -> dict[str, float]:
    """Count what every run is owed after `grants` were in force for `passed_s`, in seconds of a dedicated slot.

    Each run with work, or workers, was due its share of the workers that served runs of its model; what it had beyond
    that counts as far as another lacked it. The debts of all runs of a model add up to 0, so a run that is new, or
    comes back, starts level; and no debt exceeds two slices of all workers, whatever happened.
    """
    given: dict[str | None, list[Offer]] = {}
    for grant in grants:
        given.setdefault(grant.run_id, []).append(Offer(grant.slot_count, grant.speed, grant.slice_s))
    found: dict[str, float] = {}
    for key in dict.fromkeys(run.pool_key for run in runs):
        fitting = [run for run in runs if run.pool_key == key and run.has_weights]
        sharing = [run for run in fitting if run.open_count > 0 or run.run_id in given]
        offers = {run.run_id: given.get(run.run_id, []) for run in sharing}
        counted = [run for run in fitting if run.run_id in offers or run.idle_s < rule.take_back_after_s]
        supply = [offer for own in offers.values() for offer in own]
        due = shares(sharing, supply)
        lacks = {run.run_id: _lacked(run, offers[run.run_id], due[run.run_id]) for run in sharing}
        lacked = sum(lack for lack in lacks.values() if lack > 0)
        spare = -sum(lack for lack in lacks.values() if lack < 0)
        debts = {run.run_id: owed.get(run.run_id, 0.0) for run in counted}
        for name, lack in lacks.items():
            debts[name] += passed_s * (lack if lack > 0 else lack * lacked / spare if spare else 0.0)
        mean = sum(debts.values()) / max(1, len(debts))
        slice_s = max((offer.slice_s for offer in supply), default=0.0) or rule.slice_s
        bound = 2 * slice_s * max(sum(offer.power for offer in supply), 1)
        found |= {name: max(-bound, min(bound, debt - mean)) for name, debt in debts.items()}
    return found


def _lacked(run: RunFacts, offers: Sequence[Offer], due: float) -> float:
    """Count the dedicated slots that a run lacks of those it is due: it lacks none if it has no work for more slots."""
    lack = due - sum(offer.power for offer in offers)
    return lack if run.open_count > sum(offer.slot_count for offer in offers) else min(lack, 0.0)


def shares(runs: Sequence[RunFacts], supply: Sequence[Offer]) -> dict[str, float]:
    """Compute what each run is due, in dedicated slots: its part by weight, or more where others have less work.

    Those parts add up to more than all where a run has little work: it is due its own, and does not ask for it. Work is
    counted in whole workers, the smallest, as only whole ones can be given; runs of which none has work share by weight
    alone. Source: weighted max-min fairness (Bertsekas and Gallager, Data Networks, 6.5.2).
    """
    unit = _unit(supply)
    wanted = {run.run_id: unit.power * math.ceil(run.open_count / unit.slot_count) or math.inf for run in runs}
    order = sorted(runs, key=lambda run: wanted[run.run_id] / run.weight)
    weights = list(accumulate(run.weight for run in reversed(order)))[::-1]  # of each and all after it: never 0
    all_of_it = left = sum(offer.power for offer in supply)
    found = {}
    for run, rest in zip(order, weights, strict=True):
        taken = min(wanted[run.run_id], left * run.weight / rest)
        found[run.run_id] = max(taken, all_of_it * run.weight / weights[0])
        left -= taken
    return found


def _unit(supply: Sequence[Offer]) -> Offer:
    """Return the fastest of the smallest workers: the least that can be given."""
    slot_count = min((offer.slot_count for offer in supply if offer.slot_count), default=1)
    return max((offer for offer in supply if offer.slot_count == slot_count), default=Offer(1))


def divide(offers: Mapping[str, Offer], own: Mapping[str, str | None], runs: Sequence[RunFacts]) -> dict[str, RunFacts]:
    """Choose the run that each of these workers, all of one model, should serve if it serves any.

    Workers stay where they are, the rest go where most is lacking, and then, one by one, whoever is missed least
    moves to where most is lacking, as long as that is worth it; of equals the last.

    Args:
        offers: of each worker, those that are taken first in front. own: the run that each serves now. runs: with and
            without work.
    """
    if not runs:
        return {}
    by_id = {run.run_id: run for run in runs}
    runs = [run for run in runs if run.open_count > 0] or runs
    division = _Division(offers, runs)
    sharing = {run.run_id for run in runs}
    strangers = []
    for name, offer in offers.items():
        run = by_id.get(own.get(name) or "")
        if run is not None and run.run_id in sharing:
            division.put(name, run)
        elif run is not None and run.spare_s < offer.leave_after_s:
            division.places[name] = run
        else:
            strangers.append(name)
    for name in strangers:
        division.put(name, division.neediest() if offers[name].slot_count else runs[0])
    if len(runs) > 1:
        for _ in offers:
            if not division.move():
                break
    return division.places


class _Division:
    """Workers of one model and the runs they serve, while that is being decided."""

    def __init__(self, offers: Mapping[str, Offer], runs: Sequence[RunFacts]) -> None:
        self.places: dict[str, RunFacts] = {}
        self._offers = {  # none brings nothing: it would move for nothing
            name: each._replace(speed=max(1, math.ceil(each.speed * SPEED_LEVELS)) / SPEED_LEVELS)
            for name, each in offers.items()
        }
        self._names = list(offers)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._runs = runs
        self._given = dict.fromkeys((run.run_id for run in runs), 0)
        self._powers = dict.fromkeys(self._given, 0.0)
        self._kinds: dict[tuple[str, Offer], list[int]] = {}  # (run, offer) → its workers' indices, ascending
        supply = list(self._offers.values())
        self._slice_s = min(offer.slice_s for offer in supply)
        self._due = shares(runs, supply)
        self._by_id = {run.run_id: run for run in runs}

    def put(self, worker_id: str, run: RunFacts) -> None:
        """Let a worker serve this run."""
        before, offer, index = self.places.get(worker_id), self._offers[worker_id], self._index[worker_id]
        self.places[worker_id] = run
        if not offer.slot_count:
            return
        if before is not None:
            self._given[before.run_id] -= offer.slot_count
            self._powers[before.run_id] -= offer.power
            indices = self._kinds[before.run_id, offer]
            indices.remove(index)
            if not indices:
                del self._kinds[before.run_id, offer]
        self._given[run.run_id] += offer.slot_count
        self._powers[run.run_id] += offer.power
        insort(self._kinds.setdefault((run.run_id, offer), []), index)

    def neediest(self) -> RunFacts:
        """Return the run that lacks most, among runs that have work for more."""
        wanting = [run for run in self._runs if run.open_count > self._given[run.run_id]]
        return max(wanting or self._runs, key=lambda run: (self._lack(run, self._slice_s), run.run_id))

    def move(self) -> bool:
        """Move whoever is missed least to where most is lacking; False when that is not worth it."""
        goal = self.neediest()
        kinds = [(self._worth(*kind, goal), indices[-1]) for kind, indices in self._kinds.items()]
        worth, index = max(kinds, default=(0.0, 0))
        if worth <= 1e-9:
            return False
        self.put(self._names[index], goal)
        return True

    def _worth(self, run_id: str, offer: Offer, goal: RunFacts) -> float:
        """Count by how much a move evens things out; infinite where the worker's own run has no use for it."""
        own = self._by_id[run_id]
        if own is goal or goal.open_count <= self._given[goal.run_id]:
            return 0.0
        if own.open_count <= self._given[run_id] - offer.slot_count and own.spare_s >= offer.leave_after_s:
            return math.inf
        lack = self._lack(goal, offer.slice_s) - self._lack(own, offer.slice_s)
        return lack - offer.power * (1 + STAY_FRACTION)

    def _lack(self, run: RunFacts, slice_s: float) -> float:
        """Count the dedicated slots that a run lacks of its share, and of what it is owed.

        Debts are paid back within a slice: so none of workers that are alike changes hands twice in one.
        """
        return self._due[run.run_id] + run.owed * STAY_FRACTION / slice_s - self._powers[run.run_id]
