"""Between us and the broker: connections that break in the middle of anything, slow ones, and crashes under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import BrokerError, RunUnknown
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from tests.support.brokers.port_life import GROUP_SIZE, TURN_COUNT, Life, group_of
from tests.support.brokers.redis_server import RedisServer, redis_server
from tests.support.brokers.tcp_relay import Relay
from tests.support.until import until

pytestmark = [pytest.mark.fault, pytest.mark.redis, pytest.mark.timeout(60)]

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=1000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path, "appendonly yes", "appendfsync everysec") as server:
        yield server


@pytest.mark.parametrize("way", ["requests", "replies"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_connections_cut_in_the_middle_of_anything_lose_and_double_nothing(
    server: RedisServer, way: str, seed: int
) -> None:
    # Given a wire on which connections live for 200 to 40,000 bytes, most of them for few
    dice = random.Random(seed)

    def lifetime() -> int:
        return int(200 * 200 ** dice.random())

    async with Relay(server.port) as relay:
        setattr(relay, "request_bytes" if way == "requests" else "reply_bytes", lifetime)
        # When groups go through all their states over it
        async with await RedisFabric.open(relay.url, client_name="test") as fabric:
            tally = await Life(fabric, RUN).play(24)
        cut_count = relay.cut_count

    # Then each was used once, though the wire broke again and again
    tally.check()
    assert tally.again == 0
    assert cut_count >= 10
    await check_books(server, 24)


@pytest.mark.parametrize("way", ["request_delay_s", "reply_delay_s"])
async def test_a_slow_wire_loses_and_doubles_nothing(server: RedisServer, way: str) -> None:
    async with Relay(server.port) as relay:
        setattr(relay, way, 0.03)
        async with await RedisFabric.open(relay.url, client_name="test") as fabric:
            tally = await Life(fabric, RUN).play(8)

    tally.check()
    assert tally.again == 0
    await check_books(server, 8)


async def test_a_wire_that_stops_for_longer_than_a_claim_lasts_loses_and_doubles_nothing(server: RedisServer) -> None:
    async with Relay(server.port) as relay, await RedisFabric.open(relay.url, client_name="test") as fabric:
        playing = asyncio.create_task(Life(fabric, RUN).play(60))
        await asyncio.sleep(0.3)
        relay.reply_delay_s = 3.0
        await asyncio.sleep(0.1)
        relay.reply_delay_s = 0.0
        tally = await playing

    tally.check()
    assert tally.again == 0
    await check_books(server, 60)


@pytest.mark.parametrize("policy", ["everysec", "always"])
async def test_a_broker_killed_twice_under_load_loses_and_doubles_nothing(server: RedisServer, policy: str) -> None:
    server.kill()
    server.configure(f"appendfsync {policy}")
    server.start()
    async with await RedisFabric.open(server.url, client_name="test") as fabric:
        playing = asyncio.create_task(Life(fabric, RUN).play(150))
        for _ in range(2):
            await asyncio.sleep(0.4)
            server.kill()
            await asyncio.to_thread(server.start)
        tally = await playing

    tally.check()
    assert tally.again == 0
    await check_books(server, 150)


async def test_a_tail_cut_off_the_append_only_file_costs_only_what_was_not_synced(tmp_path: Path) -> None:
    # Given groups that were pushed and synced, and then some more
    with redis_server(tmp_path, "appendonly yes", "appendfsync everysec") as server:
        async with await RedisFabric.open(server.url, client_name="test", durability="disk") as fabric:
            await fabric.board.create_run(RUN)
            await fabric.rollouts(RUN).push([group_of(f"synced{index}") for index in range(10)])
        log = next((tmp_path / "appendonlydir").glob("*.incr.aof"))
        synced_bytes = log.stat().st_size
        async with await RedisFabric.open(server.url, client_name="test") as fabric:
            await fabric.rollouts(RUN).push([group_of(f"late{index}") for index in range(10)])
        await until(lambda: log.stat().st_size > synced_bytes)  # a disk that is busy syncing gets it seconds later

        # When the machine loses power: of what came after the sync, a part is on disk, torn in the middle
        server.kill()
        whole = log.read_bytes()
        assert len(whole) > synced_bytes
        log.write_bytes(whole[: synced_bytes + (len(whole) - synced_bytes) // 2])
        server.start()

        # Then the broker starts, all that was synced is there, and pushing all of it again makes it whole
        async with await RedisFabric.open(server.url, client_name="test") as fabric:
            rollouts = fabric.rollouts(RUN)
            assert await rollouts.push([group_of(f"synced{index}") for index in range(10)]) == [False] * 10
            taken = await rollouts.push([group_of(f"late{index}") for index in range(10)])
            assert any(taken) and not all(taken)
            assert (await fabric.board.run_status(RUN.run_id)).depth == 20 * GROUP_SIZE


async def test_a_broker_without_persistence_forgets_the_run_and_says_so(tmp_path: Path) -> None:
    # Given a run with groups on a broker that keeps nothing
    with redis_server(tmp_path) as server:
        async with await RedisFabric.open(server.url, client_name="test") as fabric:
            await fabric.board.create_run(RUN)
            rollouts = fabric.rollouts(RUN)
            await rollouts.push([group_of("g1")])

            # When it is killed and started again
            server.kill()
            server.start()

            # Then everyone who comes back is told, and creating the run and pushing again is a new beginning
            with pytest.raises(RunUnknown):
                await rollouts.push([group_of("g1")])
            with pytest.raises(BrokerError) as caught:
                await rollouts.receive("trainer", 1, 0.1)
            assert caught.value.facts["reason"] == "forgotten"
            with pytest.raises(BrokerError) as caught:
                await fabric.trajectories(RUN).claim("agent", 1)
            assert caught.value.facts["reason"] == "forgotten"
            await fabric.board.create_run(RUN)
            with pytest.raises(
                RunUnknown, match="was lost by its broker, with all that it had, and made again: open it"
            ):
                await rollouts.push([group_of("g1")])
            assert await fabric.rollouts(RUN).push([group_of("g1")]) == [True]


async def check_books(server: RedisServer, group_count: int) -> None:
    """The broker counted every group and every turn once, and keeps nothing of them."""
    async with await RedisFabric.open(server.url, client_name="test") as fabric:
        status = await fabric.board.run_status(RUN.run_id)
    assert status.depth == 0
    assert status.counters["groups_submitted"] == status.counters["groups_consumed"] == group_count
    assert status.counters["turns_settled"] == group_count * GROUP_SIZE * TURN_COUNT
    assert status.memory_bytes == 0
