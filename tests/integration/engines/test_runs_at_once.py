"""Runs of the same weights on one real engine: at once, each by its own names, token for token as alone."""

from __future__ import annotations

import pytest

from rollfab.deploy.cli.options import with_ports
from rollfab.fabric.contract.records import Rollout
from rollfab.trainer.client import Run
from tests.bench.lively import lively_weights
from tests.support.processes.fabric_processes import Processes, check_each_arrived_once, check_walk

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(200)]

GROUPS = ["group-0", "group-1"]
GROUP_SIZE, TURNS, TOKENS = 2, 3, 120


def begin(fabric: Processes, name: str, version: int) -> Run:
    """A run whose `version` has the same weights as any other's here."""
    options = {"turns": TURNS, "pace_s": 0.0, "tokens": TOKENS}
    run = fabric.fabric.run(name, model="tiny", environment="walk", environment_options=options, sampling={"seed": 7})
    run.publish(lively_weights(), version=version)
    run.submit([{"seed": 1}] * len(GROUPS), group_size=GROUP_SIZE, group_ids=GROUPS)
    return run


def collect(fabric: Processes, run: Run, version: int) -> dict[str, Rollout]:
    groups = fabric.collect(run, len(GROUPS), 60.0)
    check_each_arrived_once(groups, GROUPS, GROUP_SIZE)
    rollouts = {rollout.trajectory_id: rollout for group in groups for rollout in group.rollouts}
    for rollout in rollouts.values():
        check_walk(rollout, TURNS)
        assert {span.policy_version for span in rollout.spans} == {version}
    return rollouts


def guests(fabric: Processes) -> dict[str, int]:
    """The guests of its workers, with the versions by which they name what is live."""
    workers = with_ports(fabric.url, lambda ports: ports.board.workers())
    return {name: version for info, _ in workers.values() for name, version in info.guest_versions.items()}


def test_runs_of_the_same_weights_get_at_once_what_each_would_get_alone(fabric: Processes) -> None:
    # Given what a run gets alone
    alone = collect(fabric, begin(fabric, "alone", 0), 0)

    # When two run at once, whose trajectories have the same names, and their worker is killed in the middle
    one, two = begin(fabric, "one", 2), begin(fabric, "two", 5)
    fabric.until(lambda: max(guests(fabric).values(), default=-1) >= 0, 30.0, "one is the other's guest")
    fabric.supervisor.kill("dedicated")

    # Then each gets the same, by its own version
    for run, version in ((one, 2), (two, 5)):
        found = collect(fabric, run, version)
        for name, rollout in alone.items():
            assert rollout.completion_ids.tolist() == found[name].completion_ids.tolist(), (run.run_id, name)
