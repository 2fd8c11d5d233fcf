"""Every table that a role may write is looked through for bad rows, and every bad row there can be removed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import pytest
from redis import Redis

from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import BadRow
from rollfab.fabric.queue.acl import RIGHTS
from rollfab.fabric.queue.keys import table_of
from rollfab.fabric.queue.tables import ROW_COUNT_MAX, table_at
from tests.fuzz.tables import tables
from tests.support.brokers import key_table

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

TAGS = {"{rf}": "rf:{rf}", "{run}": "rf:{r1.0}", "{weights}": "rf:{r1.w}"}


@pytest.fixture
def redis(broker_url: str) -> Iterator[Redis]:
    with Redis.from_url(broker_url) as client:
        client.flushall()
        yield client


@pytest.fixture
async def fabric(broker_url: str, redis: Redis) -> AsyncIterator[RedisFabric]:
    async with await RedisFabric.open(broker_url, client_name="test") as found:
        yield found


def fuzzed() -> dict[str, str]:
    """Each key of the fuzz, and its type."""
    return {
        table.key.replace("{run}", "rf:{r1.0}").replace("{weights}", "rf:{r1.w}").replace("*", "x1"): table.kind
        for table in tables()
    }


def test_every_table_of_the_fuzz_is_surveyed_as_the_type_that_it_is() -> None:
    for key, kind in fuzzed().items():
        table = table_at(key)
        assert table is not None, key
        assert table.kind == kind, key


def test_every_key_that_there_is_is_surveyed_as_the_type_that_it_is() -> None:
    assert key_table.module.__doc__ is not None
    rows = key_table.ROW.findall(key_table.module.__doc__)
    assert len(rows) > 40
    for name, kind in rows:
        for job in ("trajectory", "turn"):
            key = name.replace("{run.s}", "{r1.0}").replace("{run.w}", "{r1.w}").replace(":K:", f":{job}:")
            found = table_at(key.replace("<u>", "1"))
            assert found is not None, key
            assert found.kind == kind.lower(), key


def test_every_pattern_that_a_role_may_write_leads_to_a_surveyed_table() -> None:
    patterns = {word for rights in RIGHTS.values() for word in rights.writes.split()}
    for pattern in patterns - {"rq:*", "{rf}:*", "{run}:*", "{weights}:*"}:
        tag, _, rest = pattern.partition(":")
        key = f"{TAGS.get(tag, tag)}:{rest}"
        ends = ("",) if not key.endswith(":*") else ("x1", "job", "ready:1", "1")
        assert any(table_at(key.removesuffix("*") + end) for end in ends), pattern


def put(redis: Redis, key: str, kind: str) -> None:
    """Write rubbish as a row."""
    name, raw = b"bad\x1b\xff 1", b"\xff\x00rubbish"
    if kind == "hash":
        redis.hset(key, b"data" if key.startswith("rq:") else _field(key, name), raw)
    elif kind == "zset":
        redis.zadd(key, {name: float("inf")})
    elif kind == "stream":
        redis.xadd(key, {"x": raw})
    elif kind == "string":
        redis.set(key, raw)
    else:
        redis.rpush(key, name) if kind == "list" else redis.sadd(key, name)


def _field(key: str, name: bytes) -> bytes:
    """Tables that say several things have names for them."""
    named = {"run": b"depth", "group": b"size", "kept": b"size", "head": b"version"}
    return named.get(key.partition("}:")[2].partition(":")[0], name)


def checked() -> list[tuple[str, str]]:
    return [(key, kind) for key, kind in fuzzed().items() if (table := table_at(key)) and table.check]


async def test_rubbish_in_any_table_is_named_and_removed_and_nothing_else(fabric: RedisFabric, redis: Redis) -> None:
    # Given rubbish in every table that anybody reads
    for key, kind in checked():
        put(redis, key, kind)
    # Then each is named
    survey = await fabric.board.survey_rows()
    assert {row.table for row in survey.bad_rows} == {table_of(key) for key, _ in checked()}
    assert survey.is_whole
    assert survey.cut == []
    # And the row alone is removed, once
    redis.hset("rf:{r1.0}:counters", "tokens", 5)
    for row in survey.bad_rows:
        assert await fabric.board.remove_row(row), row
        assert not await fabric.board.remove_row(row), row
    assert (await fabric.board.survey_rows()).bad_rows == []
    assert redis.hgetall("rf:{r1.0}:counters") == {b"tokens": b"5"}
    assert not await fabric.board.remove_row(BadRow("r1.0:counters", "tokens", ""))
    assert not await fabric.board.remove_row(BadRow("r1.0:counters", "", ""))


async def test_a_table_of_another_type_is_named_wherever_it_is(fabric: RedisFabric, redis: Redis) -> None:
    for key, kind in fuzzed().items():
        redis.hset(key, "x", "1") if kind != "hash" else redis.rpush(key, "x")
    survey = await fabric.board.survey_rows()
    named = {row.table: row.problem for row in survey.bad_rows}
    assert named.keys() == {table_of(key) for key in fuzzed()}
    assert named["runs"] == "it is a list, and should be a hash"
    for row in survey.bad_rows:
        assert await fabric.board.remove_row(row)
    assert redis.keys() == []


async def test_what_is_too_large_to_look_through_is_said(fabric: RedisFabric, redis: Redis) -> None:
    for first, last in pairwise(range(0, 4 * ROW_COUNT_MAX, ROW_COUNT_MAX)):
        redis.hset("rf:{r1.0}:counters", mapping={f"name-{index}": 1 for index in range(first, last)})
    survey = await fabric.board.survey_rows()
    assert survey.cut == ["r1.0:counters"]
    assert survey.row_count <= ROW_COUNT_MAX + 1
