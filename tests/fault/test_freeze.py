"""Workers that stop without dying: frozen longer than their claims, or told to give their turns back in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rollfab.fabric.contract.records import Group
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


def check_walks(groups: list[Group], group_size: int, turn_count: int) -> None:
    check_each_arrived_once(groups, GROUPS, group_size)
    for group in groups:
        for rollout in group.rollouts:
            check_walk(rollout, turn_count)


@pytest.mark.timeout(60)
def test_a_lease_that_ends_in_the_middle_moves_turns_with_their_tokens(fabric: Processes) -> None:
    # Given long turns on a lent serving worker; greedy, because the untrained model then never ends one by itself
    fabric.lend("on")
    options = {"turns": 1, "tokens": 400, "pace_s": 0.0}
    run = fabric.new_run("revoked", "walk", environment_options=options, sampling={"temperature": 0.0})
    run.submit([{"seed": index} for index in range(len(GROUPS))], group_size=2, group_ids=GROUPS)
    fabric.until(lambda: fabric.claimed_by(run, "serving") == 8, 20.0, "the serving worker runs what the other cannot")
    dedicated, serving = (fabric.worker_of(name).worker_id for name in ("dedicated", "serving"))
    made_count = fabric.worker_of("serving").token_count
    fabric.until(lambda: fabric.worker_of("serving").token_count > made_count + 20, 10.0, "some tokens are made")

    # When its team wants it back
    held = fabric.claimed_by(run, "serving")
    fabric.lend("off")
    fabric.until(lambda: fabric.claimed_by(run, "serving") == 0, 2.0, "its turns are given back")

    # Then they go on elsewhere behind the tokens they have: no gap, no token made twice, no failure counted
    groups = fabric.collect(run, len(GROUPS), 40.0)
    check_walks(groups, 2, 1)
    moved = [rollout for group in groups for rollout in group.rollouts if len(rollout.spans) > 1]
    assert len(moved) == held == 8
    for rollout in moved:
        assert [span.worker_id for span in rollout.spans] == [serving, dedicated]
        assert {span.policy_version for span in rollout.spans} == {0}
    counters = check_totals(fabric, run)
    assert counters["released"] == len(moved)
    assert counters["turns_settled"] == len(GROUPS) * 2
    assert {len(rollout.completion_ids) for group in groups for rollout in group.rollouts} == {400}
    assert counters["tokens"] == len(GROUPS) * 2 * 400
    assert counters.get("attempts_failed", 0) == counters.get("reaped", 0) == 0


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
    check_walks(groups, 2, TURNS)
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
