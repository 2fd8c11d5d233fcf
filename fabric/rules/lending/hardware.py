"""Whether a run's workers are of unlike hardware, and what reading costs on them: a pure function of their speeds.

Prompts are computed at once, so reading them is bound by a device's arithmetic; tokens are made one by one, which is
bound by its memory. A device that has much of one and little of the other suits some turns better than its fellows do:
turns without a home wait for what suits them (fabric/rules/queue/placement.py).

- Workers are of one kind if they say the same hardware. All who say none are of one kind.
- A kind's speeds are the medians of its workers that know theirs. Kinds are unlike if the costs of reading a token,
  counted in tokens made, differ by UNLIKE; they are alike again below ALIKE.
- What reading costs more on a kind than on others is what it takes there, less what the kind's speed in making tokens
  lets expect. A kind that is slower at both costs nothing more.

Source of the idea: RollArt (arXiv 2512.22560), where people map kinds of tasks to kinds of hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

UNLIKE, ALIKE = 2.0, 1.5
SAME = 1.25  # costs that differ by less are not told again
KIND_COUNT_MAX = 16  # more are taken to be alike


class Speeds(NamedTuple):
    """What a worker says of its speeds: microseconds for a token that it reads, and for one that it makes in a slot."""

    hardware: str
    prefill_us: int
    decode_us: int


def read_costs(workers: Iterable[Speeds], before: Mapping[str, int]) -> dict[str, int]:
    """Compute by how many microseconds reading a token costs more on each kind than on others; {}: all are alike.

    before: what was said last.
    """
    kinds: dict[str, list[Speeds]] = {}
    for each in workers:
        if each.prefill_us > 0 and each.decode_us > 0:
            kinds.setdefault(each.hardware, []).append(each)
    reads = {name: median(each.prefill_us for each in kind) for name, kind in kinds.items()}
    makes = {name: median(each.decode_us for each in kind) for name, kind in kinds.items()}
    ratios = [reads[name] / makes[name] for name in kinds]
    if not 2 <= len(kinds) <= KIND_COUNT_MAX or max(ratios) < min(ratios) * (ALIKE if before else UNLIKE):
        return {}
    usual = sum(reads[name] * len(kind) for name, kind in kinds.items())
    usual /= sum(makes[name] * len(kind) for name, kind in kinds.items())
    costs = {name: round(reads[name] - usual * makes[name]) for name in kinds}
    is_same = costs.keys() == before.keys() and all(_is_near(costs[name], before[name]) for name in costs)
    return dict(before) if is_same else costs


def _is_near(cost: int, before: int) -> bool:
    return cost == before or (cost * before > 0 and 1 / SAME < cost / before < SAME)
