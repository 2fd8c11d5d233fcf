"""Requests on carriers over a real broker, with turns made by hand: who shares one, what becomes of lost ones, pins."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from redis import Redis

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import BrokerError, InputError, VersionUnmet
from rollfab.fabric.contract.ids import group_of, trajectory_of
from rollfab.fabric.contract.records import Lease, RunConfig, Span, TurnResult
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.inference import INFERENCE, Completions, Pin, Prompt
from rollfab.fabric.ports.queue import TurnClaim, TurnProgress, TurnSettle
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.agent import inference as module
from rollfab.workers.agent.inference import FleetInference, Model, no_reward
from rollfab.workers.agent.keeper import Elsewhere
from tests.support.brokers.redis_server import redis_server
from tests.support.leases import set_lease
from tests.support.until import until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

RUN = RunConfig(run_id="r1", model="tiny", environment=INFERENCE, staleness=0, turn_count_max=2)
LEASE = Lease(worker_id="w", run_id="r1", lease_epoch=1, slot_count=100, lease_until_ms=None)
PROMPT = np.array([5, 6], np.int32)


class Hand:
    """A rollout worker that makes turns when the test says so."""

    def __init__(self, ports: RedisFabric) -> None:
        self.turns = ports.turns(RUN)
        self.claims: list[TurnClaim] = []
        self.version = -1

    async def take(self, count: int) -> list[TurnClaim]:
        """Claim turns until there are so many."""

        async def have() -> bool:
            found = await self.turns.exchange("w", want=8, lease_epoch=LEASE.lease_epoch, active_version=self.version)
            self.claims += found.claims
            return len(self.claims) >= count

        await until(have)
        taken, self.claims = self.claims[:count], self.claims[count:]
        return taken

    async def settle_all(self, *, version: int) -> None:
        """Hand in whatever is asked for, also what is asked for again: claims end where a machine stands still."""
        while True:
            for claim in await self.take(1):
                await self.settle(claim, version=version)

    async def settle(self, claim: TurnClaim, *, version: int | None = None) -> None:
        """Hand in a turn of two tokens."""
        made = version if version is not None else self.version
        result = TurnResult(
            turn_id=claim.job.turn_id,
            finish_reason="stop",
            spans=(Span(0, 2, "w", made),),
            completion_ids=np.array([8, 2], np.int32),
            logprobs=np.array([-1, -2], np.float32),
        )
        await self.turns.exchange("w", settles=[TurnSettle(claim=claim, result=result)])


@pytest.fixture(autouse=True)
def _empty(redis: Redis) -> None:
    """Begin each test with an empty broker."""


@asynccontextmanager
async def serving(url: str, broker_wait_s: float = math.inf) -> AsyncIterator[tuple[FleetInference, RedisFabric, Hand]]:
    async with await RedisFabric.open(url, client_name="test") as ports:
        await ports.board.create_run(RUN)
        assert await set_lease(ports.board, LEASE, None)

        async def publish(path: str, version: int | None, allow_nonfinite: bool) -> int:
            raise AssertionError("no test here publishes by a path")

        model = Model(tokenizer=CharTokenizer(), ends=(2,))
        inference = FleetInference(
            ports, RUN, model, SystemClock(), worker_id="gateway", publish=publish, broker_wait_s=broker_wait_s
        )
        stop = asyncio.Event()
        elsewhere = Elsewhere(
            open_fabric=partial(RedisFabric.open, url, client_name="keeper"), make_ask_reward=lambda: no_reward
        )
        task = asyncio.create_task(inference.serve(stop, elsewhere))
        yield inference, ports, Hand(ports)
        stop.set()
        await task


def ask(inference: FleetInference, **said: object) -> asyncio.Task[Completions]:
    return asyncio.create_task(inference.generate(Prompt(token_ids=PROMPT, **said)))  # type: ignore[arg-type]


async def test_a_token_that_the_tokenizer_lacks_is_seen_in_the_text(url: str) -> None:
    async with serving(url) as (inference, _, _):
        a, b = CharTokenizer().encode("ab")
        size = inference.vocabulary_size
        assert inference.text_of([a, size, size + 40, b, size]) == "a\ufffd\ufffdb\ufffd"
        assert (inference.text_of([a, b]), inference.text_of([])) == ("ab", "")


async def test_a_session_keeps_its_carrier_and_the_others_take_theirs_by_turns(url: str) -> None:
    async with serving(url) as (inference, ports, hand):
        # When two sessions and two requests without one ask, and one session beside itself
        asking = [ask(inference, session=name) for name in ("a", "b", "", "", "a")]
        claims = await hand.take(5)
        carriers = [trajectory_of(claim.job.turn_id) for claim in claims]
        assert len(set(carriers)) == 5, "each has one turn under way at most"
        assert (await ports.board.run_status("r1")).trajectories["running"] == 5
        for claim in claims:
            assert claim.job.sampling.stop_ids == (2,)
            await hand.settle(claim)
        answers = await asyncio.gather(*asking)
        assert [each.made[0].token_ids for each in answers] == [[8, 2]] * 5

        # Then what they ask for next is on the same ones, which are used up then
        asking = [ask(inference, session=name) for name in ("a", "b", "", "", "")]
        again = await hand.take(5)
        assert {trajectory_of(claim.job.turn_id) for claim in again} == set(carriers)
        for claim in again:
            await hand.settle(claim)
        await asyncio.gather(*asking)

        async def is_swept() -> bool:
            return (await ports.board.run_status("r1")).counters.get("groups_cancelled", 0) == 5

        await until(is_swept)
        last = ask(inference, session="a")
        (claim,) = await hand.take(1)
        assert trajectory_of(claim.job.turn_id) not in carriers
        await hand.settle(claim)
        await last
    # And at the end of the process nothing is left of any
    async with await RedisFabric.open(url, client_name="test") as ports:
        status = await ports.board.run_status("r1")
        assert (status.depth, sum(status.trajectories.values()), sum(status.turns.values())) == (0, 0, 0)
        assert status.groups_waiting == 0


async def test_while_the_broker_is_away_requests_wait_and_it_is_said_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AWAY_S", 0.5)
    monkeypatch.setattr(module, "FOLLOW_S", 0.05)
    with redis_server(tmp_path) as server:
        async with serving(server.url) as (inference, _, hand):
            # Given a request under way, and a broker that stands still
            asking = ask(inference)
            (claim,) = await hand.take(1)
            os.kill(server.pid, signal.SIGSTOP)

            async def is_said() -> bool:
                return (await inference.why_waiting()).startswith("the broker has not answered this gateway for ")

            await until(is_said)
            # When it runs again, the request goes on, and is waited for as any
            os.kill(server.pid, signal.SIGCONT)
            await hand.settle(claim)
            assert (await asking).made[0].token_ids == [8, 2]

            async def is_over() -> bool:
                return not await is_said()

            await until(is_over)


async def test_who_waits_while_the_broker_is_away_is_told_and_its_turn_is_given_up_then(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with serving(server.url, broker_wait_s=2.0) as (inference, _, hand):
            # Given a request under way, one of a client that comes back for it, and a broker that stands still
            asking, kept = ask(inference), asyncio.create_task(_kept(inference))
            claims = await hand.take(2)
            os.kill(server.pid, signal.SIGSTOP)
            # When its client, one that begins now, and who pauses have waited, then all of them are told
            late, pausing = ask(inference), asyncio.create_task(inference.pause("abort"))
            told = await asyncio.gather(asking, late, pausing, return_exceptions=True)
            assert [str(each) for each in told] == ["the broker has not answered for 2 s: ask again"] * 3
            assert all(isinstance(each, BrokerError) for each in told) and not kept.done()
            # And when it is back, nobody makes what was given up, and who asks again has it made
            os.kill(server.pid, signal.SIGCONT)
            assert (await kept).made[0].finish == "abort"

            async def are_lost() -> bool:
                found = await hand.turns.exchange("w", progress=[TurnProgress(claim=each) for each in claims])
                return set(found.lost) == {each.job.turn_id for each in claims}

            await until(are_lost)
            await inference.resume()
            again = ask(inference)
            (claim,) = await hand.take(1)
            await hand.settle(claim)
            assert (await again).made[0].token_ids == [8, 2]


async def _kept(inference: FleetInference) -> Completions:
    return await inference.generate(Prompt(token_ids=PROMPT), outlasts_broker=True)


async def test_a_request_goes_on_elsewhere_when_its_carrier_is_lost(url: str) -> None:
    async with serving(url) as (inference, ports, hand):
        asking = ask(inference)
        (first,) = await hand.take(1)
        # When somebody takes its carrier away
        await ports.rollouts(RUN).cancel(group_of(trajectory_of(first.job.turn_id)))
        # Then it is asked for anew on another, and answered
        (second,) = await hand.take(1)
        assert trajectory_of(second.job.turn_id) != trajectory_of(first.job.turn_id)
        await hand.settle(second)
        assert (await asking).made[0].token_ids == [8, 2]


async def test_a_request_that_is_given_up_is_nobody_s_turn_any_more(url: str) -> None:
    async with serving(url) as (inference, _, hand):
        asking, named = ask(inference), ask(inference, request_id="x")
        claims = await hand.take(2)
        asking.cancel()
        inference.abort(["x"])
        assert (await named).made[0].finish == "abort"

        async def are_lost() -> bool:
            found = await hand.turns.exchange("w", progress=[TurnProgress(claim=each) for each in claims])
            return set(found.lost) == {each.job.turn_id for each in claims}

        await until(are_lost)


async def test_what_was_made_by_a_wrong_version_is_not_given_out(url: str) -> None:
    async with serving(url) as (inference, ports, hand):
        with pytest.raises(VersionUnmet, match="not published yet"):
            await inference.generate(Prompt(token_ids=PROMPT, pin=Pin(min_version=0)))
        publisher = Publisher(ports.weights, "r1")
        for version in range(2):
            await publisher.publish({"w": np.full(9, version, np.float32)}, version)
        hand.version = 1
        with pytest.raises(VersionUnmet, match="version 0 is over"):
            await inference.generate(Prompt(token_ids=PROMPT, pin=Pin(exact_version=0)))

        # Given requests whose pin the head meets, one of which a worker makes with other weights nevertheless
        asking = [ask(inference, pin=pin) for pin in (Pin(exact_version=1), Pin(min_version=1), Pin())]
        settling = asyncio.create_task(hand.settle_all(version=0))
        answers = await asyncio.gather(*asking, return_exceptions=True)
        settling.cancel()
        # Then only who takes any has it
        assert [type(each) for each in answers] == [VersionUnmet, VersionUnmet, Completions]
        last = answers[2]
        assert isinstance(last, Completions)
        assert (last.start_version, last.end_version) == (0, 0)


async def test_a_pause_that_waits_ends_with_what_is_under_way(url: str) -> None:
    async with serving(url) as (inference, _, hand):
        asking = ask(inference)
        (claim,) = await hand.take(1)
        pausing = asyncio.create_task(inference.pause("wait"))
        await asyncio.sleep(0)
        held = ask(inference)
        await hand.settle(claim)
        await asyncio.gather(asking, pausing)
        assert not held.done()
        await inference.resume()
        (claim,) = await hand.take(1)
        await hand.settle(claim)
        await held


async def test_impossible_requests_are_refused_before_anything_is_asked_for(url: str) -> None:
    async with serving(url) as (inference, ports, _):
        for wrong in (
            Prompt(token_ids=PROMPT, count=0),
            Prompt(token_ids=PROMPT[:0]),
            Prompt(token_ids=PROMPT, sampling={"temperature": -1}),
        ):
            with pytest.raises(InputError):
                await inference.generate(wrong)
        assert (await ports.board.run_status("r1")).counters.get("groups_submitted", 0) == 0
