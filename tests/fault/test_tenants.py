"""Twenty runs on one agent, of which one is as bad a neighbour as it can be: the others hardly notice."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rollfab.fabric.bus.fabric import RedisFabric
from rollfab.fabric.ports import TurnClaim, TurnSettle
from rollfab.fabric.records import Failure, Lease, RunConfig, Span, TurnResult
from rollfab.trainer.client import Run
from tests.fabric_processes import Processes, processes
from tests.integration.test_bad_neighbours import ATTACKS

GOOD_COUNT = 19
GROUP_SIZE = 2
MEASURED_S = 10.0
KEPT_FRACTION = 0.9
NOISE_FRACTION = 0.15  # two measurements of the same on a machine that others use, too
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
        fabric.wait_for_role("agent")
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
    """The good runs, each with one group under way at any time."""

    def __init__(self, fabric: Processes) -> None:
        self._fabric = fabric
        options = {"turns": 4, "pace_s": 0.25}
        self.runs = [
            fabric.new_run(f"good-{number}", "neighbour", environment_options=options, attempt_count_max=1)
            for number in range(GOOD_COUNT)
        ]
        for run in self.runs:
            run.submit([{}, {}], group_size=GROUP_SIZE)
        self.attempts: set[int] = set()
        self.failures: list[Failure] = []

    def work(self, duration_s: float, bad: Run | None) -> int:
        """Groups that came within so long; the bad one always has another attack under way."""
        attacks = itertools.cycle(ATTACKS)
        count, until_s = 0, time.monotonic() + duration_s
        while time.monotonic() < until_s:
            for run in self.runs:
                for group in run.groups(timeout=0.001):
                    count += 1
                    self.failures += group.failures
                    self.attempts |= {rollout.attempt for rollout in group.rollouts}
                    run.submit([{}], group_size=GROUP_SIZE)
            if bad is not None:
                for _ in bad.groups(timeout=0.001):
                    bad.submit([{"attack": next(attacks)}], group_size=GROUP_SIZE)
            self._fabric.supervisor.watch()
        return count


def test_a_bad_neighbour_takes_nothing_from_nineteen_good_ones(fabric: Processes) -> None:
    # Given nineteen runs at work, and what they do alone
    tenants = Tenants(fabric)
    bad = fabric.new_run("bad", "attacker", attempt_count_max=1)
    is_over = threading.Event()
    policy = threading.Thread(target=lambda: asyncio.run(answer(fabric, [*tenants.runs, bad], is_over)), daemon=True)
    policy.start()
    tenants.work(3 * QUIET_S, None)
    before = tenants.work(MEASURED_S, None)
    # When a twentieth does whatever harm it can, again and again
    bad.submit([{"attack": name} for name in ATTACKS], group_size=GROUP_SIZE)
    tenants.work(QUIET_S, bad)
    beside = tenants.work(MEASURED_S, bad)
    # Then they do nearly as much as before, and no attempt of theirs has failed
    after = tenants.work(MEASURED_S, None)
    is_over.set()
    policy.join(20)
    print(f"groups in {MEASURED_S:g} s: {before} alone, {beside} beside the bad one, {after} after it")
    assert (tenants.attempts, tenants.failures) == ({0}, [])
    assert beside >= (KEPT_FRACTION - NOISE_FRACTION) * min(before, after)
    assert fabric.supervisor.children["agent"].start_count == 1
    assert len(fabric.dead_letters(bad)) >= 4
