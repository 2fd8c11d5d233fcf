"""Tails put off (`rollfab.TailRounds`), beside steps that wait for all: trainings on the same tasks, real engines.

Both train on every task once. Where slots are plenty, a step that waits for all is as long as its longest rollout; with
tails put off only the rounds of long ones are. What it costs, rollouts that lose, is told beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollfab import TailRounds
from rollfab.fabric.contract.errors import FabricError

from ..overhead.arms import GROUP_TIMEOUT_S, WholeFabric


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training on some tasks. lost: of all rollouts, those that nobody was trained on."""

    duration_s: float
    round_count: int
    lost: float


def train_on_all(fabric: WholeFabric, tasks: Sequence[dict[str, Any]], group_count: int, group_size: int) -> Trained:
    """Train on so many groups a step, each step waiting for all of its own.

    Raises:
        FabricError: not all groups came.
    """
    start_s = time.perf_counter()
    firsts = range(0, len(tasks), group_count)
    for first in firsts:
        step = tasks[first : first + group_count]
        if len(fabric.ask(step, group_size=group_size)) < len(step):
            raise FabricError("not all groups came")
    return Trained(duration_s=time.perf_counter() - start_s, round_count=len(firsts), lost=0.0)


def put_tails_off(
    fabric: WholeFabric, tasks: Sequence[dict[str, Any]], group_count: int, group_size: int, name: str
) -> Trained:
    """Train on the same tasks in rounds. name: of their groups.

    Raises:
        FabricError: not all groups came.
    """
    start_s, run, trained = time.perf_counter(), fabric.the_run, 0
    rounds, count, pushed = TailRounds(tasks, group_count=group_count, group_size=group_size, name=name), 0, 0
    while (batch := rounds.next()) is not None:
        run.submit(**batch.push)
        with run.groups(count=batch.needed, keep=batch.has, timeout=GROUP_TIMEOUT_S) as groups:
            done = list(groups)
            if len(done) < batch.needed:
                raise FabricError(f"{len(done)} of {batch.needed} groups came")
            for left in rounds.end(done):
                run.cancel(left)
        trained += len(done)
        count, pushed = count + 1, pushed + len(batch.tasks) * batch.group_size
    if trained != len(tasks):
        raise FabricError(f"{trained} of {len(tasks)} tasks were trained on")
    kept = len(tasks) * group_size
    return Trained(duration_s=time.perf_counter() - start_s, round_count=count, lost=1 - kept / pushed)
