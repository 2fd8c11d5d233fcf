"""`rollfab trace` and `rollfab history`, as a person meets them, on a real broker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.lease_plan import Sample, ServingSample
from rollfab.fabric.contract.records import RunConfig, Span
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TrajectoryClaim
from tests.contracts.test_queue import group_of_size
from tests.integration.cli.test_cli import rollfab
from tests.support.records import rollout_of

RUN = RunConfig(run_id="lake", model="tiny", environment="frozenlake")
WORKER = "w" * 63


@pytest.fixture(scope="module")
def broker_url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        yield broker.url


@pytest.fixture
async def fabric(broker_url: str) -> AsyncIterator[RedisFabric]:
    async with await RedisFabric.open(broker_url, client_name="tests") as found:
        await found.board._client.flushall()
        await found.board.create_run(RUN)
        yield found


async def play(fabric: RedisFabric, claim: TrajectoryClaim, said: str, reward: float) -> None:
    """One turn that says so, and a reward."""
    made = CharTokenizer().encode(said)
    rollout = replace(
        rollout_of(claim.job, reward),
        completion_ids=made,
        completion_mask=np.ones(len(made), np.uint8),
        logprobs=np.full(len(made), -0.5, np.float32),
        spans=(Span(0, len(made), WORKER, 7),),
        turn_ms=[3, 40, 41],
    )
    assert await fabric.trajectories(RUN).settle(claim, rollout, is_scored=True)


async def test_what_holds_up_a_step_is_listed_and_one_that_ended_is_told_in_full(
    fabric: RedisFabric, broker_url: str
) -> None:
    assert "no trajectory is under way" in rollfab("trace", url=broker_url).stderr
    # Given a group of two, of which one is under way and one has ended
    await fabric.rollouts(RUN).push([group_of_size("g1", 2)])
    first, second = await fabric.trajectories(RUN).claim("agent-1", 2)
    await play(fabric, second, "all the way left\nand \x1b[31mright", 0.5)
    # Then the one under way is listed, with where it is
    said = rollfab("trace", "--run", "lake", url=broker_url)
    assert "lake  1 trajectory under way" in said.stdout
    assert "g1.0" in said.stdout and "the environment's reset, on agent agent-1" in said.stdout
    assert "g1.1" not in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80
    # And the other is told in full, in lines that fit
    said = rollfab("trace", "g1.1", url=broker_url)
    assert said.returncode == 0
    assert "all the way left" in said.stdout
    assert "reward 0.5" in said.stdout
    assert f"by {WORKER} at version 7" in " ".join(said.stdout.split())
    assert "37 ms" in said.stdout
    assert "\x1b[31m" not in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80
    found = json.loads(rollfab("trace", "g1.1", "--json", url=broker_url).stdout)
    assert (found["state"], found["reward"], found["pieces"][1]["kind"]) == ("completed", 0.5, "turn")
    # When all is consumed, it is among the finished
    await play(fabric, first, "up", 0.0)
    assert "1 group for the trainer" in rollfab("trace", "--state", "waiting", url=broker_url).stdout
    (delivery,) = await fabric.rollouts(RUN).receive("t", 1, 1.0)
    await fabric.rollouts(RUN).acknowledge(delivery)
    said = rollfab("trace", "--state", "finished", url=broker_url)
    assert "1 group kept" in said.stdout and "terminated" in said.stdout


async def test_what_is_asked_for_wrongly_says_what_to_do(fabric: RedisFabric, broker_url: str) -> None:
    said = rollfab("trace", "g9.0", url=broker_url)
    assert said.returncode == 1
    assert "no trajectory 'g9.0' now" in said.stderr and "rollfab trace --state finished" in said.stderr
    said = rollfab("trace", "--run", "lakes", url=broker_url)
    assert "run 'lakes' does not exist" in said.stderr and "lake" in said.stderr
    said = rollfab("trace", "--state", "done", url=broker_url)
    assert said.returncode == 2 and "waiting" in said.stderr and "finished" in said.stderr
    for word in ("12", "h", "-1h", "1e9d"):
        said = rollfab("history", f"--since={word}", url=broker_url)
        assert said.returncode == 2 and "30m, 12h or 3d" in said.stderr, word


async def test_history_says_what_happened_and_whether_lending_hurt(fabric: RedisFabric, broker_url: str) -> None:
    assert "a sample a minute" in rollfab("history", url=broker_url).stderr
    # Given samples of three minutes, in which a worker lent and was late
    term = await fabric.board.lead("c1", 2_000)
    now_ms = await fabric.board.wall_ms()
    for minute in range(3):
        row = ServingSample(
            worker_id="serving-1",
            guard_state="open",
            slot_count=4,
            token_count=600 * minute,
            request_count=100 * minute,
            violation_count=20 * minute,
            request_count_alone=100 * minute,
            violation_count_alone=minute,
            ttft_ms_p99=250.0,
            tpot_ms_p99=9.0,
            ttft_ms_p99_alone=80.0,
            tpot_ms_p99_alone=8.0,
            ttft_slo_ms=200.0,
            tpot_slo_ms=20.0,
        )
        sample = Sample(
            time_ms=now_ms - (2 - minute) * 60_000,
            token_count=6_000 * minute,
            rollout_count=60 * minute,
            groups_waiting=0,
            dead_count=0,
            worker_count=2,
            running_count=3,
            slot_count=8,
            serving=(row,),
        )
        assert await fabric.board.add_sample(term, sample)
    said = rollfab("history", "--since", "1h", url=broker_url)
    assert "tokens/s" in said.stdout and "100 now" in said.stdout
    assert "serving-1  yes: 40 of 200 requests beside rollouts" in " ".join(said.stdout.split("\n"))
    assert max(map(len, said.stdout.splitlines())) <= 80
    found = json.loads(rollfab("history", "--json", url=broker_url).stdout)
    assert [point["tokens_per_s"] for point in found["points"]] == [100.0, 100.0]
    assert found["lending"][0]["answer"] == "yes"
