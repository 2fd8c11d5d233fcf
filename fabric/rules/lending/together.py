"""Runs that can be served at once: a pure function of what runs need.

One engine can hold turns of several runs where their weights are, bit for bit, the same. Such runs are planned as one:
they take no turns with each other, no worker stands idle for one while another has work, and none of them costs a
switch. Within a worker they share the slots by weight (fabric/rules/queue/share.py).

- A run is together with others for as long as it has work, and a while longer: its environments may think.
- One run alone is planned as it is. More than fit are planned as several of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from .capacity_facts import RunFacts

REST_S = 30.0  # a run without work for so long is a guest no more
TOGETHER_COUNT_MAX = 16  # each costs its workers a doorbell, and a look at its queue


def together(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Put runs of the same weights together, each such group as one run by the name of the first of them."""
    found: list[RunFacts] = []
    groups: dict[tuple[str, str], list[RunFacts]] = {}
    for run in runs:
        is_one = run.weights and run.has_weights and not run.is_unfit and (run.open_count or run.idle_s < REST_S)
        if is_one:
            groups.setdefault((run.pool_key, run.weights), []).append(run)
        else:
            found.append(run)
    for group in groups.values():
        group.sort(key=lambda run: run.run_id)
        count = -(-len(group) // TOGETHER_COUNT_MAX)
        bounds = [len(group) * n // count for n in range(count + 1)]
        found += [_as_one(group[start:end]) for start, end in pairwise(bounds)]
    return found


def _as_one(runs: Sequence[RunFacts]) -> RunFacts:
    """Return one run that needs what these need; its weight is that of those with work."""
    first, wanting = runs[0], [run for run in runs if run.open_count] or list(runs)
    if len(runs) == 1:
        return first
    known = [(run.left_tokens, run.open_count) for run in wanting if run.left_tokens is not None]
    count = sum(open_count for _, open_count in known)
    return replace(
        first,
        runs=tuple(run.run_id for run in runs),
        weight=math.fsum(run.weight for run in wanting),
        open_count=sum(run.open_count for run in runs),
        idle_s=min(run.idle_s for run in runs),
        owed=math.fsum(run.owed for run in runs),
        left_tokens=sum(left * open_count for left, open_count in known) / count if count else None,
    )
