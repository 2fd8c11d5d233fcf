"""A worker that stops without dying, frozen longer than its claims: others do its turns, and it can write nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.processes.fabric_processes import (
    Processes,
    check_each_arrived_once,
    check_totals,
    check_walk,
    processes,
)

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis]

TURNS = 40
GROUPS = [f"group-{index}" for index in range(8)]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("freeze")) as fabric:
        fabric.start("serving", "worker", "--role", "serving", "--slots", "8")
        fabric.start_roles(agent=["--environment", "walk=tests.support.worlds.worlds:Walk"], worker=["--slots", "8"])
        fabric.wait_for_role("serving")
        yield fabric


@pytest.mark.timeout(60)
def test_a_worker_frozen_longer_than_its_claims_can_write_nothing_when_it_wakes(fabric: Processes) -> None:
    # Given two workers that run turns of many lengths
    fabric.lend("on")
    options = {"turns": TURNS, "tokens": 24, "pace_s": 0.0, "any_length": True}
    run = fabric.new_run("frozen", "walk", environment_options=options)
    run.submit([{"seed": index} for index in range(len(GROUPS))], group_size=2, group_ids=GROUPS)
    fabric.until(lambda: fabric.claimed_by(run, "dedicated") >= 6, 20.0, "the dedicated worker is full")
    fabric.until(lambda: fabric.claimed_by(run, "serving") > 0, 20.0, "the serving worker takes part")
    pid = fabric.supervisor.children["dedicated"].pid
    assert pid is not None

    # When one stops, and while the broker is slow: so it has finished turns that it could not hand in
    fabric.redis.client_pause(600)
    time.sleep(0.4)
    os.kill(pid, signal.SIGSTOP)
    try:
        held = fabric.claimed_by(run, "dedicated")  # answered when the pause is over
        groups = fabric.collect(run, len(GROUPS), 40.0)
    finally:
        before = run.status().counters
        os.kill(pid, signal.SIGCONT)

    # Then the other one has done its turns
    assert held > 0
    check_each_arrived_once(groups, GROUPS, 2)
    for rollout in [each for group in groups for each in group.rollouts]:
        check_walk(rollout, TURNS)
    assert before["reaped"] >= held
    assert before["turns_settled"] == len(GROUPS) * 2 * TURNS

    # And when it goes on, all it has to say is refused: nothing changes, and nothing comes twice
    fabric.until(lambda: run.status().counters.get("refused", 0) > before.get("refused", 0), 5.0, "it is refused")
    assert list(run.groups(timeout=0.5)) == []
    after = check_totals(fabric, run)
    assert {**after, "refused": 0} == {**before, "refused": 0}
    assert fabric.supervisor.children["dedicated"].start_count == 1

    # And it is fit for new work
    fabric.lend("off")
    again = fabric.new_run("thawed", "walk", environment_options={"turns": 2})
    again.submit([{"seed": 0}], group_size=2, group_ids=["group"])
    (group,) = fabric.collect(again, 1, 20.0)
    dedicated = fabric.worker_of("dedicated").worker_id
    assert {span.worker_id for rollout in group.rollouts for span in rollout.spans} == {dedicated}
