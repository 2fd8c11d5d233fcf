"""What users' code does wrong costs its own trajectory alone: retried, then a dead letter that names it, never a 0."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from rq import Callback, Queue
from rq.job import Job

from rollfab.fabric.contract.records import DeadLetter, Group
from rollfab.workers.rewards.jobs import QUEUE_NAME, enqueue, open_queue
from tests.support.processes.fabric_processes import Processes, check_rollout, check_totals, processes
from tests.support.worlds.worlds import BrokenGym

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(120)]

ATTEMPTS = 3
TIMEOUT_S = 1

# fault → what the dead letter's reason says after the environment's name; what its traceback says
ENVIRONMENT_FAULTS = {
    "reset": ("reset raised KeyError: 'no such level'", 'raise KeyError("no such level")'),
    "reset hangs": (f"reset took longer than {TIMEOUT_S} s", "EnvironmentFailed"),
    "will not be stopped": (f"reset took longer than {TIMEOUT_S} s", "EnvironmentFailed"),
    "no observation": ("reset gave None, expected an Observation", "EnvironmentFailed"),
    "empty observation": ("the first observation is empty", "EnvironmentFailed"),
    "step": ("step raised RuntimeError: the world fell over", 'raise RuntimeError("the world fell over")'),
    "step and close": ("step raised RuntimeError: the world fell over", 'raise RuntimeError("the world fell over")'),
    "times out": ("step raised TimeoutError: the game server", 'raise TimeoutError("the game server")'),
    "exit": ("step raised RuntimeError: SystemExit(3) left the code", "raise SystemExit(3)"),
    "cancelled": ("step raised RuntimeError: CancelledError() left the code", "raise asyncio.CancelledError"),
    "no step": ("step gave {'reward': 1.0}, expected a Step", "EnvironmentFailed"),
    "no text": ("step gave Step(text=None", "EnvironmentFailed"),
    "no JSON": ("info cannot be sent", "Broken"),
    "odd text": ("step raised RuntimeError: lone surrogate", "lone surrogate"),
    "NaN": ("gave reward nan: rewards must be finite", "EnvironmentFailed"),
    "infinite": ("gave reward inf: rewards must be finite", "EnvironmentFailed"),
    "no number": ("gave reward 'high': not a number", "EnvironmentFailed"),
}
GYM_FAULTS = {
    "hangs": (f"step took longer than {TIMEOUT_S} s", "EnvironmentFailed"),
    "stops": ("step raised RuntimeError: StopIteration() left the code", "next(iter(()))"),
    "exits": ("step raised RuntimeError: SystemExit(4) left the code", "raise SystemExit(4)"),
    "four values": ("expected (observation, reward, terminated, truncated, info)", "EnvironmentFailed"),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a run's groups, by the ids they were submitted under."""

    groups: Mapping[str, Group]
    letters: Mapping[str, DeadLetter]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("fail")) as fabric:
        names = {"walk": "Walk", "broken": "Broken", "gym": "BrokenGym", "unmakeable": "Unmakeable"}
        allowed = [
            word
            for name, cls in names.items()
            for word in ("--environment", f"{name}=tests.support.worlds.worlds:{cls}")
        ]
        allowed_rewards = ["--reward", "broken=tests.support.worlds.worlds:broken_reward", "--timeout", str(TIMEOUT_S)]
        fabric.start("reward", "reward", *allowed_rewards)
        fabric.start_roles(agent=[*allowed, "--timeout", str(TIMEOUT_S)])
        fabric.wait_for_role("reward")
        yield fabric


def play(
    fabric: Processes, run_id: str, environment: str, tasks: Mapping[str, Mapping[str, Any]], **settings: Any
) -> Outcome:
    """Run tasks, given by group id, in groups of two; nothing of the run may be left over."""
    run = fabric.new_run(run_id, environment, attempt_count_max=ATTEMPTS, **settings)
    run.submit(list(tasks.values()), group_size=2, group_ids=list(tasks))
    groups = {group.group_id: group for group in fabric.collect(run, len(tasks), 40.0)}
    assert set(groups) == set(tasks)
    counters = check_totals(fabric, run)
    failure_count = sum(len(group.failures) for group in groups.values())
    assert counters.get("trajectories_failed", 0) == failure_count
    letters = fabric.dead_letters(run)
    assert len(letters) == failure_count
    return Outcome(groups, letters)


def check_dead(outcome: Outcome, group_id: str, reason: str, traceback: str) -> None:
    """Both trajectories of a group were tried ATTEMPTS times and given up, for this reason."""
    group = outcome.groups[group_id]
    assert group.rollouts == ()
    assert [each.trajectory_id for each in group.failures] == [f"{group_id}.0", f"{group_id}.1"]
    for name, why in group.failures:
        letter = outcome.letters[name]
        assert reason in letter.reason == why
        assert letter.traceback.startswith("Traceback")
        assert traceback in letter.traceback
        assert letter.attempt == ATTEMPTS - 1
        assert letter.job["trajectory_id"] == name


def check_well(group: Group, reward: float, count: int = 2) -> None:
    assert [rollout.reward for rollout in group.rollouts] == [reward] * count
    for rollout in group.rollouts:
        check_rollout(rollout)


# ---- environments


@pytest.fixture(scope="module")
def broken(fabric: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """One run in which every fault there is happens beside groups that are well."""
    directory = tmp_path_factory.mktemp("attempts")
    tasks: dict[str, dict[str, Any]] = {}
    for index, fault in enumerate(ENVIRONMENT_FAULTS):
        tasks[f"bad-{index}"] = {"fault": fault, "attempts_file": str(directory / f"{index}")}
        tasks[f"well-{index}"] = {}
    tasks["half"] = {"fault": "step", "fault_seeds": [crc32(b"half.1")]}
    tasks["recovers"] = {"fault": "recovers", "attempts_file": str(directory / "recovers")}
    return play(fabric, "broken", "broken", tasks), directory


@pytest.mark.parametrize("fault", ENVIRONMENT_FAULTS)
def test_a_broken_environment_is_retried_then_a_dead_letter(broken: tuple[Outcome, Path], fault: str) -> None:
    index = list(ENVIRONMENT_FAULTS).index(fault)
    outcome, directory = broken
    reason, traceback = ENVIRONMENT_FAULTS[fault]

    check_dead(outcome, f"bad-{index}", reason, traceback)

    assert "environment 'broken'" in outcome.letters[f"bad-{index}.0"].reason
    assert (directory / f"{index}").read_text().count("attempt") == 2 * ATTEMPTS


def test_trajectories_beside_broken_ones_are_well(fabric: Processes, broken: tuple[Outcome, Path]) -> None:
    outcome, _ = broken

    for index in range(len(ENVIRONMENT_FAULTS)):
        check_well(outcome.groups[f"well-{index}"], 1.0)

    assert all(child.start_count == 1 and child.is_running for child in fabric.supervisor.children.values())


def test_a_group_arrives_with_the_rollouts_it_has_and_names_those_it_has_not(broken: tuple[Outcome, Path]) -> None:
    group = broken[0].groups["half"]

    assert [each.trajectory_id for each in group.failures] == ["half.1"]
    assert [rollout.trajectory_id for rollout in group.rollouts] == ["half.0"]
    check_well(group, 1.0, count=1)


def test_an_environment_that_fails_once_is_scored_by_its_second_attempt(broken: tuple[Outcome, Path]) -> None:
    outcome, directory = broken
    group = outcome.groups["recovers"]

    assert (directory / "recovers").read_text().count("attempt") == 2 + sum(each.attempt for each in group.rollouts)
    assert group.failures == ()
    assert max(rollout.attempt for rollout in group.rollouts) >= 1
    check_well(group, 1.0)


@pytest.fixture(scope="module")
def broken_gym(fabric: Processes) -> Outcome:
    tasks = {fault.replace(" ", "-"): {"seed": seed} for fault, seed in BrokenGym.SEEDS.items()}
    return play(fabric, "gym", "gym", {**tasks, "well": {"seed": 1}})


@pytest.mark.parametrize("fault", GYM_FAULTS)
def test_a_broken_synchronous_environment_blocks_nobody(broken_gym: Outcome, fault: str) -> None:
    check_dead(broken_gym, fault.replace(" ", "-"), *GYM_FAULTS[fault])

    assert "environment 'gym'" in broken_gym.letters[f"{fault.replace(' ', '-')}.0"].reason
    check_well(broken_gym.groups["well"], 1.0)


def test_an_environment_that_cannot_be_constructed_says_why(fabric: Processes) -> None:
    outcome = play(fabric, "unmakeable", "unmakeable", {"group": {}})

    check_dead(
        outcome, "group", "environment 'unmakeable': make raised FileNotFoundError: maps/level-1.txt", "__init__"
    )


def test_options_that_an_environment_does_not_take_are_named(fabric: Processes) -> None:
    outcome = play(fabric, "options", "walk", {"group": {}}, environment_options={"levels": 3})

    check_dead(outcome, "group", "environment 'walk' does not take the options {'levels': 3}", "levels")


# ---- rq jobs


def test_a_job_that_is_not_registered_never_runs(fabric: Processes, tmp_path: Path) -> None:
    # Given jobs as someone with access to the broker could put them there
    mark = tmp_path / "ran"
    queue = open_queue(fabric.url)
    pickled = Queue(QUEUE_NAME, connection=queue.connection)
    jobs = [
        queue.enqueue_call("os.system", args=[f"touch {mark}"]),
        queue.enqueue_call("tests.support.worlds.worlds.touch", args=[str(mark)]),
        queue.enqueue_call("no_such_job"),
        pickled.enqueue_call("tests.support.worlds.worlds.touch", args=[str(mark)]),
    ]
    accepted = queue.enqueue_call(
        "score", args=["no-such-run", []], on_success=Callback("tests.support.worlds.worlds.touch")
    )

    # When the worker has taken them
    is_there = partial(Job.exists, accepted.id, connection=queue.connection)  # what went well is forgotten
    fabric.until(lambda: queue.is_empty() and not is_there(), 20.0, "the jobs were taken")

    # Then none of them ran, each says why, and the worker lives and works
    assert not mark.exists()
    for job in jobs[:3]:
        fabric.until(lambda job=job: job.get_status() == "failed", 5.0, "it failed")
        assert f"rq job {job.func_name!r} is not registered" in said(job)
    fabric.until(lambda: jobs[3].get_status() == "failed", 5.0, "the pickled one failed")
    assert fabric.supervisor.children["reward"].start_count == 1
    run = fabric.new_run("after", "broken", reward="broken")
    run.submit([{}], group_size=2)
    check_well(fabric.collect(run, 1, 20.0)[0], 2.0)
    queue.connection.close()


def said(job: Job) -> str:
    result = job.latest_result()
    assert result is not None
    return result.exc_string or ""


def test_a_run_is_deleted_by_a_registered_job(fabric: Processes) -> None:
    # Given a run, and a task that nobody will do
    run = fabric.new_run("doomed", "broken")
    queue = open_queue(fabric.url)

    # When the housekeeping job is asked for by its name
    enqueue(queue, "delete_run", "doomed")
    fabric.until(lambda: "doomed" not in fabric.fabric.runs(), 10.0, "the run is gone")

    # Then none of its keys is left, a while later either
    time.sleep(0.5)
    fabric.until(lambda: not left(fabric), 5.0, f"its keys are gone: {left(fabric)}")
    assert run.run_id not in fabric.fabric.runs()
    queue.connection.close()


def left(fabric: Processes) -> list[bytes]:
    return list(fabric.redis.scan_iter(match="rf:{doomed*"))
