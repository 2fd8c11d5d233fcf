"""The serving team's switch with real processes: it needs the broker and the worker, and nobody who leads."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rollfab.fabric.contract.records import TokenLog
from rollfab.fabric.contract.sharing import LendSetting
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import (
    Processes,
    check_each_arrived_once,
    check_totals,
    check_walk,
    processes,
)

pytestmark = [pytest.mark.slow, pytest.mark.redis]

GROUPS = [f"group-{index}" for index in range(4)]
TOKENS = 450  # of a turn: longer than what happens here takes


@pytest.fixture
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """No dedicated worker: what the serving one gives back waits."""
    with processes(tmp_path_factory.mktemp("switch")) as fabric:
        fabric.start("serving", "worker", "--role", "serving", "--slots", "8")
        fabric.start("controller", "controller", "--name", "controller")
        fabric.start("agent", "agent", "--environment", "walk=tests.support.worlds.worlds:Walk")
        fabric.wait_for_role("serving", "controller", "agent")
        yield fabric


def logged_count(fabric: Processes, run: Run) -> int:
    """Tokens that the broker keeps of turns which wait."""
    rows = fabric.redis.hgetall(ShardKeys(run.run_id, 0).turn.log)
    return sum(len(TokenLog.decode(raw).completion_ids) for raw in rows.values())  # type: ignore[union-attr]


def tokens_of(fabric: Processes) -> int:
    return fabric.worker_of("serving").token_count


def next_beats(fabric: Processes, count: int) -> None:
    """Wait until the serving worker has told how it is, so many times more."""
    name = fabric.worker_of("serving").worker_id
    for _ in range(count):
        before = fabric.redis.zscore("rf:{rf}:heartbeats", name)
        fabric.until(
            lambda before=before: fabric.redis.zscore("rf:{rf}:heartbeats", name) != before, 5.0, "a heartbeat"
        )


@pytest.mark.timeout(90)
def test_with_the_controller_dead_the_switch_gives_turns_back_and_the_engine_makes_no_token(fabric: Processes) -> None:
    # Given long turns on a lent serving worker; greedy, because the untrained model then never ends one by itself
    fabric.lend("on")
    options = {"turns": 1, "tokens": TOKENS, "pace_s": 0.0}
    run = fabric.new_run("r1", "walk", environment_options=options, sampling={"temperature": 0.0})
    run.submit([{"seed": index} for index in range(len(GROUPS))], group_size=2, group_ids=GROUPS)
    fabric.until(lambda: fabric.claimed_by(run, "serving") == 8, 20.0, "the serving worker runs all turns")
    made = tokens_of(fabric)
    fabric.until(lambda: tokens_of(fabric) > made + 20, 10.0, "some tokens are made")
    name = fabric.worker_of("serving").worker_id
    held = ShardKeys(run.run_id, 0).turn.held

    # When the controller is killed, and then the team takes its GPUs back
    controller = fabric.supervisor.children["controller"]
    controller.is_restarted = False
    fabric.supervisor.kill("controller")

    async def switch(ports: RedisFabric) -> tuple[float, float]:
        """Seconds until its turns were back, and milliseconds that its lease then had left."""
        begin_s = time.monotonic()
        await ports.board.set_lend("*", LendSetting(mode="off", said_by="ann", reason="incident"))
        while fabric.redis.hget(held, name):
            assert time.monotonic() < begin_s + 10.0, f"it keeps its turns\n{fabric.logs()}"
        passed_s = time.monotonic() - begin_s
        seconds, microseconds = fabric.redis.time()  # type: ignore[misc]
        until_ms = (await ports.board.leases("r1"))[name].lease_until_ms
        assert until_ms is not None
        return passed_s, until_ms - (seconds * 1000 + microseconds / 1000)

    passed_s, left_ms = fabric.ask(switch)
    print(f"switch to turns given back: {passed_s * 1000:.1f} ms")

    # Then its turns came back because of that, not because their lease ran out: it had time left
    assert left_ms > 0
    assert controller.pid is None
    # And they hold what was made of them, and the engine makes no token any more, nor takes a turn
    kept = logged_count(fabric, run)
    assert kept > 8
    next_beats(fabric, 1)
    stopped_at = tokens_of(fabric)
    next_beats(fabric, 2)
    assert tokens_of(fabric) == stopped_at
    assert (fabric.claimed_by(run, "serving"), logged_count(fabric, run)) == (0, kept)
    assert run.status().counters["released"] == 8

    # And when somebody leads and the team lends again, they go on behind what they have
    controller.start()
    fabric.lend("on")
    groups = fabric.collect(run, len(GROUPS), 60.0)
    check_each_arrived_once(groups, GROUPS, 2)
    for group in groups:
        for rollout in group.rollouts:
            check_walk(rollout, 1)
    counters = check_totals(fabric, run)
    assert counters["tokens"] == len(GROUPS) * 2 * TOKENS
    assert counters.get("attempts_failed", 0) == counters.get("reaped", 0) == 0
    assert tokens_of(fabric) - len(GROUPS) * 2 * TOKENS <= 0  # none was made twice
