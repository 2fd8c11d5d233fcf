"""An agent dies in the middle; its trajectories go on with another, each in the way its environment allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from rollfab.fabric.records import Rollout
from tests.fabric_processes import Processes, check_each_arrived_once, check_totals, check_walk, processes

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(60)]

WAYS = {"replay": "Walk", "snapshot": "WalkBySnapshot", "restart": "WalkByRestart"}
WORKERS = {"w-0": "64", "w-1": "16", "w-2": "8"}  # one serves one run; ever smaller, so that none joins another's run
TURNS = 8
GROUPS = ["group-0", "group-1"]
GROUP_SIZE = 3
COUNT = len(GROUPS) * GROUP_SIZE


@dataclass(frozen=True)
class Story:
    """What one way of recovery came to. turns_before: settled when the agent died."""

    rollouts: tuple[Rollout, ...]
    turns_before: int
    counters: Mapping[str, int]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Story]]:
    """Three runs, one for each way, on one agent that is killed in the middle of all of them and started again."""
    with processes(tmp_path_factory.mktemp("recovery")) as fabric:
        words = [word for way, name in WAYS.items() for word in ("--environment", f"{way}=tests.worlds:{name}")]
        # one name for both lives of the agent: the second inherits the inbox
        fabric.start("agent", "agent", "--name", "agent", *words)
        fabric.start("controller", "controller", "--name", "controller")
        for name, slots in WORKERS.items():
            fabric.start(name, "worker", "--name", name, "--slots", slots)
        fabric.wait_for_role("agent", "controller", *WORKERS)
        yield tell(fabric)


def tell(fabric: Processes) -> Mapping[str, Story]:
    options = {"turns": TURNS, "pace_s": 0.25}
    runs = {way: fabric.new_run(way, way, environment_options=options, attempt_count_max=2) for way in WAYS}
    for run in runs.values():
        run.submit([{"seed": index} for index in range(len(GROUPS))], group_size=GROUP_SIZE, group_ids=GROUPS)

    def settled() -> dict[str, int]:
        return {way: run.status().counters.get("turns_settled", 0) for way, run in runs.items()}

    fabric.until(lambda: min(settled().values()) >= 2 * COUNT, 20.0, "every run is in its third turn")
    fabric.supervisor.kill("agent")
    before = settled()
    assert all(run.status().trajectories["running"] == COUNT for run in runs.values())

    stories = {}
    for way, run in runs.items():
        groups = fabric.collect(run, len(GROUPS), 30.0)
        check_each_arrived_once(groups, GROUPS, GROUP_SIZE)
        rollouts = tuple(rollout for group in groups for rollout in group.rollouts)
        stories[way] = Story(rollouts, before[way], check_totals(fabric, run))
    assert fabric.supervisor.children["agent"].start_count == 2
    return stories


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
