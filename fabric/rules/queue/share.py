"""Shares the places of one agent worker between runs: by weight, and whole to whoever needs them alone.

- A run that has no work waiting keeps what it holds and claims nothing; the others divide the rest by weight. Nothing
  is taken away from a run that gets on: above its share it falls back to it as its trajectories end.
- A run that has stalled, as nobody generates its turns, gives back what is above its part of all runs by weight, and
  takes no more than that: places that it held would stand empty, and others would wait for them when they have work.
  Of a part below one place it takes one, as long as nobody who gets on wants it: by that one it is seen to get on.
- Nobody's place stays empty while a run that gets on has work for it.
- Where places cannot be divided, the run that has been served least for its weight goes first: with one place for two
  runs they take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A run that wants places.

    held: those it has. served: those it was given so far, divided by its weight. is_stalled: it waited for turns for
    long, and none has come since.
    """

    run_id: str
    weight: float
    held: int
    may_have_work: bool
    served: float = 0.0
    is_stalled: bool = False


def more(total: int, runs: Sequence[Sharer], run_id: str) -> int:
    """Count the places that a run with work may take now, beside those it holds; never more than are free."""
    free = total - sum(run.held for run in runs)
    own = next(run for run in runs if run.run_id == run_id)
    return max(0, min(free, entitled(total, runs)[run_id] - own.held))


def owed(total: int, runs: Sequence[Sharer]) -> dict[str, int]:
    """Count the places, by run, that stalled runs hold above their share, and so must give back."""
    due = entitled(total, runs)
    return {run.run_id: run.held - due[run.run_id] for run in runs if run.is_stalled and run.held > due[run.run_id]}


def entitled(total: int, runs: Sequence[Sharer]) -> dict[str, int]:
    """Compute the places of each run once all above its share have ended; those with work get `total` at most."""
    shares = _fair(total, runs)
    whole = {name: math.floor(share + 1e-9) for name, share in shares.items()}
    left = math.ceil(sum(shares.values()) - 1e-9) - sum(whole.values())

    def urgency(run: Sharer) -> tuple[bool, bool, float, str]:
        """Sort stalled runs last, runs with a part of a place first, and among these the one that was served least."""
        return run.is_stalled, shares[run.run_id] - whole[run.run_id] < 1e-9, run.served, run.run_id

    for run in sorted((run for run in runs if run.may_have_work), key=urgency)[:left]:
        whole[run.run_id] += 1
    return whole


def _fair(total: int, runs: Sequence[Sharer]) -> dict[str, float]:
    """Divide `total` by weight; a run that may not have so many gets its most, and the others divide the rest."""
    shares: dict[str, float] = {}
    rest, left = list(runs), float(total)
    weights = sum(run.weight for run in runs)
    most = {run.run_id: _most(run, total / weights * run.weight) for run in runs}
    while rest:
        unit = left / sum(run.weight for run in rest)
        modest = [run for run in rest if most[run.run_id] <= unit * run.weight]
        if not modest:
            return shares | {run.run_id: unit * run.weight for run in rest}
        shares |= {run.run_id: most[run.run_id] for run in modest}
        left -= sum(most[run.run_id] for run in modest)
        rest = [run for run in rest if run.run_id not in shares]
    return shares


def _most(run: Sharer, part: float) -> float:
    """Return the most places that a run may have; `part`: of all places by the weights of all runs."""
    has_work = math.inf if run.may_have_work else float(run.held)
    return min(has_work, max(1.0, part)) if run.is_stalled else has_work
