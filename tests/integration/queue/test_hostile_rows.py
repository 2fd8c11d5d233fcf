"""Someone with access to the broker writes rubbish where others look: those who look go on, and show it."""

from __future__ import annotations

import asyncio
import shlex
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from redis import Redis
from typer.testing import CliRunner, Result

from rollfab.api.reading.events import EventTail
from rollfab.deploy.main import app
from rollfab.fabric.broker.clients.translate import answers_of
from rollfab.fabric.broker.clients.typed import is_wrong_type
from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import BrokerError, WireError
from rollfab.fabric.contract.records import Sampling, TurnJob
from rollfab.fabric.contract.sharing import SharingReport
from rollfab.fabric.contract.text import HARMFUL
from rollfab.fabric.ports.queue import TurnPush
from rollfab.fabric.queue import keys
from rollfab.fabric.queue.keys import RunShards, ShardKeys, WeightKeys
from rollfab.trainer.checks import make_groups
from rollfab.workers.controller.controller import Controller, ControllerConfig
from tests.contracts.test_queue import rollout_of
from tests.fuzz.tables import SHARD_TABLES as FUZZED
from tests.support.processes.api_server import RUN, ApiWorld

pytestmark = [pytest.mark.redis, pytest.mark.timeout(30)]


RUBBISH = (b"", b"\xff\xfe", b"rf\x01\x08\xff\xff\xff\xff", b"null", b"[[[[", b"{}")


async def test_rubbish_among_workers_and_events_is_shown_and_stops_nobody(redis: Redis, api: ApiWorld) -> None:
    # Given a good worker, and rubbish beside it
    await api.beat("serving-1", "serving")
    for index, data in enumerate(RUBBISH):
        redis.hset(keys.WORKERS, b"bad-%d\xff" % index, data)
        redis.xadd(keys.EVENTS, {"kind": data, "facts": data})
        redis.xadd(keys.EVENTS, {b"x" + data: data})
    await api.fabric.board.add_event("lease.granted", {"worker_id": "serving-1"})

    # Then the page shows all of it
    workers = {row["worker_id"]: row for row in (await api.json("v1/workers"))["workers"]}
    assert workers["serving-1"]["role"] == "serving"
    bad = [row for row in workers.values() if row["role"] == "unreadable"]
    assert len(bad) == len(RUBBISH)
    assert all(row["state"] == "failed" and "cannot be read" in row["error"] for row in bad)

    # And whoever follows the events comes to the last one
    tail = EventTail(api.fabric.board, SystemClock())
    rows = await api.fabric.board.events("0", 100, 0.01)
    tail._take(rows)
    assert rows[-1][1] == "lease.granted"
    assert [kind for _, kind, _ in rows].count("unreadable") >= 2 * len(RUBBISH) - 1
    assert tail.newest(1)[0].kind == "lease.granted"


async def test_a_lease_and_a_head_that_cannot_be_read_are_said_so(redis: Redis, api: ApiWorld) -> None:
    redis.hset(ShardKeys("r1", 0).leases, "serving-1", b"much")
    with pytest.raises(WireError, match="the lease of worker serving-1 on run r1 cannot be read"):
        await api.fabric.board.leases("r1")
    redis.hset(WeightKeys("r1").head, "version", b"\xff")
    with pytest.raises(WireError, match="the head of run r1 cannot be read"):
        await api.fabric.weights.head("r1")
    redis.hset(WeightKeys("r1").manifests, "newest", b"x")
    redis.hset(WeightKeys("r1").manifests, "3:delta", b"x")
    assert await api.fabric.weights.held("r1") == [(3, "delta")]


async def test_a_job_s_record_that_knows_no_suspicion_yet_is_read(redis: Redis, api: ApiWorld) -> None:
    await api.push_group("old", 1)
    redis.hset(ShardKeys("r1", 0).trajectory.record, "old.0", b"ready 3 1 2 0 -")
    (claim,) = await api.claim(1)
    assert (claim.fence, claim.attempt, claim.loss) == (4, 1, 2)
    assert redis.hget(ShardKeys("r1", 0).trajectory.record, "old.0").split()[:8] == b"claimed 4 1 2 0 0 0 1".split()


async def test_a_job_s_record_that_is_none_ends_in_a_declared_error(redis: Redis, api: ApiWorld) -> None:
    for data in (
        b"",
        b"claimed",
        b"claimed x y z w",
        b"ready 1 2 3 w",
        b"\xff\xff",
        b"claimed 1 1 1 agent-1 9 9 9",
        b"claimed 1 1 1 1 1 1 1 agent-1",
    ):
        await api.push_group(f"g{len(data)}{data[:1].hex()}", 1)
        (name,) = (key for key in redis.hkeys(ShardKeys("r1", 0).trajectory.record) if key)
        redis.hset(ShardKeys("r1", 0).trajectory.record, name, data)
        with suppress(BrokerError, WireError):
            await api.claim(1)
        redis.delete(*redis.keys("rf:{r1.0}:trajectory:*"))
        await api.fabric.board.create_run(RUN)
    assert redis.ping()


async def typed(url: str, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, words, env={"ROLLFAB_URL": url, "COLUMNS": "200"})


async def test_a_run_that_cannot_be_stops_nobody_and_is_named_and_removed(
    url: str, redis: Redis, api: ApiWorld
) -> None:
    # Given a run of no shards beside a good one, as whoever may make runs may write it
    impossible = replace(RUN, run_id="bad", shard_count=1).encode().replace(b'"shard_count":1', b'"shard_count":0')
    redis.hset(keys.RUNS, "bad", impossible)
    redis.hset(keys.RUNS, b"odd\xff", b"rf")

    # Then a controller leads and plans, and the good run is there for everybody
    config = ControllerConfig(worker_id="c1")
    controller = Controller(api.fabric.board, config, SystemClock())
    await controller.tick(await api.fabric.board.lead("c1", 60_000))
    assert set(await api.fabric.board.runs()) == {"r1"}
    status = await api.json("v1/status")
    assert [run["run_id"] for run in status["runs"]] == ["r1"]

    # And the bad ones are named, with what removes them
    named = {row["row"]: row for row in status["bad_rows"]}
    assert "shard_count is 0" in named["bad"]["problem"]
    assert named["bad"]["step"] == "rollfab runs rm --yes --run bad"
    assert named["odd\\xff"]["step"] == "rollfab rows rm -- runs 'odd\\xff'"
    with pytest.raises(WireError, match="run 'bad' cannot be read, `rollfab runs rm --run bad` deletes it"):
        await api.fabric.board.run_status("bad")
    for command in (["runs", "rm", "--yes", "--run", "bad"], ["rows", "rm", "--", "runs", "odd\\xff"]):
        done = await typed(url, *command)
        assert done.exit_code == 0, done.output
    assert redis.hkeys(keys.RUNS) == [b"r1"]
    refused = await typed(url, "rows", "rm", "--", "runs", "r1")
    assert refused.exit_code != 0
    assert redis.hkeys(keys.RUNS) == [b"r1"]


SHARD_RUBBISH: tuple[tuple[str, str, bytes], ...] = (
    ("counters", "tokens", b"many"),
    ("run", "bytes", b"nan"),
    ("run", "head_version", b"\xff"),
    ("rewards", "width", b"0"),
    ("rewards", "7", b"1 2"),
    ("rewards", "-1", b"1 x x x x 1"),
    ("trajectory:held", "agent-1", b"x"),
    ("open", "g1", b"soon"),
    ("leases", "w", b"1 -1 0"),
    ("dead", "g9.0", b"rf"),
)


@pytest.mark.parametrize(("table", "row", "data"), SHARD_RUBBISH)
async def test_a_bad_row_of_a_run_keeps_nothing_else_from_ending(
    redis: Redis, api: ApiWorld, table: str, row: str, data: bytes
) -> None:
    await api.push_group("g1", 2)
    redis.hset(keys.key_of(f"r1.0:{table}"), row, data)
    for claim in await api.claim(2):
        await api.settle(claim)
    (delivery,) = await api.fabric.rollouts(RUN).receive("trainer", 1, 1.0)
    assert len(delivery.group.rollouts) == 2
    assert await api.fabric.rollouts(RUN).acknowledge(delivery)
    assert (await api.json("v1/status"))["runs"][0]["run_id"] == "r1"


async def test_a_trajectory_that_cannot_be_read_fails_alone(redis: Redis, api: ApiWorld) -> None:
    # Given a group of which one job is overwritten, one record, and one is well
    await api.push_group("g1", 3)
    jobs, records = keys.key_of("r1.0:trajectory:job"), keys.key_of("r1.0:trajectory:record")
    redis.hset(jobs, "g1.0", b"rf\x01\x02rubbish")
    redis.hset(records, "g1.1", b"ready for all")
    (claim,) = await api.claim(3)
    assert claim.job.trajectory_id == "g1.2"
    await api.settle(claim)
    assert (await api.fabric.trajectories(RUN).reap("agent-1")).dead_count == 1

    # Then the group is delivered, with why the others are missing
    (delivery,) = await api.fabric.rollouts(RUN).receive("trainer", 1, 1.0)
    assert [each.trajectory_id for each in delivery.group.rollouts] == ["g1.2"]
    assert {each.trajectory_id for each in delivery.group.failures} == {"g1.0", "g1.1"}
    assert all("could not be read" in each.reason for each in delivery.group.failures)


async def test_a_rollout_that_cannot_be_read_is_a_failure_of_its_group(redis: Redis, api: ApiWorld) -> None:
    await api.push_group("g1", 2)
    for claim in await api.claim(2):
        await api.settle(claim)
    redis.hset(keys.key_of("r1.0:rollouts:g1"), "g1.1", b"rf")
    (delivery,) = await api.fabric.rollouts(RUN).receive("trainer", 1, 1.0)
    assert [each.trajectory_id for each in delivery.group.rollouts] == ["g1.0"]
    assert [each.trajectory_id for each in delivery.group.failures] == ["g1.1"]


async def test_a_table_of_another_type_is_named_and_removed(redis: Redis, api: ApiWorld) -> None:
    await api.beat("serving-1", "serving")
    redis.delete(keys.SHARING, ShardKeys("r1", 0).counters)
    redis.rpush(ShardKeys("r1", 0).counters, "x")
    redis.set(keys.SHARING, "x")
    status = await api.json("v1/status")
    assert [(row["table"], row["row"]) for row in status["bad_rows"]] == [("r1.0:counters", "")]
    survey = await api.fabric.board.survey()
    assert await api.fabric.board.remove_row(survey.bad_rows[0])
    assert (await api.fabric.board.survey()).bad_rows == []


SHARD_TABLES = [table for table in FUZZED if not table.startswith(("rollouts:", "group:", "inbox:"))]


@pytest.mark.parametrize("table", SHARD_TABLES)
async def test_a_key_of_another_type_in_a_table_of_a_run_stops_no_work(redis: Redis, api: ApiWorld, table: str) -> None:
    key = keys.key_of(f"r1.0:{table}")
    redis.delete(key)
    redis.hset(key, "x", "1") if FUZZED[table] != "hash" else redis.rpush(key, "x")

    if table == "run":  # its bounds are gone; its trainer says them anew as it opens the run
        await api.fabric.board.create_run(RUN)

    # Then trajectories are pushed, claimed, saved, settled, taken back, delivered and acknowledged
    await api.push_group("g1", 2)
    claims = await api.claim(2)
    assert len(claims) == 2
    assert await api.fabric.trajectories(RUN).save("agent-1", claims[0], b"{}")
    for claim in claims:
        await api.settle(claim)
    await api.fabric.trajectories(RUN).reap("agent-1")
    await api.fabric.turns(RUN).reap("agent-1")
    deliveries = [*await api.fabric.rollouts(RUN).receive("trainer", 1, 0.1)]
    deliveries = deliveries or await api.fabric.rollouts(RUN).receive("trainer", 1, 10.0)
    assert len(deliveries[0].group.rollouts) == 2
    assert await api.fabric.rollouts(RUN).acknowledge(deliveries[0])
    assert (await api.json("v1/status"))["runs"][0]["run_id"] == "r1"


FABRIC_TABLES = ("workers", "heartbeats", "assignments", "sharing", "lends", "events", "plan", "clock")


@pytest.mark.parametrize("name", FABRIC_TABLES)
async def test_a_key_of_another_type_in_a_table_of_the_fabric_stops_nobody(
    redis: Redis, api: ApiWorld, name: str
) -> None:
    key = keys.key_of(name)
    redis.delete(key)
    redis.rpush(key, "x")

    # Then whoever only looks finds nothing there
    for path in ("v1/status", "v1/workers", "v1/leases"):
        await api.json(path)
    assert await api.fabric.board.lends() == {}
    assert await api.fabric.board.events("0", 10, 0.01) == []

    # And who writes there puts it right
    await api.beat("serving-1", "serving")
    await api.fabric.board.set_lend("serving-1", "off")
    await api.fabric.board.set_sharing(SharingReport(worker_id="serving-1", alone={}, shared={}))
    config = ControllerConfig(worker_id="c1")
    await Controller(api.fabric.board, config, SystemClock()).tick(await api.fabric.board.lead("c1", 60_000))
    assert "serving-1" in await api.fabric.board.workers()
    assert set(await api.fabric.board.lends()) == {"serving-1"}
    assert (await api.fabric.board.events("0", 10, 0.01))[-1][1] == "lend.switched"


async def test_a_bell_of_another_type_is_waited_at_and_put_right(redis: Redis, api: ApiWorld) -> None:
    bell = keys.lease_bell("serving-1")
    redis.set(bell, "x")
    await api.fabric.board.wait_lease("serving-1", 0.01)
    assert redis.type(bell) == b"string"
    await api.beat("serving-1", "serving")
    await api.fabric.board.set_lend("serving-1", "off")
    assert redis.type(bell) == b"list"


async def test_a_clock_that_is_none_is_set_anew(redis: Redis, api: ApiWorld) -> None:
    for data in (b"", b"x", b"9" * 40, b"1 2 3"):
        redis.set(keys.CLOCK, data)
        redis.set(ShardKeys("r1", 0).clock, data)
        await api.beat("serving-1", "serving")
        (_, age_ms) = (await api.fabric.board.workers())["serving-1"]
        assert age_ms < 60_000
        await api.claim(1)


LISTINGS = ("status", "rows ls", "runs ls", "dead ls --run r1", "weights ls r1", "lend report", "doctor --run r1")


@pytest.mark.usefixtures("api")
@pytest.mark.timeout(120)
async def test_no_listing_lets_a_name_move_the_cursor(url: str, redis: Redis) -> None:
    name = b"evil\x1b[2J\xc2\x9b7m"
    for table in ("workers", "lends", "runs", "sharing", "assignments"):
        redis.hset(keys.key_of(table), name, b"\x1b[2J")
    for table in ("r1.0:dead", "r1.0:counters", "r1.w:head"):
        redis.hset(keys.key_of(table), name, b"\x1b[2J")
    redis.hset(keys.key_of("r1.0:group:evil\x1b[2J"), "size", b"x")
    try:
        for words in LISTINGS:
            for json in ([], ["--json"]):
                done = await typed(url, *words.split(), *json)
                shown = done.output + str(done.exception or "")
                assert not HARMFUL.search(shown.replace("\r\n", "\n")), (words, HARMFUL.findall(shown))
        listed = await typed(url, "rows", "ls")
        assert "evil\\x1b[2J" in listed.stdout
        steps = [line.split(maxsplit=1)[1].strip("`") for line in listed.stdout.splitlines() if line.startswith("  → ")]
        # And each is removed by the command that is shown
        for step in steps:
            command = shlex.split(step)[1:]
            done = await typed(url, *command)
            assert done.exit_code == 0, (step, done.output, done.exception)
        done = await typed(url, "rows", "ls")
        assert "every row can be read" in done.output
    finally:
        redis.flushall()


@pytest.mark.usefixtures("api")
async def test_a_head_that_cannot_be_read_is_named_by_the_commands_of_weights(url: str, redis: Redis) -> None:
    for write in (lambda key: redis.hset(key, "version", b""), lambda key: redis.rpush(key, "x")):
        redis.delete(WeightKeys("r1").head)
        write(WeightKeys("r1").head)
        done = await typed(url, "weights", "verify", "r1")
        assert isinstance(done.exception, WireError)
        assert "table r1.w:head" in str(done.exception)
        assert "`rollfab rows rm -- r1.w:head" in str(done.exception)
    redis.delete(WeightKeys("r1").head)


MADE_UP = (b"bad-1", b"bad\xff2.0", b"bad-3.-1", b"bad{4}:x", b".bad5.0", b"bad-6.0", b"bad-7.0.0", b"x" * 5000)


@pytest.mark.parametrize(
    "record", [b"", b"junk", b"claimed 1 0 0 0 0 0 0 agent-1", b"ready 3 1 2 0 -", b"scoring 1 0 0 0 -"]
)
async def test_jobs_that_somebody_made_up_end_and_make_no_group(redis: Redis, api: ApiWorld, record: bytes) -> None:
    run = replace(RUN, run_id="made-up")
    shard = ShardKeys("made-up", 0)
    # Given jobs that were never pushed, in every table where an agent or a worker looks for work
    await api.fabric.board.create_run(run)
    for name in MADE_UP:
        for jobs in (shard.trajectory, shard.turn):
            redis.hset(jobs.record, name, record)
            redis.zadd(jobs.deadline, {name: 0})
            redis.xadd(jobs.ready[1], {"id": name})
    redis.hset(shard.leases, "w1", b"1 64 0")

    # When agents and workers take what there is, and take back what nobody renews
    trajectories, turns = api.fabric.trajectories(run), api.fabric.turns(run)
    for _ in range(20):
        assert await trajectories.claim("agent-1", 8) == []
        assert (await turns.exchange("w1", want=8, lease_epoch=1)).claims == []
        await trajectories.reap("agent-1")
        await turns.reap("agent-1")
        for jobs in (shard.trajectory, shard.turn):  # nobody renews, and nobody waits
            for name in redis.zrange(jobs.deadline, 0, -1):
                redis.zadd(jobs.deadline, {name: 0})

    # Then none is looked at any more, nobody holds one, and the trainer gets nothing
    waiting_for_a_reward = redis.zcard(shard.trajectory.deadline)
    assert waiting_for_a_reward == (2 if record.startswith(b"scoring") else 0)
    assert redis.zcard(shard.turn.deadline) == 0
    held = redis.hgetall(shard.trajectory.held) | redis.hgetall(shard.turn.held)
    assert {count for worker, count in held.items() if worker != b"-"} <= {b"0"}
    assert await api.fabric.rollouts(run).receive("trainer", 8, 0.1) == []
    await api.fabric.board.delete_run("made-up")


@pytest.mark.parametrize("state", [b"ready 0 0 0 0 0 0 0 -", b"claimed 7 0 0 0 0 0 0 w0"])
async def test_jobs_in_another_shard_than_their_own_end_there_and_harm_none_of_their_name(
    redis: Redis, api: ApiWorld, state: bytes
) -> None:
    run = replace(RUN, run_id="strays", shard_count=2)
    shards = RunShards("strays", 2)
    here = shards.of("g1")
    (other,) = [keys for keys in shards.all if keys is not here]
    # Given a trajectory and a turn that are under way, and the same ones in the other shard
    await api.fabric.board.create_run(run)
    trajectories, turns = api.fabric.trajectories(run), api.fabric.turns(run)
    await api.fabric.rollouts(run).push(make_groups([{}], 1, ["g1"]))
    job = redis.hget(here.trajectory.job, "g1.0")
    (claim,) = await trajectories.claim("agent-1", 1)
    asked = TurnJob(turn_id="g1.0.0", agent_id="agent-1", sampling=Sampling(), prompt_ids=np.arange(3, dtype="i4"))
    await turns.push("agent-1", [TurnPush(trajectory_id="g1.0", fence=claim.fence, job=asked)])
    for name, jobs, row in (("g1.0", other.trajectory, job), ("g1.0.0", other.turn, asked.encode())):
        redis.hset(jobs.job, name, row)
        redis.hset(jobs.record, name, state)
        redis.zadd(jobs.deadline, {name: 0})
        redis.xadd(jobs.ready[1], {"id": name})
    for each in shards.all:
        redis.hset(each.leases, "w1", b"1 64 0")

    # When an agent and a worker look for work again and again
    claims = []
    for _ in range(20):
        assert await trajectories.claim("agent-1", 8) == []
        claims += (await turns.exchange("w1", want=8, lease_epoch=1)).claims
        await trajectories.reap("agent-1")
        await turns.reap("agent-1")
        for jobs in (other.trajectory, other.turn):
            for name in redis.zrange(jobs.deadline, 0, -1):
                redis.zadd(jobs.deadline, {name: 0})

    # Then the good turn was claimed once and its agent heard of no other end, and nothing goes round in the other
    assert [each.job.turn_id for each in claims] == ["g1.0.0"]
    assert await turns.results("agent-1", 0.1) == []
    assert redis.zcard(other.trajectory.deadline) == redis.zcard(other.turn.deadline) == 0
    assert [redis.xlen(key) for jobs in (other.trajectory, other.turn) for key in jobs.ready] == [0] * 6
    assert await trajectories.renew("agent-1", [claim]) == []
    await api.fabric.board.delete_run("strays")


async def test_a_group_behind_thousands_that_somebody_made_up_comes_after_a_few_calls(
    redis: Redis, api: ApiWorld
) -> None:
    run = replace(RUN, run_id="behind", shard_count=1)
    # Given entries of no group, some of them no text, before and between those of two good groups
    await api.fabric.board.create_run(run)
    rollouts, trajectories = api.fabric.rollouts(run), api.fabric.trajectories(run)
    await rollouts.beat("trainer", 60.0)
    completed = ShardKeys("behind", 0).completed
    for group in ("g1", "g2"):
        for number in range(1500):
            redis.xadd(completed, {"group": b"bad-%d\xff" % number} if number % 2 else {"else": "", "x": f"{number}"})
        await rollouts.push(make_groups([{}], 1, [group]))
        (claim,) = await trajectories.claim("agent-1", 1)
        await trajectories.settle(claim, rollout_of(claim, 1.0), is_scored=True)

    # When a trainer takes one at a time, then both come, in order and once
    found = [await rollouts.receive("trainer", 1, 0.1) for _ in range(14)]
    assert [delivery.group.group_id for deliveries in found for delivery in deliveries] == ["g1", "g2"]
    assert redis.xlen(completed) == 2
    await api.fabric.board.delete_run("behind")


async def test_names_that_are_no_text_stop_neither_who_consumes_nor_who_lists_leases(
    redis: Redis, api: ApiWorld
) -> None:
    shard = ShardKeys("r1", 0)
    consumer = api.fabric.rollouts(RUN)
    await consumer.beat("trainer", 60.0)
    redis.zadd(shard.consumers, {b"trainer/\xff": 1e15})
    redis.hset(shard.leases, b"w\xff", b"1 1 0")
    assert (await consumer.beat("trainer", 60.0)).namesakes == ("\ufffd",)
    assert set(await api.fabric.board.leases("r1")) >= {"w\ufffd"}
    redis.delete(shard.consumers, shard.leases)


async def test_an_error_among_a_pipelines_answers_holds_no_other_answer(url: str, redis: Redis) -> None:
    client = await open_broker(url, client_name="tests")
    redis.set("large", b"x" * 1000)
    answer, error = await answers_of(client.pipeline(transaction=False).get("large").hgetall("large"))
    assert len(answer) == 1000
    assert is_wrong_type(error)
    assert error.__traceback__ is None
    redis.delete("large")
    await client.aclose()


@pytest.mark.parametrize("record", [b"junk", b"ready 9 0 0 0 0 0 0 -", None])
async def test_a_claim_whose_record_somebody_wrote_over_takes_no_slot_for_good(
    redis: Redis, api: ApiWorld, record: bytes | None
) -> None:
    # Given an agent that holds two trajectories, and somebody who writes over one of their records
    run = replace(RUN, run_id="slots")
    await api.fabric.board.create_run(run)
    jobs, queue = ShardKeys("slots", 0).trajectory, api.fabric.trajectories(run)
    await api.fabric.rollouts(run).push(make_groups([{}], 2, ["g1"]))
    assert len(await queue.claim("agent-1", 2)) == 2
    assert redis.hget(jobs.held, "agent-1") == b"2"
    redis.hset(jobs.record, "g1.0", record) if record else redis.hdel(jobs.record, "g1.0")
    redis.zadd(jobs.deadline, {"g1.0": 0})

    # When somebody takes back what is not renewed
    await queue.reap("agent-2")

    # Then the agent holds the other one alone
    assert redis.hget(jobs.held, "agent-1") == b"1"
    await api.fabric.board.delete_run("slots")


async def test_claims_that_are_written_over_all_the_time_have_all_counted_now_and_then_only(
    redis: Redis, api: ApiWorld
) -> None:
    # Given two thousand claims
    run = replace(RUN, run_id="often")
    await api.fabric.board.create_run(run)
    jobs, queue = ShardKeys("often", 0).trajectory, api.fabric.trajectories(run)
    names = [f"g{number}.0" for number in range(2000)]
    redis.hset(jobs.record, mapping=dict.fromkeys(names, "claimed 1 0 0 0 0 0 0 agent-1"))
    redis.zadd(jobs.deadline, dict.fromkeys(names, 1e15))
    redis.hset(jobs.held, "agent-1", 2000)

    # When somebody writes over one after the other, and agents take back what is not renewed
    counted, clock = [], asyncio.get_running_loop().time
    began_s = clock()
    for name in names[:40]:
        redis.hset(jobs.record, name, "junk")
        redis.zadd(jobs.deadline, {name: 0})
        await queue.reap("agent-2")
        counted.append(redis.hget(jobs.held, "-"))
    assert len(set(counted)) <= 2 + (clock() - began_s) / 1.9

    # Then they are counted every two seconds at most, and in the end the count is right
    while redis.hget(jobs.held, "agent-1") != b"1960":
        await queue.reap("agent-2")
        await asyncio.sleep(0.1)
    await api.fabric.board.delete_run("often")


async def test_suspects_that_somebody_made_up_hold_no_other_up(redis: Redis, api: ApiWorld) -> None:
    run = replace(RUN, run_id="suspects")
    await api.fabric.board.create_run(run)
    jobs, queue = ShardKeys("suspects", 0).trajectory, api.fabric.trajectories(run)
    await api.fabric.rollouts(run).push(make_groups([{}], 1, ["g1"]))
    redis.delete(jobs.ready[1])
    redis.rpush(jobs.suspects, *(b"bad-%d\xff" % number for number in range(60)), "g1.0")
    assert [claim.job.trajectory_id for claim in await queue.claim("agent-1", 1)] == ["g1.0"]
    await api.fabric.board.delete_run("suspects")
