"""Environments with processes of their own, on a real agent: they fail alone, go on elsewhere, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import Processes, check_rollout, check_totals, processes
from tests.support.processes.process_groups import Groups

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(180)]

TIMEOUT_S = 3
ATTEMPTS = 2
TURNS = 8
# What is said of each fault: test_environment_processes.py; at an agent: test_bad_neighbours.py.
FAULTS = ("sleep", "stop", "leave_child", "leave_daemon", "segfault")


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Whatever happens in it, no environment process is left when it is stopped."""
    with processes(tmp_path_factory.mktemp("isolation")) as fabric:
        words = ["--environment", "captive=tests.support.worlds.isolated_worlds:Captive"]
        fabric.start_roles(agent=[*words, "--name", "agent", "--timeout", str(TIMEOUT_S)])
        yield fabric
        last = held(fabric)
    last.check_gone()


def held(fabric: Processes) -> Groups:
    """The environment processes that the agent holds now."""
    agent = psutil.Process(fabric.supervisor.children["agent"].pid)
    return Groups(each.pid for each in agent.children() if any("holder.py" in word for word in _words(each)))


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended
        return []


def begin(fabric: Processes, run_id: str, environment: str, **settings: object) -> Run:
    return fabric.new_run(run_id, environment, attempt_count_max=ATTEMPTS, **settings)


def test_what_hung_or_crashed_is_gone_while_the_agent_lives_and_others_are_well(
    fabric: Processes, tmp_path: Path
) -> None:
    # Given processes that hang, crash, and start others, beside some that are well
    run = begin(fabric, "broken", "captive")
    run.submit([{"fault": fault, "marks": str(tmp_path)} for fault in FAULTS], group_size=1, group_ids=list(FAULTS))
    run.submit([{"marks": str(tmp_path)}] * 4, group_size=2)

    # When each has failed its own trajectory
    groups = {group.group_id: group for group in fabric.collect(run, len(FAULTS) + 4, 100.0)}
    assert all(groups.pop(fault).rollouts == () for fault in FAULTS)
    for group in groups.values():
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
        for rollout in group.rollouts:
            check_rollout(rollout)
    check_totals(fabric, run)
    assert set(fabric.dead_letters(run)) == {f"{fault}.0" for fault in FAULTS}

    # Then it serves nobody again, and it and what it started is gone
    assert fabric.supervisor.children["agent"].start_count == 1
    assert len(list(tmp_path.iterdir())) >= ATTEMPTS * len(FAULTS)
    fabric.until(lambda: len(held(fabric)) <= 8, 20.0, "those of the eight that were well are left")
    agent = psutil.Process(fabric.supervisor.children["agent"].pid)
    fabric.until(
        lambda: not any("time.sleep(1000)" in word for each in agent.children(recursive=True) for word in _words(each)),
        20.0,
        "what they started is gone",
    )


def test_its_trajectories_go_on_when_the_agent_is_killed_and_its_processes_do_not(
    fabric: Processes, tmp_path: Path
) -> None:
    # Given trajectories in the middle, each in a process of its own
    tasks = [{"marks": str(tmp_path)}]
    run = begin(fabric, "killed", "captive", environment_options={"turns": TURNS, "pace_s": 0.3})
    run.submit(tasks, group_size=3, group_ids=["group"])
    # (those that failed before make each of their starts wait a moment)
    fabric.until(lambda: len(list(tmp_path.iterdir())) == 3, 20.0, "each has its process")
    fabric.until(lambda: run.status().counters.get("turns_settled", 0) >= 6, 20.0, "two turns each")
    first, processes = held(fabric), {path.name for path in tmp_path.iterdir()}
    assert first.held() >= 3

    # When the agent is killed
    fabric.supervisor.kill("agent")

    # Then its environments end with it, and another agent's go on from their snapshots
    first.check_gone()
    (group,) = fabric.collect(run, 1, 30.0)
    for rollout in group.rollouts:
        check_rollout(rollout)
        assert (rollout.turn_count, rollout.attempt, rollout.reward) == (TURNS, 0, pytest.approx(TURNS / 2))
        assert rollout.info["process"] not in processes
    assert check_totals(fabric, run)["turns_settled"] == 3 * TURNS
