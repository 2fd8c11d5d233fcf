"""Kill -9 of the broker itself, and a restart on its data: everything goes on where it was, and nothing comes twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from tests.support.processes.fabric_processes import (
    Processes,
    check_each_arrived_once,
    check_totals,
    check_walk,
    processes,
)

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis]

GROUPS = [f"group-{index}" for index in range(6)]
GROUP_SIZE = 3
TURNS = 12


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("outage")) as fabric:
        fabric.start_roles(agent=["--environment", "walk=tests.support.worlds.worlds:Walk"], worker=["--slots", "8"])
        yield fabric


def restart_broker(fabric: Processes, outage_s: float) -> None:
    """End it as a crash would, and start it on the same data."""
    os.kill(fabric.broker.pid, signal.SIGKILL)
    fabric.until(lambda: not fabric.broker.is_running, 5.0, "the broker is gone")
    time.sleep(outage_s)
    fabric.broker = EmbeddedBroker.start(Path(fabric.broker.data_directory))
    assert fabric.broker.url == fabric.url


@pytest.mark.timeout(60)
@pytest.mark.parametrize("outage_s", [0.1, 2.5], ids=["shorter than a claim", "longer than a claim"])
def test_a_broker_that_crashes_and_comes_back_loses_nothing(fabric: Processes, outage_s: float) -> None:
    # Given turns on a worker, and more that wait
    starts = {name: child.start_count for name, child in fabric.supervisor.children.items()}
    run = fabric.new_run(
        f"outage-{outage_s:g}".replace(".", "-"), "walk", environment_options={"turns": TURNS, "tokens": 8}
    )
    run.submit([{"seed": index} for index in range(len(GROUPS))], group_size=GROUP_SIZE, group_ids=GROUPS)
    fabric.until(lambda: run.status().counters.get("turns_settled", 0) >= 2 * GROUP_SIZE, 20.0, "turns are settled")

    # When the broker crashes and comes back
    restart_broker(fabric, outage_s)
    assert run.status().trajectories["running"] > 0

    # Then every group arrives once, each turn of it was settled once, and no process had to be started again
    groups = fabric.collect(run, len(GROUPS), 40.0)
    check_each_arrived_once(groups, GROUPS, GROUP_SIZE)
    for group in groups:
        for rollout in group.rollouts:
            check_walk(rollout, TURNS)
    assert check_totals(fabric, run)["turns_settled"] == len(GROUPS) * GROUP_SIZE * TURNS
    assert {name: child.start_count for name, child in fabric.supervisor.children.items()} == starts
