"""What people are shown of trajectories: under way, waiting for a trainer, and kept of the past."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.agreement import TokenDifferences, mark_of
from rollfab.fabric.contract.errors import BrokerError, InputError
from rollfab.fabric.contract.records import Rollout, Span, TokenLog
from rollfab.fabric.inspect.trace import TrajectoryView, row_of, view_of
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.ports.queue import TurnProgress, TurnSettle
from rollfab.fabric.queue import reading
from rollfab.fabric.queue.keys import RunShards
from rollfab.fabric.rules.queue import keeping
from tests.contracts.conftest import World
from tests.contracts.test_groups import claim_turns, push, settle
from tests.contracts.test_queue import letter_of, result_of, turn_of


async def view(world: World, name: str) -> TrajectoryView:
    return view_of("r1", await world.reading.find(name), CharTokenizer(), None)


async def consume(world: World, group_id: str, size: int = 1) -> None:
    await push(world, group_id, size)
    for claim in await world.trajectories.claim("a1", size):
        assert await settle(world, claim)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert await world.rollouts.acknowledge(delivery)


async def kept_groups(world: World) -> list[str]:
    groups, _ = await world.reading.groups("finished", 100, "")
    return [group.group_id for group in groups]


async def test_a_trajectory_is_shown_wherever_it_is(world: World) -> None:
    # Given a group that nobody has begun
    await push(world, size=2)
    assert (await view(world, "g1.0")).state == "queued"
    assert await world.reading.begun(0, 10) == []
    # When an agent has it, it is at its environment
    (claim,) = await world.trajectories.claim("a1", 1)
    name = claim.job.trajectory_id
    (row,) = await world.reading.begun(0, 10)
    assert (row.trajectory_id, row.state, row.worker_id) == (name, "claimed", "a1")
    shown = await view(world, name)
    assert (shown.state, shown.place) == ("running", "the environment's reset, on agent a1")
    assert shown.task == {"map": "4x4"}
    assert shown.seed == 7
    # When it asks for a turn, the turn waits, and then a worker has it
    await world.turns.push("a1", [turn_of(claim)])
    assert (await view(world, name)).place == "turn 0 waits for a worker"
    (turn,) = (await claim_turns(world, "w1")).claims
    log = TokenLog(
        spans=(Span(0, 2, "w1", 3),), completion_ids=np.array([40, 41], np.int32), logprobs=np.zeros(2, np.float32)
    )
    await world.turns.exchange("w1", progress=[TurnProgress(claim=turn, log=log)], lease_epoch=1)
    shown = await view(world, name)
    assert (shown.place, shown.worker_id, shown.turn_count) == ("turn 0 on worker w1", "w1", 1)
    assert [(piece.kind, piece.is_running) for piece in shown.pieces] == [("context", False), ("turn", True)]
    assert "".join(shown.pieces[1].tokens) == CharTokenizer().decode([40, 41])
    # When the turn is settled, the trajectory and then its group, it waits for the trainer
    await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of(turn.job.turn_id))])
    shown = await view(world, name)
    assert shown.place == "the environment, on agent a1"
    assert [(piece.kind, piece.turn) for piece in shown.pieces] == [("turn", 0)]
    assert await settle(world, claim)
    assert (await view(world, name)).place == "its group waits for others"
    (other,) = await world.trajectories.claim("a1", 1)
    assert await settle(world, other)
    shown = await view(world, name)
    assert (shown.state, shown.place, shown.reward) == ("completed", "its group waits for the trainer", 1.0)
    counts = await world.reading.counts()
    assert (counts.begun, counts.waiting, counts.finished) == (0, 1, 0)
    # And when it is consumed, it is kept
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert await world.rollouts.acknowledge(delivery)
    shown = await view(world, name)
    assert (shown.state, shown.reward, shown.worker_ids) == ("finished", 1.0, ["w1"])
    assert shown.ended_ms
    assert shown.sibling_ids == ["g1.0", "g1.1"]
    counts = await world.reading.counts()
    assert (counts.begun, counts.waiting, counts.finished) == (0, 0, 1)
    assert await world.reading.find("g1.2") is None
    assert await world.reading.find("nobody") is None


def differences_of(rollout: Rollout, value: float, **changes: Any) -> TokenDifferences:
    """A comparison in which every token differs by a value."""
    found = TokenDifferences(
        trajectory_id=rollout.trajectory_id,
        policy_version=5,
        mark=mark_of(rollout.completion_ids),
        differences=np.full(len(rollout.completion_ids), value, np.float32),
    )
    return dataclasses.replace(found, **changes)


async def test_how_far_a_trainer_s_log_probabilities_differ_is_shown_as_long_as_its_group_is(world: World) -> None:
    await push(world, "g1", 2)
    for claim in await world.trajectories.claim("a1", 2):
        assert await settle(world, claim)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    one, two = delivery.group.rollouts
    # Given a comparison, and a later one of one trajectory, and of a group that is not there
    held = await _bytes_held(world)
    assert await world.rollouts.keep_differences([differences_of(one, 0.5), differences_of(two, 0.25)]) == 2
    later = differences_of(one, -0.5)
    assert await world.rollouts.keep_differences([later, differences_of(one, 1.0, trajectory_id="g7.0")]) == 1
    assert await world.rollouts.keep_differences([]) == 0
    # Then the newest of each is shown, in all that the policy made, and counted with the group
    shown = await view(world, one.trajectory_id)
    assert shown.compared_version == 5
    for piece in shown.pieces:
        assert piece.differences == (None if piece.logprobs is None else [-0.5] * len(piece.ids))
    assert (await view(world, two.trajectory_id)).pieces[-1].differences == [0.25] * len(two.completion_ids)
    assert await _bytes_held(world) - held == len(later.encode()) + len(differences_of(two, 0.25).encode())
    # Also when the group is kept of the past; with it, nothing is left to count
    assert await world.rollouts.acknowledge(delivery)
    assert (await view(world, one.trajectory_id)).compared_version == 5
    assert await _bytes_held(world) == 0
    assert await world.rollouts.keep_differences([later]) == 0


async def test_differences_of_other_tokens_than_are_there_are_not_shown(world: World) -> None:
    await push(world, "g1", 1)
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await settle(world, claim)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    (one,) = delivery.group.rollouts
    for changes in ({"mark": 1}, {"differences": np.zeros(1, np.float32)}):
        assert await world.rollouts.keep_differences([differences_of(one, 0.5, **changes)]) == 1
        shown = await view(world, one.trajectory_id)
        assert (shown.compared_version, {piece.differences for piece in shown.pieces}) == (None, {None})


async def test_the_oldest_come_first_page_by_page_and_what_has_ended_is_not_among_them(world: World) -> None:
    names = []
    for index in range(7):
        await push(world, f"g{index}", 1)
        (claim,) = await world.trajectories.claim("a1", 1)
        names.append(claim)
        await world.set_clock_ahead(0.1)
    assert await settle(world, names.pop(2))
    given_up = names.pop(0)
    assert await world.trajectories.fail(given_up.job.trajectory_id, given_up.fence, letter_of(given_up), is_final=True)
    wanted = [claim.job.trajectory_id for claim in names]
    pages = [await world.reading.begun(first, 2) for first in (0, 2, 4)]
    assert [row.trajectory_id for page in pages for row in page] == wanted
    ages = [row.now_ms - row.begun_ms for page in pages for row in page]
    assert ages == sorted(ages, reverse=True)
    # Given up, one attempt was not the last: it is begun still; released, too
    await world.trajectories.release("a1", names[:1])
    assert [row.trajectory_id for row in await world.reading.begun(0, 9)] == wanted
    groups, at = await world.reading.groups("open", 3, "")
    assert [group.group_id for group in groups] == [name.partition(".")[0] for name in wanted[:3]]
    groups, at = await world.reading.groups("open", 3, at)
    assert [group.group_id for group in groups] == [name.partition(".")[0] for name in wanted[3:]]
    assert at == ""


async def test_what_was_given_up_and_what_was_cancelled_say_so(world: World) -> None:
    await push(world, size=3, quorum=1)
    first, second, third = await world.trajectories.claim("a1", 3)
    for attempt_fence in (first.fence,):
        await world.trajectories.fail(first.job.trajectory_id, attempt_fence, letter_of(first), is_final=True)
    shown = await view(world, first.job.trajectory_id)
    assert (shown.state, shown.reason) == ("failed", "it raised")
    assert await settle(world, second)
    shown = await view(world, third.job.trajectory_id)
    assert shown.state == "gone"
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert await world.rollouts.acknowledge(delivery)
    rows = {name: (await view(world, name)).state for name in ("g1.0", "g1.1", "g1.2")}
    assert rows == {"g1.0": "failed", "g1.1": "finished", "g1.2": "gone"}


async def test_consumed_groups_are_kept_within_their_bytes_the_newest_first_by_pages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await consume(world, "g0")
    (size,) = [group["bytes"] for group in await _kept_rows(world)]
    shards = world.run.shard_count
    world = world.view(dataclasses.replace(world.run, kept_bytes_max=size * 6 * shards + 3))
    for index in range(1, 40):
        await consume(world, f"g{index}")
    names = await kept_groups(world)
    assert names[0] == "g39"
    assert 3 <= len(names) <= 6 * shards
    rows = await _kept_rows(world)
    assert sorted(row["group"] for row in rows) == sorted(names)
    paged: list[str] = []
    at = ""
    while not paged or at:
        groups, at = await world.reading.groups("finished", 2, at)
        paged += [group.group_id for group in groups]
    assert paged == names
    gone = {f"g{index}" for index in range(40)} - set(names)
    assert all([await world.reading.find(f"{name}.0") is None for name in gone])
    for name in gone:
        for keys in RunShards("r1", shards).all:
            assert await world.do("EXISTS", keys.of_group(name).kept_row, keys.of_group(name).kept_rollouts) in (0, 0)
    with pytest.raises(InputError, match="no cursor"):
        await world.reading.groups("finished", 2, "what?")


async def test_nothing_is_kept_where_nothing_is_wanted_or_a_group_is_larger_than_all(world: World) -> None:
    for bytes_max in (0, 10 * world.run.shard_count):
        world = world.view(dataclasses.replace(world.run, kept_bytes_max=bytes_max))
        await consume(world, f"g{bytes_max}")
        assert await kept_groups(world) == []


async def test_a_run_that_is_told_to_keep_nothing_forgets_what_it_kept(world: World) -> None:
    for index in range(6):
        await consume(world, f"g{index}")
    assert len(await kept_groups(world)) == 6
    world = world.view(dataclasses.replace(world.run, kept_bytes_max=0))
    for index in range(6, 20):  # each shard has one
        await consume(world, f"g{index}")
    assert await kept_groups(world) == []
    for keys in RunShards("r1", world.run.shard_count).all:
        assert int(await world.do("HGET", keys.run, "kept_bytes") or 0) == 0


async def test_a_group_is_acknowledged_though_what_is_kept_cannot_be_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise BrokerError("the broker is away")

    world = world.view(dataclasses.replace(world.run, kept_bytes_max=0))
    monkeypatch.setattr(world.rollouts, "_drop_kept", fail)
    for keys in RunShards("r1", world.run.shard_count).all:
        await world.do("HSET", keys.run, "kept_bytes", 9)
    await consume(world, "g1")
    for keys in RunShards("r1", world.run.shard_count).all:
        await world.do("HSET", keys.run, "kept_bytes", 0)


async def test_of_a_large_group_that_waits_no_more_is_read_than_one_trajectory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_BYTES_MAX", 10)
    await push(world, size=2)
    for claim in await world.trajectories.claim("a1", 2):
        assert await settle(world, claim)
    ((group,), _) = await world.reading.groups("waiting", 10, "")
    assert group.rollouts == {}
    assert [row_of(group, f"g1.{index}").state for index in range(2)] == ["completed"] * 2
    found = await world.reading.find("g1.1")
    assert list(found.group.rollouts) == ["g1.1"]
    assert (await view(world, "g1.1")).reward == 1.0


async def test_a_sum_that_somebody_wrote_over_is_mended(world: World) -> None:
    for keys in RunShards("r1", world.run.shard_count).all:
        await world.do("HSET", keys.run, "kept_bytes", 1 << 50)
    await consume(world, "g1")
    assert await kept_groups(world) == ["g1"]
    (row,) = await _kept_rows(world)
    keys = RunShards("r1", world.run.shard_count).of("g1.0")
    assert int(await world.do("HGET", keys.run, "kept_bytes")) == row["bytes"]
    assert keeping.KEPT_COUNT_MAX > 1
    for other in RunShards("r1", world.run.shard_count).all:  # as it was, for the check of what holds
        if other is not keys and other.base != keys.base:
            await world.do("HDEL", other.run, "kept_bytes")


async def _bytes_held(world: World) -> int:
    """Bytes of open and waiting groups, as the run counts them."""
    keys = RunShards("r1", world.run.shard_count).all
    return sum([int(await world.do("HGET", each.run, "bytes") or 0) for each in keys])


async def _kept_rows(world: World) -> list[dict[str, Any]]:
    found = []
    for keys in RunShards("r1", world.run.shard_count).all:
        for row in await world.do("XRANGE", keys.kept, "-", "+"):
            fields = row[1]
            pairs = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            found.append({"group": pairs[b"group"].decode(), "bytes": int(pairs[b"bytes"])})
    return found
