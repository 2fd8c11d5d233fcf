"""An agent dies in the middle; its trajectories go on with another, each in the way its environment allows.

Whatever the way, the trajectory is the one it would have been: greedy, it equals one that nobody interrupted. Where
that cannot be, it is said, and a new attempt starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from rollfab.fabric.contract.records import Rollout
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import (
    Processes,
    check_each_arrived_once,
    check_totals,
    check_walk,
    processes,
)

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(150)]

WAYS = {
    "replay": "tests.support.worlds.worlds:Walk",
    "snapshot": "tests.support.worlds.worlds:WalkBySnapshot",
    "restart": "tests.support.worlds.worlds:WalkByRestart",
}
WORKERS = {"w-0": "64", "w-1": "16", "w-2": "8"}  # one serves one run; ever smaller, so that none joins another's run
TURNS = 8
GROUPS = ["group-0", "group-1"]
GROUP_SIZE = 3
COUNT = len(GROUPS) * GROUP_SIZE
GREEDY = {"temperature": 0.0}


@dataclass(frozen=True)
class Story:
    """What became of one run. turns_before: settled when the agent died."""

    rollouts: tuple[Rollout, ...]
    turns_before: int
    counters: Mapping[str, int]


def roles(fabric: Processes, environments: Mapping[str, str]) -> None:
    words = [word for name, target in environments.items() for word in ("--environment", f"{name}={target}")]
    # one name for both lives of the agent: the second inherits the inbox
    fabric.start("agent", "agent", "--name", "agent", *words)
    fabric.start("controller", "controller", "--name", "controller")
    for name, slots in WORKERS.items():
        fabric.start(name, "worker", "--name", name, "--slots", slots)
    fabric.wait_for_role("agent", "controller", *WORKERS)


def begin(fabric: Processes, name: str, environment: str, *, pace_s: float) -> Run:
    options = {"turns": TURNS, "pace_s": pace_s}
    settings = {"environment_options": options, "sampling": GREEDY, "attempt_count_max": 2}
    run = fabric.new_run(name, environment, is_lively=True, **settings)
    run.submit([{"seed": index} for index in range(len(GROUPS))], group_size=GROUP_SIZE, group_ids=GROUPS)
    return run


def interrupt(fabric: Processes) -> Mapping[str, Story]:
    """A run for each way of recovery, on one agent that is killed in the middle of all of them and started again."""
    runs = {name: begin(fabric, name, name, pace_s=0.25) for name in WAYS}

    def settled() -> dict[str, int]:
        return {name: run.status().counters.get("turns_settled", 0) for name, run in runs.items()}

    fabric.until(lambda: min(settled().values()) >= 2 * COUNT, 30.0, "every run is in its third turn")
    fabric.supervisor.kill("agent")
    before = settled()
    assert all(run.status().trajectories["running"] == COUNT for run in runs.values())

    stories = {}
    for name, run in runs.items():
        groups = fabric.collect(run, len(GROUPS), 60.0)
        check_each_arrived_once(groups, GROUPS, GROUP_SIZE)
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
        stories[name] = Story(rollouts, before[name], check_totals(fabric, run))
    assert fabric.supervisor.children["agent"].start_count == 2
    return stories


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Story, Mapping[str, Story]]]:
    """A run that nobody interrupts, then one for each way of recovery."""
    with processes(tmp_path_factory.mktemp("recovery")) as fabric:
        roles(fabric, {**WAYS, "whole": WAYS["replay"]})
        run = begin(fabric, "whole", "whole", pace_s=0.0)
        groups = fabric.collect(run, len(GROUPS), 60.0)
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
        whole = Story(rollouts, 0, check_totals(fabric, run))
        yield whole, interrupt(fabric)


@pytest.fixture(scope="module")
def stories(told: tuple[Story, Mapping[str, Story]]) -> Mapping[str, Story]:
    return told[1]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_interrupted_equals_what_was_not(told: tuple[Story, Mapping[str, Story]], way: str) -> None:
    whole, stories = told
    expected = {rollout.trajectory_id: rollout for rollout in whole.rollouts}
    assert len(expected) == COUNT
    assert len({rollout.completion_ids.tobytes() for rollout in whole.rollouts}) > 1  # the worlds do differ

    for rollout in stories[way].rollouts:
        other = expected[rollout.trajectory_id]
        for name in ("prompt_ids", "completion_ids", "completion_mask"):
            assert np.array_equal(getattr(rollout, name), getattr(other, name)), (rollout.trajectory_id, name)
        # a batch of another shape adds up in another order
        np.testing.assert_allclose(rollout.logprobs, other.logprobs, atol=1e-4)
        assert rollout.info["rewards"] == other.info["rewards"]
        assert rollout.info["actions"] == other.info["actions"]
        assert (rollout.seed, rollout.reward) == (other.seed, other.reward)


@pytest.mark.parametrize("way", WAYS)
def test_every_trajectory_of_a_killed_agent_is_whole(stories: Mapping[str, Story], way: str) -> None:
    story = stories[way]

    assert 2 * COUNT <= story.turns_before < TURNS * COUNT
    assert story.counters["reaped"] == COUNT
    for rollout in story.rollouts:
        check_walk(rollout, TURNS)
        assert rollout.reward == pytest.approx(1.0)


@pytest.mark.parametrize("way", ["replay", "snapshot"])
def test_no_turn_is_generated_twice(stories: Mapping[str, Story], way: str) -> None:
    story = stories[way]

    assert story.counters["turns_settled"] == COUNT * TURNS
    assert story.counters["tokens"] == sum(int(rollout.completion_mask.sum()) for rollout in story.rollouts)
    assert story.counters.get("attempts_failed", 0) == 0
    assert {rollout.attempt for rollout in story.rollouts} == {0}


def test_a_replayed_world_goes_through_every_step_again(stories: Mapping[str, Story]) -> None:
    assert {rollout.info["steps_here"] for rollout in stories["replay"].rollouts} == {TURNS}


def test_a_world_from_a_snapshot_only_goes_through_what_came_after(stories: Mapping[str, Story]) -> None:
    steps = [rollout.info["steps_here"] for rollout in stories["snapshot"].rollouts]

    assert max(steps) <= TURNS - 1
    assert sum(steps) <= COUNT * TURNS - (stories["snapshot"].turns_before - COUNT)  # at most the last one again


def test_a_restarted_world_is_a_new_attempt_from_the_first_turn(stories: Mapping[str, Story]) -> None:
    story = stories["restart"]

    assert {rollout.attempt for rollout in story.rollouts} == {1}
    assert story.counters["attempts_failed"] == COUNT
    assert story.counters["turns_settled"] >= COUNT * TURNS + story.turns_before
    assert {rollout.info["steps_here"] for rollout in story.rollouts} == {TURNS}
