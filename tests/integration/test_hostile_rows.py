"""Someone with access to the broker writes rubbish where others look: those who look go on, and show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from redis import Redis

from rollfab.api.events import EventTail
from rollfab.fabric.bus import keys
from rollfab.fabric.bus.embedded import EmbeddedBroker
from rollfab.fabric.bus.keys import ShardKeys, WeightKeys
from rollfab.fabric.clock import SystemClock
from rollfab.fabric.errors import BrokerError, WireError
from tests.api_server import RUN, running_api

pytestmark = [pytest.mark.redis, pytest.mark.timeout(30)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        yield broker.url


@pytest.fixture
def redis(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as client:
        yield client


RUBBISH = (b"", b"\xff\xfe", b"rf\x01\x08\xff\xff\xff\xff", b"null", b"[[[[", b"{}")


async def test_rubbish_among_workers_and_events_is_shown_and_stops_nobody(url: str, redis: Redis) -> None:
    async with running_api(url, cache_s=0.0) as api:
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


async def test_a_lease_and_a_head_that_cannot_be_read_are_said_so(url: str, redis: Redis) -> None:
    async with running_api(url) as api:
        redis.hset(ShardKeys("r1", 0).leases, "serving-1", b"much")
        with pytest.raises(WireError, match="the lease of worker serving-1 on run r1 cannot be read"):
            await api.fabric.board.leases("r1")
        redis.hset(WeightKeys("r1").head, "version", b"\xff")
        with pytest.raises(WireError, match="the head of run r1 cannot be read"):
            await api.fabric.weights.head("r1")
        redis.hset(WeightKeys("r1").manifests, "newest", b"x")
        redis.hset(WeightKeys("r1").manifests, "3:delta", b"x")
        assert await api.fabric.weights.held("r1") == [(3, "delta")]


async def test_a_job_s_record_that_knows_no_suspicion_yet_is_read(url: str, redis: Redis) -> None:
    async with running_api(url) as api:
        await api.push_group("old", 1)
        redis.hset(ShardKeys("r1", 0).trajectory.record, "old.0", b"ready 3 1 2 0 -")
        (claim,) = await api.claim(1)
        assert (claim.fence, claim.attempt, claim.loss) == (4, 1, 2)
        assert redis.hget(ShardKeys("r1", 0).trajectory.record, "old.0").split()[:8] == b"claimed 4 1 2 0 0 0 1".split()


async def test_a_job_s_record_that_is_none_ends_in_a_declared_error(url: str, redis: Redis) -> None:
    async with running_api(url) as api:
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
