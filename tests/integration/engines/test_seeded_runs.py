"""A run whose sampling has a seed, on real processes: it can be repeated, whoever dies meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

from rollfab.fabric.contract.records import Rollout
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import (
    Processes,
    check_each_arrived_once,
    check_totals,
    check_walk,
)

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(150)]

GROUPS = ["group-0", "group-1"]
GROUP_SIZE, TURNS, TOKENS = 3, 3, 60
COUNT = len(GROUPS) * GROUP_SIZE


def begin(fabric: Processes, name: str, seed: int) -> Run:
    options = {"turns": TURNS, "pace_s": 0.0, "tokens": TOKENS}
    run = fabric.new_run(name, "walk", environment_options=options, sampling={"seed": seed})
    run.submit([{"seed": 1}] * len(GROUPS), group_size=GROUP_SIZE, group_ids=GROUPS)
    return run


def collect(fabric: Processes, run: Run) -> dict[str, Rollout]:
    groups = fabric.collect(run, len(GROUPS), 60.0)
    check_each_arrived_once(groups, GROUPS, GROUP_SIZE)
    rollouts = {rollout.trajectory_id: rollout for group in groups for rollout in group.rollouts}
    for rollout in rollouts.values():
        check_walk(rollout, TURNS)
    return rollouts


def test_a_seeded_run_is_repeated_token_for_token_though_its_worker_and_its_agent_are_killed(fabric: Processes) -> None:
    # Given a run that nobody interrupts, of trajectories that all meet the same world
    first = collect(fabric, begin(fabric, "first", seed=7))
    assert len({rollout.completion_ids.tobytes() for rollout in first.values()}) == COUNT

    # When another run does the same under the same seed, and loses its worker and its agent in the middle
    run = begin(fabric, "second", seed=7)
    fabric.until(lambda: run.status().counters.get("turns_settled", 0) >= 1, 30.0, "the first turns are settled")
    fabric.supervisor.kill("dedicated")
    fabric.supervisor.kill("agent")
    second = collect(fabric, run)

    # Then it is the same run
    assert check_totals(fabric, run)["reaped"] > 0
    for name, rollout in first.items():
        assert rollout.completion_ids.tolist() == second[name].completion_ids.tolist(), name
        # a batch of another shape adds up in another order
        np.testing.assert_allclose(second[name].logprobs, rollout.logprobs, atol=1e-4)

    # And under another seed it is another
    other = collect(fabric, begin(fabric, "other", seed=8))
    assert all(other[name].completion_ids.tolist() != first[name].completion_ids.tolist() for name in first)
