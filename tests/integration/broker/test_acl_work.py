"""The broker's ACL file: every role does all its work with its own user, call by call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import httpx
import numpy as np
import pytest
from redis.asyncio import Redis

from rollfab.api.access.config import ApiConfig
from rollfab.api.app import make_app
from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.agreement import Agreement
from rollfab.fabric.contract.images import ImagePlace, digest_of
from rollfab.fabric.contract.lease_plan import EPOCHS_PER_TERM, LeasePlan
from rollfab.fabric.contract.records import (
    DeadLetter,
    Lease,
    Rollout,
    RunConfig,
    Span,
    TokenLog,
    TurnJob,
    TurnResult,
    WorkerInfo,
)
from rollfab.fabric.contract.sharing import SharingReport
from rollfab.fabric.format.manifest import Damage, Holder
from rollfab.fabric.inspect.diagnosing import diagnose_run
from rollfab.fabric.inspect.history import sample_of
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import Exchange, GroupPush, TrajectoryClaim, TurnProgress, TurnPush, TurnSettle
from rollfab.fabric.queue.acl import RIGHTS
from rollfab.fabric.queue.board import RedisLeaseBoard
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.fabric.queue.reading import RedisTrajectoryReader
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.fabric.queue.scripts import Scripts
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.queue.turns import RedisTurnQueue
from rollfab.fabric.rules.queue.retries import given_up
from rollfab.fabric.rules.queue.timings import Timings
from rollfab.fabric.versions.reader import fetch_weights
from rollfab.fabric.versions.store import RedisWeightStore
from rollfab.trainer.agreement import token_differences
from rollfab.trainer.checks import make_groups
from rollfab.trainer.publish.publisher import Publisher
from tests.fuzz.targets import RECORDS
from tests.support.brokers.guarded_broker import Guarded
from tests.support.leases import end_lease, set_lease

pytestmark = pytest.mark.redis


# ---- every script, by every role that the table gives it to

RUN = RunConfig(run_id="r1", model="tiny", environment="e", attempt_count_max=2, staleness=0, trajectory_count_max=99)
ROLLOUT = next(each for each in RECORDS if isinstance(each, Rollout))
AGREEMENT = next(each for each in RECORDS if isinstance(each, Agreement))
TURN = next(each for each in RECORDS if isinstance(each, TurnJob))
RESULT = next(each for each in RECORDS if isinstance(each, TurnResult))


class Part:
    """One role's ports, with claims that end at once where a test lets them."""

    def __init__(self, client: Redis, role: str) -> None:
        self.name = f"{role}-1"
        self.client = client
        self.board = RedisLeaseBoard(client)
        self.weights = RedisWeightStore(client)
        self.rollouts = RedisRolloutStream(client, RUN)
        self.trajectories = RedisTrajectoryQueue(client, RUN)
        self.turns = RedisTurnQueue(client, RUN)
        self.reading = RedisTrajectoryReader(client, RUN)

    async def beat(self, role: str) -> Lease | None:
        """Say that it lives; returns its lease."""
        return await self.board.heartbeat(self.info(role))

    async def measure(self, role: str) -> None:
        """Report how long something took."""
        timings = Timings(self.name)
        timings.of("r1").note("turn", 1.0, "g.0")
        await self.board.add_timings(self.info(role), timings)

    def info(self, role: str) -> WorkerInfo:
        return WorkerInfo(worker_id=self.name, role=role, pid=1, host="box")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(role, script) for every script that is called while the test runs."""
    found: set[tuple[str, str]] = set()
    init, commands = Scripts.__init__, Scripts._commands

    def remember(self: Any, client: Redis) -> None:
        init(self, client)
        self.role = client.connection_pool.connection_kwargs["username"].removeprefix("rollfab-")

    def note(self: Any, calls: Any) -> Any:
        found.update((self.role, name) for name, _, _ in calls)
        return commands(self, calls)

    monkeypatch.setattr(Scripts, "__init__", remember)
    monkeypatch.setattr(Scripts, "_commands", note)
    return found


@asynccontextmanager
async def parts(broker: Guarded) -> AsyncIterator[dict[str, Part]]:
    """Everyone, each with the rights of its role."""
    async with AsyncExitStack() as stack:
        found = {}
        for role in RIGHTS:
            client = await open_broker(broker.url(role), client_name=role)
            stack.push_async_callback(client.aclose)
            found[role] = Part(client, role)
        yield found


def group(name: str, size: int = 1, **wishes: Any) -> GroupPush:
    (push,) = make_groups([{"seed": 1}], size, [name], **wishes)
    return push


def rollout_of(claim: TrajectoryClaim, version: int = 0, reward: float | None = 1.0) -> Rollout:
    span = Span(0, 5, "worker-1", version)
    names = {"trajectory_id": claim.job.trajectory_id, "group_id": claim.job.group_id}
    return replace(ROLLOUT, **names, spans=(span,), reward=reward)


def letter_of(claim: TrajectoryClaim) -> DeadLetter:
    names = {"trajectory_id": claim.job.trajectory_id, "run_id": "r1", "worker_id": "x"}
    return DeadLetter(**names, reason="it broke", traceback="", attempt=0, job=asdict(claim.job))


@pytest.mark.timeout(60)
async def test_every_script_may_be_called_by_the_roles_that_have_it(
    broker: Guarded, called: set[tuple[str, str]]
) -> None:
    async with parts(broker) as who:
        await who["trainer"].board.create_run(RUN)
        assert await who["trainer"].board.change_run(RUN, RUN)
        await who["trainer"].rollouts.pin(0)
        await publish(who["trainer"])
        await lend(who)
        await play_turns(who)
        await play_trajectories(who)
        await lose_workers(who)
        await grow_stale(who)
        await look(who)
        await leave(who)

    assert broker.denials() == []
    assert replace(RIGHTS["gateway"], purpose="") == replace(RIGHTS["agent"], purpose=""), "else play its part here too"
    both = {*RIGHTS["agent"].scripts.split(), *RIGHTS["trainer"].scripts.split()}
    assert both.issuperset(RIGHTS["inference"].scripts.split()), "else play its part here too"
    played = {role: rights for role, rights in RIGHTS.items() if role not in ("gateway", "inference")}
    wanted = {(role, script) for role, rights in played.items() for script in rights.scripts.split()}
    assert not called - wanted, f"RIGHTS lack what was called: {sorted(called - wanted)}"
    assert not wanted - called, f"call these here, or take them off RIGHTS: {sorted(wanted - called)}"


async def publish(trainer: Part) -> None:
    for version in range(2):
        await Publisher(trainer.weights, "r1").publish({"w": np.full(9, version, np.float32)}, version)
    (manifest,) = await trainer.weights.manifests("r1", (await trainer.weights.held("r1"))[:1])
    assert manifest is not None
    epoch = (await trainer.weights.head("r1")).epoch
    await trainer.weights.drop("r1", [replace(manifest.link, version=99)], epoch)


async def lend(who: dict[str, Part]) -> None:
    controller, worker = who["controller"], who["worker"]
    await controller.beat("controller")
    await worker.beat("dedicated")
    term = await controller.board.lead(controller.name, 60_000)
    epoch = term * EPOCHS_PER_TERM
    lease = Lease(worker_id=worker.name, run_id="r1", lease_epoch=epoch, slot_count=9, lease_until_ms=None)
    assert await set_lease(controller.board, lease, None)
    await worker.board.wait_lease(worker.name, 1.0)
    await worker.beat("dedicated")
    for role in ("agent", "reward", "controller"):
        other = replace(lease, worker_id=who[role].name)
        await set_lease(controller.board, other, 60_000)
        await who[role].beat(role)
        await end_lease(controller.board, other)
    await controller.board.open_term(term)
    await controller.board.set_read_costs(term, {"r1": {"this": 1, "that": -1}})
    await controller.board.set_read_costs(term, {"r1": {}})
    assert (await controller.board.survey()).leases["r1"][worker.name].lease_epoch == epoch
    assert await controller.board.set_plan(LeasePlan(controller_id=controller.name, term=term, made_at_ms=0))
    for role in ("controller", "api-read", "api-control", "api-trajectories", "operator"):
        assert await who[role].board.plan() is not None
    sample = sample_of(await controller.board.survey(), {}, await controller.board.sharing())
    assert await controller.board.add_sample(term, sample)
    assert not await controller.board.add_sample(term - 1, sample)
    for role in ("api-read", "api-control", "api-trajectories", "operator"):
        assert await who[role].board.samples(0, 1 << 50) == [sample]
    assert await controller.board.forget_workers(term, ["nobody"])
    await controller.board.add_event("lease.granted", {})
    assert await worker.board.lends_of(worker.name, "chat")
    await worker.board.set_sharing(SharingReport(worker_id=worker.name))
    assert (await fetch_weights(worker.weights, "r1"))["w"].tolist() == [1.0] * 9
    assert (await worker.weights.wait_head("r1", 0, 1.0)).version == 1
    await carry_otherwise(who["trainer"], worker)
    await heal(who)


async def carry_otherwise(trainer: Part, worker: Part) -> None:
    """The board beside the weights, and what else than whole chunks is asked of the broker."""
    await worker.weights.hold("r1", Holder(worker.name, 1, "relay://s@h:1"), 60.0)
    await trainer.weights.offer("r1", b"now", 60.0)
    assert await worker.weights.offers("r1") == b"now"
    await worker.weights.answer("r1", "round", worker.name, b"yes", 60.0)
    for part in (trainer, worker):
        assert await part.weights.answers("r1", "round") == {worker.name: b"yes"}
        assert await part.weights.holders("r1") == [Holder(worker.name, 1, "relay://s@h:1")]
        (manifest,) = await part.weights.manifests("r1", (await part.weights.held("r1"))[:1])
        assert manifest is not None
        assert await part.weights.chunk_ranges(manifest, [(0, 0, 4)]) != [None]
        assert await part.weights.room_bytes() is None


async def heal(who: dict[str, Part]) -> None:
    """Who reads says what is damaged, who publishes or repairs sees to it."""
    trainer, operator = who["trainer"].weights, who["operator"].weights
    for part in (who["worker"], who["trainer"], who["operator"]):
        await part.weights.report_damage("r1", Damage(0, "keyframe", 1, (0,), "corrupt", part.name))
    head = await trainer.head("r1")
    name = next(name for name in await trainer.held("r1") if name[0] == head.version)
    (manifest,) = await trainer.manifests("r1", [name])
    assert manifest is not None
    (chunk,) = await trainer.chunks(manifest, [0])
    assert chunk is not None
    for store in (trainer, operator):
        (report,) = await store.damages("r1")
        await store.mend(manifest, {0: chunk}, head.epoch)
        await store.put_chunks(manifest, 0, [chunk])
        await store.put_manifest(manifest)
        await store.drop("r1", [], head.epoch)
        await store.clear_damages("r1", [report])
        await store.report_damage("r1", report)
    await operator.drop("r1", [replace(manifest.link, version=99, kind="delta")], head.epoch)
    await trainer.tend("r1", head.epoch, 5.0)
    assert await operator.tended("r1") == head.epoch


async def exchange(worker: Part, **options: Any) -> Exchange:
    lease = await worker.beat("dedicated")
    assert lease is not None
    return await worker.turns.exchange(worker.name, lease_epoch=lease.lease_epoch, active_version=1, **options)


async def claims(agent: Part, count: int) -> list[TrajectoryClaim]:
    """So many trajectories; a call may find fewer, for what was cancelled stands on the stream until it is read."""
    found: list[TrajectoryClaim] = []
    while len(found) < count:
        found += await agent.trajectories.claim(agent.name, count - len(found))
    return found


async def play_turns(who: dict[str, Part]) -> None:
    """A turn that is given back, taken again, saved and settled."""
    trainer, agent, worker = who["trainer"], who["agent"], who["worker"]
    await trainer.rollouts.push([group("a", 2)])
    assert await trainer.rollouts.known(["a", "z"]) == [True, False]
    claim, other = await claims(agent, 2)
    shown = (ImagePlace(0, 1, digest_of(b"a file")),)
    job = replace(TURN, turn_id=f"{claim.job.trajectory_id}.0", agent_id=agent.name, images=shown)
    files = {shown[0].digest: b"a file"}
    push = TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job, images=files, home=worker.name)
    assert not any(await agent.turns.push(agent.name, [push]))
    await worker.turns.wait(worker.name, 1.0)
    (taken,) = (await exchange(worker, want=5)).claims
    assert [image.data for image in taken.images] == [b"a file"]
    await worker.turns.release(worker.name, [TurnProgress(claim=taken, log=None)])
    (taken,) = (await exchange(worker, want=5)).claims
    log = TokenLog(spans=RESULT.spans, completion_ids=RESULT.completion_ids, logprobs=RESULT.logprobs)
    assert (await exchange(worker, progress=[TurnProgress(claim=taken, log=log)])).lost == []
    result = replace(RESULT, turn_id=job.turn_id)
    assert (await exchange(worker, settles=[TurnSettle(claim=taken, result=result)])).refused == []
    (got,) = await agent.turns.results(agent.name, 1.0)
    assert got.turn_id == job.turn_id
    await agent.turns.results(agent.name, 0.01)
    await agent.turns.cancel(agent.name, [push])
    assert await agent.trajectories.renew(agent.name, [claim]) == []
    assert await agent.trajectories.save(agent.name, claim, b"{}")
    assert await agent.trajectories.settle(claim, rollout_of(claim, 1), is_scored=True)
    await agent.trajectories.release(agent.name, [other])
    await trainer.rollouts.cancel("a")


async def play_trajectories(who: dict[str, Part]) -> None:
    """Scored, failed, given up, too late."""
    trainer, agent, reward = who["trainer"], who["agent"], who["reward"]
    await trainer.rollouts.push([group("b", 3)])
    scored, failed, broken = await claims(agent, 3)
    assert await agent.trajectories.settle(scored, rollout_of(scored, 1, None), is_scored=False)
    name = scored.job.trajectory_id
    assert await reward.trajectories.keep_scoring([(name, scored.fence)], 30.0) == []
    lost = replace(letter_of(scored), worker_id="w")
    assert await reward.trajectories.begin_score(name, scored.fence, "w", 30.0) is not None
    assert await reward.trajectories.lose_score(name, scored.fence, lost) == "retry"
    assert await reward.trajectories.score(name, scored.fence, 0.5)
    assert await agent.trajectories.fail(failed.job.trajectory_id, failed.fence, letter_of(failed)) == "retry"
    assert await agent.trajectories.settle(broken, rollout_of(broken, 1, None), is_scored=False)
    letter = letter_of(broken)
    assert await reward.trajectories.fail(broken.job.trajectory_id, broken.fence, letter, is_final=True) == "dead"
    (again,) = await claims(agent, 1)
    assert (
        await agent.trajectories.fail(again.job.trajectory_id, again.fence, letter_of(again), is_final=True) == "dead"
    )
    await trainer.rollouts.beat("trainer", 60.0)
    assert await trainer.rollouts.receive("trainer", 1, 1.0)
    after = RedisRolloutStream(trainer.client, RUN)
    assert (await after.beat("trainer", 60.0)).taken_count == 1
    (delivery,) = await after.receive("trainer", 1, 1.0)
    compared = token_differences([delivery.group], [each.logprobs for each in delivery.group.rollouts], 1)
    assert await after.keep_differences(compared) == len(compared)
    shard = ShardKeys("r1", 0)
    await trainer.client.xadd(shard.kept, {"group": "old", "bytes": 9}, id="1-1")
    await trainer.client.hset(shard.run, "kept_bytes", 1 << 40)
    assert await after.acknowledge(delivery)
    assert b"old" not in {row[1][b"group"] for row in await trainer.client.xrange(shard.kept)}
    assert len(await trainer.rollouts.dead_letters(9)) == 2
    name = broken.job.trajectory_id
    assert await trainer.rollouts.retry([name]) == {name: "consumed"}
    assert await trainer.rollouts.discard([name]) == {name: "done"}
    for role, name in ((agent, "c"), (trainer, "h")):
        await trainer.rollouts.push([group(name, 2, deadline_s=0.001)])
        await asyncio.sleep(0.05)
        assert await role.rollouts.reap() == 1
        (delivery,) = await trainer.rollouts.receive("trainer", 1, 1.0)
        if role is agent:
            await trainer.rollouts.acknowledge(delivery)
    assert await trainer.rollouts.swap(delivery, group("next", 2))
    await trainer.rollouts.cancel("next")
    durable = RedisRolloutStream(trainer.client, RUN, durability="disk")
    await durable.push([group("d")])
    await trainer.rollouts.cancel("d")


async def lose_workers(who: dict[str, Part]) -> None:
    """Claims that end: the jobs go on, and a turn that cost too many workers is given up."""
    trainer, agent, worker = who["trainer"], who["agent"], who["worker"]
    await trainer.rollouts.push([group("e")])
    fleeting = RedisTrajectoryQueue(agent.client, RUN, claim_ms=1)
    while not await fleeting.claim("agent-2", 1):
        pass
    await asyncio.sleep(0.05)
    assert (await agent.trajectories.reap(agent.name)).ready_count == 1
    (claim,) = await claims(agent, 1)
    job = replace(TURN, turn_id=f"{claim.job.trajectory_id}.0", agent_id=agent.name)
    await agent.turns.push(agent.name, [TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job)])
    lease = await worker.beat("dedicated")
    assert lease is not None
    dead_count = 0
    while not dead_count:
        turns = RedisTurnQueue(worker.client, RUN, claim_ms=1)
        await turns.exchange(worker.name, want=1, lease_epoch=lease.lease_epoch, active_version=1)
        await asyncio.sleep(0.02)
        dead_count = (await agent.turns.reap(agent.name)).dead_count
    (result,) = await agent.turns.results(agent.name, 1.0)
    assert result.finish_reason == "error"
    await trainer.rollouts.cancel("e")


async def grow_stale(who: dict[str, Part]) -> None:
    """A complete group that is too stale to be delivered is run again."""
    trainer, agent = who["trainer"], who["agent"]
    await trainer.rollouts.push([group("f")])
    (claim,) = await claims(agent, 1)
    assert await agent.trajectories.settle(claim, rollout_of(claim, 1), is_scored=True)
    await Publisher(trainer.weights, "r1").publish({"w": np.full(9, 2, np.float32)}, 2)
    assert await trainer.rollouts.receive("trainer", 1, 0.01) == []
    await claims(agent, 1)


async def look(who: dict[str, Part]) -> None:
    """What the apis and people ask, and what they switch."""
    await who["trainer"].board.add_event("trainer.step", {})
    await who["trainer"].board.set_agreement("r1", AGREEMENT)
    for role in ("agent", "worker", "reward"):
        await who[role].measure("dedicated" if role == "worker" else role)
    for role in ("trainer", "controller", "api-read", "api-control", "api-trajectories", "operator"):
        part = who[role]
        assert set(await part.board.runs()) == {"r1"}
        status = await part.board.run_status("r1")
        assert (status.depth, status.agreement) == (1, AGREEMENT)
        assert "worker-1" in await part.board.workers()
        assert "worker-1" in await part.board.leases("r1")
        await part.board.lends()
        assert set(await part.board.sharing()) == {"worker-1"}
    assert ("turn", "agent") in (await who["trainer"].board.timings("r1"))["r1"]
    for role in ("api-read", "api-control", "api-trajectories", "operator"):
        part = who[role]
        assert await part.board.events("0", 10, 0.01)
        assert {role for name, role in (await part.board.timings())["r1"] if name == "turn"} == {
            *("agent", "dedicated", "reward")
        }
        await part.rollouts.dead_letters(10)
        held = await part.weights.held("r1")
        assert held and all(await part.weights.manifests("r1", held))
        assert len(await part.weights.holders("r1", addressed=False)) == 1
        assert (await part.weights.head("r1")).version == 2
    for role in ("api-trajectories", "operator"):
        assert (await who[role].reading.counts()).waiting == 0
        (begun,) = await who[role].reading.begun(0, 10)
        assert await who[role].reading.find(begun.trajectory_id)
        for state in ("open", "waiting", "finished"):
            await who[role].reading.groups(state, 10, "")
    for role in ("api-control", "api-trajectories", "operator"):
        await who[role].board.set_lend("*", "on")
        await who[role].board.add_event("lend.switched", {})
    assert await who["operator"].board.newest_events("", 10)
    await who["operator"].rollouts.push([group("g")])
    agent, (claim,) = who["agent"], await who["agent"].trajectories.claim("agent-1", 1)
    name, letter = claim.job.trajectory_id, given_up("r1", agent.name, claim.job, "it raised")
    await agent.trajectories.fail(name, claim.fence, letter, is_final=True)
    assert await who["operator"].rollouts.retry([name]) == {name: "done"}
    (claim,) = await agent.trajectories.claim(agent.name, 1)
    await agent.trajectories.fail(name, claim.fence, letter, is_final=True)
    assert await who["api-control"].rollouts.retry([name]) == {name: "done"}
    for role in ("api-control", "api-trajectories"):
        assert await who[role].rollouts.retry([name]) == {name: "unknown"}
        assert await who[role].rollouts.discard([name]) == {name: "unknown"}


async def leave(who: dict[str, Part]) -> None:
    """Everyone goes, and the run with them."""
    for role in ("worker", "agent", "reward", "controller"):
        await who[role].board.forget_worker(who[role].name)
    await who["operator"].board.delete_run("r1")
    assert await who["operator"].board.runs() == {}


@pytest.mark.parametrize("role", ["trainer", "controller", "api-read", "api-control", "api-trajectories", "operator"])
async def test_whoever_shows_a_run_may_read_why_it_stands(broker: Guarded, role: str) -> None:
    async with parts(broker) as found:
        trainer, agent = found["trainer"], found["agent"]
        await trainer.board.create_run(RUN)
        await trainer.rollouts.push([group("g1")])
        (claim,) = await agent.trajectories.claim(agent.name, 1)
        letter = given_up("r1", agent.name, claim.job, "step raised KeyError")
        await agent.trajectories.fail(claim.job.trajectory_id, claim.fence, letter, is_final=True)
        causes = await diagnose_run(found[role].board, "r1")
    assert causes[0].code == "attempts_fail" and "step raised KeyError" in causes[0].text
    assert broker.admin.acl_log() == []


async def test_an_api_that_may_not_read_trajectories_says_who_may(broker: Guarded) -> None:
    async with parts(broker) as found:
        await found["trainer"].board.create_run(RUN)
        for role, status in (("api-control", 403), ("api-trajectories", 200)):
            async with await RedisFabric.open(broker.url(role), client_name="tests") as fabric:
                transport = httpx.ASGITransport(make_app(fabric, ApiConfig()))
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                    for path in ("trajectories", "groups?state=finished"):
                        answer = await http.get(f"/v1/runs/r1/{path}")
                        assert answer.status_code == status, answer.text
                    if status == 403:
                        assert "rollfab-api-trajectories" in answer.json()["message"]
