"""Kill -9 of any one process in the middle of its work: after its restart every group has arrived exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollfab.fabric.broker.embedded import free_port
from rollfab.fabric.contract.records import Lease
from rollfab.fabric.queue.keys import LEADER
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import (
    PYTHONPATH,
    Processes,
    check_each_arrived_once,
    check_totals,
    check_walk,
    processes,
)

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis]

TURNS = 4
GROUPS = [f"group-{index}" for index in range(6)]
GROUP_SIZE = 3


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("kill")) as fabric:
        fabric.start("serving", "worker", "--role", "serving", "--slots", "8")
        fabric.start("reward", "reward", "--reward", "slow=tests.support.worlds.worlds:slow_reward")
        fabric.start_roles(
            agent=["--environment", "walk=tests.support.worlds.worlds:Walk"],
            worker=["--slots", "8"],  # fewer than trajectories, so that the serving worker is wanted too
        )
        fabric.wait_for_role("serving", "reward")
        yield fabric


def start_walks(fabric: Processes, run_id: str, *, tokens: int = 60, pace_s: float = 0.02, **settings: object) -> Run:
    options = {"turns": TURNS, "tokens": tokens, "pace_s": pace_s}
    run = fabric.new_run(run_id, "walk", environment_options=options, **settings)
    run.submit([{"seed": index} for index in range(len(GROUPS))], group_size=GROUP_SIZE, group_ids=GROUPS)
    return run


def finish_walks(fabric: Processes, run: Run) -> dict[str, int]:
    groups = fabric.collect(run, len(GROUPS), 60.0)
    check_each_arrived_once(groups, GROUPS, GROUP_SIZE)
    for group in groups:
        for rollout in group.rollouts:
            check_walk(rollout, TURNS)
    counters = dict(check_totals(fabric, run))
    assert counters["trajectories_completed"] == len(GROUPS) * GROUP_SIZE
    return counters


def restarted(fabric: Processes, name: str) -> None:
    """The supervisor starts it again, and it is at work."""
    child = fabric.supervisor.children[name]
    start_count = child.start_count
    fabric.until(lambda: child.start_count > start_count, 5.0, f"{name} is started again")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["dedicated", "agent"])
def test_a_killed_worker_or_agent_loses_no_trajectory_and_repeats_no_turn_that_was_settled(
    fabric: Processes, name: str
) -> None:
    # Given trajectories in the middle, whose turns run on the only worker
    run = start_walks(fabric, name)
    fabric.until(lambda: run.status().counters.get("turns_settled", 0) > GROUP_SIZE, 20.0, "turns are settled")
    fabric.until(lambda: fabric.claimed_by(run, "dedicated") >= 4, 20.0, "turns run")

    # When it, or their agent, is killed
    fabric.supervisor.kill(name)
    seen = run.status()
    held = seen.turns["claimed"] if name == "dedicated" else seen.trajectories["running"]
    restarted(fabric, name)

    # Then what it held is taken back, goes on from the turns that are settled, and every turn is settled once
    assert held > 0
    counters = finish_walks(fabric, run)
    assert counters["reaped"] >= held
    assert counters["turns_settled"] == len(GROUPS) * GROUP_SIZE * TURNS


@pytest.mark.timeout(180)
def test_a_killed_controller_costs_its_leases_and_nothing_else(fabric: Processes) -> None:
    # Given a serving worker that runs turns under a lease which only a living controller extends
    fabric.lend("on")
    run = start_walks(
        fabric, "controller", tokens=120, pace_s=0.1
    )  # more turns at once than the dedicated one has slots
    fabric.until(lambda: fabric.claimed_by(run, "serving") > 0, 20.0, "the serving worker runs turns")
    serving = fabric.worker_of("serving").worker_id

    def leases() -> dict[str, Lease]:
        return fabric.ask(lambda ports: ports.board.leases(run.run_id))

    assert leases()[serving].slot_count == 8

    # When the controller is killed
    assert fabric.redis.get(LEADER).startswith(b"controller/")
    fabric.supervisor.kill("controller")
    assert run.status().trajectories["running"] > 0
    restarted(fabric, "controller")

    # Then another start of it leads, everything arrives, and it can still end what its predecessor granted
    finish_walks(fabric, run)
    fabric.lend("off")
    fabric.until(lambda: serving not in leases(), 5.0, "the lease is ended")


@pytest.mark.timeout(90)
def test_a_killed_reward_worker_leaves_no_trajectory_without_its_reward(fabric: Processes) -> None:
    # Given rewards that are being computed
    run = start_walks(fabric, "reward", tokens=1, reward="slow")
    fabric.until(lambda: run.status().counters.get("trajectories_completed", 0) > 0, 20.0, "rewards are computed")

    # When the reward worker is killed
    fabric.supervisor.kill("reward")
    waiting = run.status().trajectories["scoring"]
    restarted(fabric, "reward")

    # Then rewards that its death took are asked for again (after SCORE_MS), and every group arrives once with its own
    assert waiting > 0
    groups = fabric.collect(run, len(GROUPS), 60.0)
    check_each_arrived_once(groups, GROUPS, GROUP_SIZE)
    assert {rollout.reward for group in groups for rollout in group.rollouts} == {float(TURNS)}
    check_totals(fabric, run)


@pytest.mark.timeout(180)
def test_a_killed_trainer_that_repeats_itself_gets_every_group_exactly_once(fabric: Processes, tmp_path: Path) -> None:
    # Given a trainer in the middle of a transaction
    group_count, journal = 14, tmp_path / "journal"
    options = {"turns": 3, "pace_s": 0.02}
    fabric.new_run("trainer", "walk", environment_options=options)
    script = Path(__file__).with_name("trainer_process.py")
    command = [sys.executable, str(script), fabric.url, "trainer", str(journal), str(group_count)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}

    def lines() -> list[str]:
        return journal.read_text().splitlines() if journal.exists() else []

    first = subprocess.Popen(command, env=environment)
    fabric.until(lambda: sum(line.startswith("group") for line in lines()) >= 6, 30.0, "the second transaction is open")
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = lines()
    assert before[-1].startswith("group"), before  # killed inside it
    interrupted = [line.split()[1] for line in before[len(before) - before[::-1].index("begin") :]]
    assert interrupted

    # When it is started again with the same command
    assert subprocess.run(command, env=environment, timeout=40, check=False).returncode == 0, lines()

    # Then what it had in hand comes again, marked so, and everything else once
    after = [line.split()[1:] for line in lines()[len(before) :] if line.startswith("group")]
    assert sorted(name for name, mark in after if mark == "redelivered") == sorted(interrupted)
    acknowledged = [line.split()[1] for line in before if line.startswith("group")][: -len(interrupted)]
    assert sorted([*acknowledged, *(name for name, _ in after)]) == sorted(f"step-{n}" for n in range(group_count))
    assert lines()[-1] == "done"
    run = fabric.fabric.run("trainer")
    published = [int(line.split()[1]) for line in lines() if line.startswith("published")]
    assert run.head_version() == published[-1]
    assert published == list(range(1, len(published) + 1))
    check_totals(fabric, run)


@pytest.mark.timeout(180)
def test_a_killed_api_is_back_and_the_run_never_noticed(fabric: Processes) -> None:
    # Given a page that is being read while a run is under way
    port = free_port()
    fabric.start("api", "api", "--port", str(port))
    fabric.until(lambda: answers(port, "/readyz"), 20.0, "the api answers")
    run = start_walks(fabric, "api")
    fabric.until(lambda: run.status().turns["claimed"] > 0, 20.0, "turns run")
    fabric.until(lambda: b'"api"' in read(port, "/v1/runs"), 10.0, "the api shows the run")

    # When the api is killed
    fabric.supervisor.kill("api")
    assert not answers(port, "/healthz")
    assert run.status().trajectories["running"] > 0
    restarted(fabric, "api")

    # Then everything arrives, with no claim lost, and the page is back
    counters = finish_walks(fabric, run)
    assert counters.get("reaped", 0) == 0
    fabric.until(lambda: answers(port, "/readyz"), 20.0, "the api answers again")


def answers(port: int, path: str) -> bool:
    try:
        return bool(read(port, path))
    except (urllib.error.URLError, ConnectionError):
        return False


def read(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
        return bytes(answer.read())
