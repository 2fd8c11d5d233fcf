"""Why does my run stand? Each cause of the diagnosis, brought about on a real broker through the ports of the roles, is
told with its next step by the command line and by the api alike."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.ids import turn_id
from rollfab.fabric.contract.lease_plan import LeasePlan, RunDemand
from rollfab.fabric.contract.records import Lease, RunConfig, Sampling, TurnJob
from rollfab.fabric.contract.sharing import LendSetting
from rollfab.fabric.inspect.diagnosis import CODES, STALL_S
from rollfab.fabric.ports.queue import TrajectoryClaim, TurnPush
from rollfab.fabric.queue import keys
from rollfab.fabric.queue.scripts import Scripts
from tests.contracts.test_queue import group_of_size, letter_of
from tests.support.leases import set_lease
from tests.support.processes.api_server import ApiWorld, running_api
from tests.support.records import rollout_of

pytestmark = [pytest.mark.slow, pytest.mark.redis]

RUN = RunConfig(run_id="lake", model="tiny", environment="frozenlake", staleness=1)
GROUP = 4


HEAD_EPOCH = 1


class Stand:
    """A run, and what the roles of a fabric say and do about it. Everything is well, until a case changes it."""

    def __init__(self, api: ApiWorld, redis: Any) -> None:
        self.api = api
        self.redis = redis
        self.board = api.fabric.board
        self.run = RUN
        self.worker: dict[str, Any] = {"model": "tiny", "slot_count": 8, "run_id": "lake", "active_version": 0}
        self.agent: dict[str, Any] = {"slot_count": 64, "environments": ["frozenlake"]}

    async def begin(self, run: RunConfig = RUN, head: int = 0) -> None:
        """The run is made, and its weights are published."""
        self.run = run
        await self.board.create_run(run)
        if head >= 0:
            await Scripts(self.redis).call("set_head", [keys.ShardKeys(run.run_id, 0)], [head, "", HEAD_EPOCH])

    async def beat(self, *roles: str) -> None:
        """These say that they live: controller, agent, worker, serving, reward."""
        facts: dict[str, tuple[str, dict[str, Any]]] = {
            "controller": ("controller", {}),
            "agent": ("agent", self.agent),
            "worker": ("dedicated", self.worker),
            "serving": ("serving", {"model": "tiny", "slot_count": 8, "pool": "chat"}),
            "reward": ("reward", {"rewards": ["length"]}),
        }
        for role in roles:
            await self.say(role, *facts[role])

    async def say(self, role: str, kind: str, facts: dict[str, Any]) -> None:
        """A worker lives, and says so from now on."""
        await self.api.beat(f"{role}-1", kind, **facts)

    async def all_well(self) -> None:
        """Everybody is there, and the worker has a lease."""
        await self.beat("controller", "agent", "worker")
        await self.lease()

    async def lease(self, run_id: str | None = None) -> None:
        name = run_id or self.run.run_id
        await set_lease(
            self.board,
            Lease(worker_id="worker-1", run_id=name, lease_epoch=1, slot_count=8, lease_until_ms=None),
            None,
        )

    async def push(self, name: str = "g1", size: int = GROUP, run: RunConfig | None = None) -> None:
        assert await self.api.fabric.rollouts(run or self.run).push([group_of_size(name, size)]) == [True]

    async def claim(self, count: int = GROUP, run: RunConfig | None = None) -> list[TrajectoryClaim]:
        return await self.api.fabric.trajectories(run or self.run).claim("agent-1", count)

    async def settle(self, *, is_scored: bool = True) -> None:
        """All trajectories come to their end."""
        for claim in await self.claim():
            rollout = rollout_of(claim.job, 1.0 if is_scored else None, (0,), spans=())
            assert await self.api.fabric.trajectories(self.run).settle(claim, rollout, is_scored=is_scored)

    async def ask_for_turns(self) -> None:
        """All trajectories run, and wait for a turn each."""
        pushes = []
        for claim in await self.claim():
            name = turn_id(claim.job.trajectory_id, 0)
            job = TurnJob(
                turn_id=name, agent_id="agent-1", sampling=Sampling(), prompt_ids=np.arange(3, dtype=np.int32)
            )
            pushes.append(TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job))
        assert not any(await self.api.fabric.turns(self.run).push("agent-1", pushes))


async def moves(stand: Stand) -> None:
    await stand.begin()
    await stand.push()
    await stand.claim(2)
    await stand.all_well()


async def nothing_submitted(stand: Stand) -> None:
    await stand.begin()
    await stand.all_well()


async def all_consumed(stand: Stand) -> None:
    await complete(stand)
    stream = stand.api.fabric.rollouts(RUN)
    (delivery,) = await stream.receive("trainer", 1, 1.0)
    assert await stream.acknowledge(delivery)


async def all_cancelled(stand: Stand) -> None:
    await stand.begin()
    await stand.push()
    assert await stand.api.fabric.rollouts(RUN).cancel("g1")
    await stand.all_well()


async def complete(stand: Stand) -> None:
    """A complete group waits."""
    await stand.begin()
    await stand.push()
    await stand.settle()
    await stand.all_well()


async def for_trainer(stand: Stand) -> None:
    await stand.begin()
    await stand.api.fabric.rollouts(RUN).receive("trainer", 1, 0.01)
    await complete(stand)


async def takes_turns(stand: Stand) -> None:
    other = replace(RUN, run_id="other")
    await stand.begin(other)
    await stand.push("o1", run=other)
    await stand.claim(run=other)
    await stand.begin()
    await stand.push()
    await stand.beat("controller", "agent", "worker")
    await stand.lease("other")


async def clock(stand: Stand) -> None:
    await nothing_submitted(stand)
    del stand.api.living["worker-1"]
    ahead_ms = int(time.time() * 1000) + 3_600_000  # as they were before somebody set the broker's clock back
    await stand.redis.zadd(keys.HEARTBEATS, {"worker-1": ahead_ms})


async def attempts_fail(stand: Stand) -> None:
    await stand.begin()
    await stand.push()
    for claim in await stand.claim():
        queue = stand.api.fabric.trajectories(RUN)
        await queue.fail(claim.job.trajectory_id, claim.fence, letter_of(claim), is_final=True)
    await stand.push("g2")
    await stand.all_well()


async def broker_full(stand: Stand) -> None:
    await pushed(stand)
    await stand.all_well()
    await stand.redis.config_set("maxmemory", 1 << 20)


async def pushed(stand: Stand, run: RunConfig = RUN, head: int = 0) -> None:
    """Four trajectories are queued."""
    await stand.begin(run, head)
    await stand.push()


async def no_weights(stand: Stand) -> None:
    await pushed(stand, head=-1)
    await stand.beat("controller", "agent", "worker")


async def no_controller(stand: Stand) -> None:
    await pushed(stand)
    await stand.beat("agent", "worker")


async def no_worker(stand: Stand) -> None:
    await pushed(stand)
    await stand.beat("controller", "agent")


async def no_agent(stand: Stand) -> None:
    await pushed(stand)
    await stand.beat("controller", "worker")
    await stand.lease()


def worker_is(**facts: Any) -> Callable[[Stand], Awaitable[None]]:
    async def bring_about(stand: Stand) -> None:
        await pushed(stand)
        stand.worker |= facts
        await stand.beat("controller", "agent", "worker")

    return bring_about


def agent_is(**facts: Any) -> Callable[[Stand], Awaitable[None]]:
    async def bring_about(stand: Stand) -> None:
        await pushed(stand)
        stand.agent |= facts
        await stand.all_well()

    return bring_about


async def cannot_sample(stand: Stand) -> None:
    await pushed(stand, replace(RUN, sampling={"guided_json": "{}"}))
    stand.worker |= {"cannot": ["guided_json"], "engine": "transformers 5"}
    await stand.all_well()


def serving_is(mode: str, **facts: Any) -> Callable[[Stand], Awaitable[None]]:
    async def bring_about(stand: Stand) -> None:
        await pushed(stand)
        await stand.board.set_lend("pool:chat", LendSetting(mode=mode, said_by="ann", reason="launch day"))
        await stand.beat("controller", "agent")
        await stand.say("serving", "serving", {"model": "tiny", "slot_count": 8, "pool": "chat", **facts})

    return bring_about


def behind(**facts: Any) -> Callable[[Stand], Awaitable[None]]:
    """The head is seven versions beyond what the worker holds, and turns wait."""

    async def bring_about(stand: Stand) -> None:
        await pushed(stand)
        await stand.ask_for_turns()
        stand.worker |= facts
        await stand.all_well()
        await Scripts(stand.redis).call("set_head", [keys.ShardKeys("lake", 0)], [7, "", HEAD_EPOCH])

    return bring_about


async def agents_full(stand: Stand) -> None:
    other = replace(RUN, run_id="other")
    await stand.begin(other)
    await stand.push("o1", run=other)
    await stand.claim(run=other)
    await pushed(stand)
    stand.agent |= {"running_count": 64}
    await stand.all_well()


async def for_session(stand: Stand) -> None:
    await pushed(stand, replace(RUN, environment="gateway"))
    stand.agent |= {"environments": ["gateway"]}
    await stand.all_well()


async def for_request(stand: Stand) -> None:
    await stand.begin(replace(RUN, environment="inference"))
    await stand.all_well()


def scoring(*roles: str) -> Callable[[Stand], Awaitable[None]]:
    async def bring_about(stand: Stand) -> None:
        await pushed(stand, replace(RUN, reward="judge"))
        await stand.settle(is_scored=False)
        await stand.all_well()
        await stand.beat(*roles)

    return bring_about


async def run_full(stand: Stand) -> None:
    await stand.begin()
    await stand.api.fabric.rollouts(RUN).receive("trainer", 1, 0.01)
    await complete(stand)
    await stand.push("g2")
    await stand.redis.hset(keys.ShardKeys("lake", 0).run, "bytes", RUN.memory_bytes_max)


async def bad_rows(stand: Stand) -> None:
    await pushed(stand)
    await stand.all_well()
    await stand.redis.hset(keys.ShardKeys("lake", 0).counters, "tokens", "no count")


async def stalled(stand: Stand) -> None:
    await pushed(stand)
    await stand.claim()
    await stand.all_well()
    now_ms = (await stand.board.survey()).now_ms
    await plan(stand, moved_at_ms=int(now_ms - 1000 * STALL_S - 2000))


async def too_stale(stand: Stand) -> None:
    await pushed(stand)
    await stand.claim()
    await stand.all_well()
    await plan(stand, stale_count=8)


async def plan(stand: Stand, **seen: int) -> None:
    """Write down a controller's plan that says what it saw of the run."""
    term = await stand.board.lead("controller-1", 60_000)
    demand = RunDemand(run_id="lake", open_count=4, dedicated_count=8, borrowed_count=0, **seen)
    plan = LeasePlan(controller_id="controller-1", term=term, made_at_ms=int(time.time() * 1000), runs=(demand,))
    assert await stand.board.set_plan(plan)


CASES: dict[str, Callable[[Stand], Awaitable[None]]] = {
    "moves": moves,
    "nothing_submitted": nothing_submitted,
    "all_consumed": all_consumed,
    "all_cancelled": all_cancelled,
    "for_trainer": for_trainer,
    "takes_turns": takes_turns,
    "consumer_gone": complete,
    "clock": clock,
    "attempts_fail": attempts_fail,
    "too_stale": too_stale,
    "broker_full": broker_full,
    "no_weights": no_weights,
    "nothing_started": pushed,
    "no_controller": no_controller,
    "no_worker": no_worker,
    "other_model": worker_is(model="/models/big"),
    "cannot_sample": cannot_sample,
    "worker_failed": worker_is(state="failed", error="out of memory", run_id=None),
    "worker_loading": worker_is(state="loading", slot_count=0, waits_for="its engine"),
    "lend_off": serving_is("off"),
    "guard_shut": serving_is("on", guard_state="shut", guard_reason="a burst"),
    "no_lease": serving_is("on"),
    "staleness": behind(error="chunk 3 of version 7 has another digest"),
    "catching_up": behind(),
    "no_agent": no_agent,
    "other_environment": agent_is(environments=["a", "b"]),
    "agent_failed": agent_is(error="run 'lake' is not served: no tokenizer"),
    "agents_full": agents_full,
    "for_session": for_session,
    "for_request": for_request,
    "no_reward_worker": scoring(),
    "other_reward": scoring("reward"),
    "run_full": run_full,
    "bad_rows": bad_rows,
    "stalled": stalled,
}


@pytest.fixture
async def stand(url: str) -> AsyncIterator[Stand]:
    redis: Any = await open_broker(url, client_name="tests")
    await redis.config_set("maxmemory", 0)
    async with running_api(url, cache_s=0.0) as api:
        yield Stand(api, redis)
    await redis.config_set("maxmemory", 0)
    await redis.aclose()


def test_every_cause_is_brought_about() -> None:
    assert list(CASES) == list(CODES)


@pytest.mark.parametrize("code", CODES)
async def test_the_command_line_and_the_api_say_why_a_run_stands_and_what_to_do(
    stand: Stand, url: str, code: str
) -> None:
    await CASES[code](stand)
    wide = CliRunner(env={"COLUMNS": "2000"})
    told = await asyncio.to_thread(wide.invoke, app, ["status", "--run", "lake", "--url", url])
    causes = (await stand.api.json("/v1/runs/lake"))["causes"]
    cause = next((each for each in causes if each["code"] == code), None)
    assert cause is not None, causes
    assert told.exit_code == int(any(each["kind"] in ("stuck", "passing") for each in causes))
    for words in (cause["text"], cause["step"]):
        assert counted(words) in counted(told.stdout)
    assert cause["step"] or code == "moves"


def counted(text: str) -> str:
    """The text with every number as #, and with single blanks: ages and sizes go on between two looks.

    The command line calls itself as it was called.
    """
    return " ".join(re.sub(r"[\d.]+", "#", re.sub(r"`[\w./-]+/rollfab ", "`rollfab ", text)).split())
