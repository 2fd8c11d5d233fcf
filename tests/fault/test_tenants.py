"""Twenty runs on one agent and one reward worker, of which one is as bad as it can be: the others hardly notice."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Iterator
from statistics import mean, variance

import numpy as np
import pytest

from rollfab.fabric.bus.fabric import RedisFabric
from rollfab.fabric.ports import TurnClaim, TurnSettle
from rollfab.fabric.records import Failure, Lease, RunConfig, Span, TurnResult
from rollfab.trainer.client import Run
from tests.fabric_processes import Processes, processes
from tests.integration.test_bad_neighbours import ATTACKS
from tests.reward_worlds import FAULTS

GOOD_COUNT = 19
GROUP_SIZE = 2
ROUND_COUNT = 4  # of each, by turns: a machine that others use as well is not the same for long
MEASURED_S = 8.0
KEPT_FRACTION = 0.9
QUIET_S = 2.0  # until all are at work

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(300)]


@pytest.fixture
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("tenants")) as fabric:
        allowed = [
            word
            for name, target in (("attacker", "Attacker"), ("neighbour", "Neighbour"))
            for word in ("--environment", f"{name}=tests.attack_worlds:{target}")
        ]
        # A place for each trajectory: what anybody may have is shared by weight, whoever asks for more.
        words = ["--count", str((GOOD_COUNT + 1) * GROUP_SIZE), "--timeout", "3", "--memory", "1024"]
        fabric.start("agent", "agent", *allowed, *words)
        rewards = [word for name in ("bad", "well") for word in ("--reward", f"{name}=tests.reward_worlds:{name}")]
        fabric.start("reward", "reward", *rewards, "--timeout", "2", "--memory", "512")
        fabric.wait_for_role("agent", "reward")
        yield fabric


async def answer(fabric: Processes, runs: list[Run], is_over: threading.Event) -> None:
    """Every run's turns at once, each with one token: a policy that is nobody's bottleneck."""
    async with await RedisFabric.open(fabric.url, client_name="policy") as ports:

        async def serve(config: RunConfig) -> None:
            lease = Lease(worker_id="w", run_id=config.run_id, lease_epoch=1, slot_count=64, lease_until_ms=None)
            await ports.board.set_lease(lease, None)
            turns, done = ports.turns(config), list[TurnSettle]()
            while not is_over.is_set():
                got = await turns.exchange("w", settles=done, want=64, lease_epoch=1, active_version=0)
                done = [TurnSettle(claim=claim, result=result_of(claim)) for claim in got.claims]
                if not done:
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(serve(run.config) for run in runs))


def result_of(claim: TurnClaim) -> TurnResult:
    return TurnResult(
        turn_id=claim.job.turn_id,
        finish_reason="length",
        spans=(Span(0, 1, "w", 0),),
        completion_ids=np.full(1, 7, np.int32),
        logprobs=np.zeros(1, np.float32),
        context_digest=claim.job.context_digest,
    )


class Tenants:
    """The good runs, each with one group under way at any time, and the bad one, which always has as many."""

    def __init__(self, fabric: Processes) -> None:
        self._fabric = fabric
        options = {"turns": 4, "pace_s": 0.25}
        self.good = [
            fabric.new_run(
                f"good-{number}", "neighbour", environment_options=options, reward="well", attempt_count_max=1
            )
            for number in range(GOOD_COUNT)
        ]
        self.bad = fabric.new_run("bad", "attacker", reward="bad", attempt_count_max=1)
        for run in self.good:
            run.submit([{}], group_size=GROUP_SIZE)
        attacks = ({"attack": name, "at": where} for name in ATTACKS for where in ("step", "reset"))
        self._harm = itertools.cycle([*attacks, *({"fault": name} for name in FAULTS)])
        self._bad_count = 0  # of its groups, how many are under way
        self.harm_count = 0
        self.attempts: set[int] = set()
        self.failures: list[Failure] = []

    def work(self, duration_s: float, *, is_attacked: bool) -> int:
        """Groups of the good ones that came within so long."""
        count, until_s = 0, time.monotonic() + duration_s
        while time.monotonic() < until_s:
            count += self._look(is_attacked=is_attacked)
        return count

    def end_attacks(self) -> None:
        """What the bad one has under way comes to its end."""
        self._fabric.until(lambda: self._look(is_attacked=False) >= 0 and self._bad_count == 0, 60.0, "it has ended")

    def _look(self, *, is_attacked: bool) -> int:
        count = 0
        for run in self.good:
            for group in run.groups(timeout=0.001):
                count += 1
                self.failures += group.failures
                self.attempts |= {rollout.attempt for rollout in group.rollouts}
                run.submit([{}], group_size=GROUP_SIZE)
        if is_attacked and self._bad_count == 0:
            self.bad.submit([next(self._harm)], group_size=GROUP_SIZE)
            self._bad_count += 1
            self.harm_count += 1
        self._bad_count -= len(list(self.bad.groups(timeout=0.001)))
        self._fabric.supervisor.watch()
        return count


def test_a_bad_neighbour_takes_nothing_from_nineteen_good_ones(fabric: Processes) -> None:
    # Given nineteen runs at work, and a twentieth that does whatever harm it can, again and again
    tenants = Tenants(fabric)
    is_over = threading.Event()
    runs = [*tenants.good, tenants.bad]
    policy = threading.Thread(target=lambda: asyncio.run(answer(fabric, runs, is_over)), daemon=True)
    policy.start()
    tenants.work(3 * QUIET_S, is_attacked=False)
    # When they work alone and beside it, by turns
    alone, beside = list[int](), list[int]()
    for _ in range(ROUND_COUNT):
        alone.append(tenants.work(MEASURED_S, is_attacked=False))
        tenants.work(QUIET_S, is_attacked=True)
        beside.append(tenants.work(MEASURED_S, is_attacked=True))
        tenants.end_attacks()
    is_over.set()
    policy.join(20)
    # Then they do nearly as much as alone, and no attempt of theirs has failed
    print(f"groups in {MEASURED_S:g} s: {alone} alone, {beside} beside {tenants.harm_count} attacks")
    assert (tenants.attempts, tenants.failures) == ({0}, [])
    doubt = 2 * math.sqrt((variance(alone) + variance(beside)) / ROUND_COUNT)  # of the difference, at 95 %
    assert mean(beside) + doubt >= KEPT_FRACTION * mean(alone)
    assert {child.start_count for child in fabric.supervisor.children.values()} == {1}
    assert len(fabric.dead_letters(tenants.bad)) >= 4
