"""How a group ends: with its last trajectory, its quorum, its deadline, or its cancellation."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from rollfab.fabric.contract.errors import ClaimLost, InputError, QueueFull, RunUnknown, VersionConflict
from rollfab.fabric.contract.ids import shard_of
from rollfab.fabric.contract.records import DeadLetter, Failure, Span, TokenLog
from rollfab.fabric.ports.queue import Delivery, Exchange, GroupPush, TrajectoryClaim, TurnProgress
from rollfab.fabric.queue.keys import RunShards
from rollfab.fabric.rules.queue.retries import ever
from tests.contracts.conftest import World
from tests.contracts.test_queue import expire, group_of_size, held_one, lease, letter_of, rollout_of, turn_of


async def test_the_run_s_settings_of_now_say_what_is_too_stale(world: World) -> None:
    # Given a complete group of version 3, and a run whose staleness somebody lowers after this client has opened it
    await push(world, size=1)
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await settle(world, claim, version=3)
    await world.board.create_run(dataclasses.replace(world.run, staleness=0, when_stale="rerun"))
    await world.set_head(4)
    assert not await world.rollouts.receive("t", 1, 0.01)

    # When it is raised, or what is stale is to be kept
    (claim,) = await world.trajectories.claim("a1", 1)
    await world.board.create_run(dataclasses.replace(world.run, staleness=0, when_stale="keep"))
    assert await settle(world, claim, version=3)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert delivery.group.rollouts[0].policy_version == 3


async def test_what_an_interrupted_receive_was_given_comes_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a consumer that looked back a moment ago, and is interrupted once the broker has handed a group over
    assert not await world.rollouts.receive("t", 1, 0.01)
    await push(world, size=1)
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await settle(world, claim)
    stream = cast("Any", world.rollouts)
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_deliveries", interrupted)
        with pytest.raises(asyncio.CancelledError):
            await stream.receive("t", 1, 1.0)

    # Then the next call has it
    (delivery,) = await world.rollouts.receive("t", 1, 0.01)
    assert delivery.group.redelivered


async def interrupted(*_: object, **__: object) -> None:
    raise asyncio.CancelledError


def neighbours(world: World, count: int) -> list[str]:
    """Names of groups that are on one shard."""
    names = (f"g{index}" for index in range(100))
    return [name for name in names if shard_of(name, world.run.shard_count) == 0][:count]


async def push(world: World, group_id: str = "g1", size: int = 3, **wishes: Any) -> None:
    assert await world.rollouts.push([dataclasses.replace(group_of_size(group_id, size), **wishes)]) == [True]


async def settle(world: World, claim: TrajectoryClaim, *, version: int = 3) -> bool:
    rollout = dataclasses.replace(rollout_of(claim), spans=(Span(0, 2, "w1", version),))
    return bool(await world.trajectories.settle(claim, rollout, is_scored=True))


async def pass_time(world: World, duration_s: int) -> int:
    """Time passes, by steps of a second: the broker's clock takes no longer ones. Returns how many groups it closed."""
    closed = 0
    for _ in range(duration_s):
        await world.set_clock_ahead(1.0)
        closed += await world.rollouts.reap()
    return closed


async def complete_too_stale(world: World) -> TrajectoryClaim:
    """Complete a group of two, and have one of them fall behind; returns the claim that one had."""
    old, fresh = await world.trajectories.claim("a1", 2)
    assert await settle(world, old, version=3)
    assert await settle(world, fresh, version=4)
    await world.set_head(5)
    return old


async def claim_turns(world: World, worker_id: str, *, want: int = 1) -> Exchange:
    await lease(world, worker_id)
    return cast("Exchange", await world.turns.exchange(worker_id, want=want, lease_epoch=1, active_version=99))


@pytest.mark.parametrize("count", [1, 4])
async def test_no_more_groups_come_than_are_asked_for_whatever_shards_they_are_on(world: World, count: int) -> None:
    """A read of several streams gives so many of each."""
    names = [f"g{index}" for index in range(12)]
    for name in names:
        await push(world, name, size=1)
    for claim in await world.trajectories.claim("a1", 12):
        assert await settle(world, claim)

    found: list[str] = []
    while deliveries := await world.rollouts.receive("t", count, 0.01):
        assert len(deliveries) <= count
        assert not any(each.group.redelivered for each in deliveries)
        found += [each.group.group_id for each in deliveries]
    assert sorted(found) == sorted(names)


async def test_the_first_finishers_win_and_the_rest_are_cancelled(world: World) -> None:
    # Given a group of three that two complete, all running, the third in the middle of a turn
    await push(world, size=3, quorum=2)
    first, second, third = await world.trajectories.claim("a1", 3)
    await world.turns.push("a1", [turn_of(third)])
    (turn,) = (await claim_turns(world, "w1")).claims

    # When two end
    assert await settle(world, first)
    assert not await world.rollouts.receive("t", 1, 0.01)
    assert await settle(world, second)

    # Then the group is complete without the third, whose holders learn that it is gone
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    group = delivery.group
    assert {each.trajectory_id for each in group.rollouts} == {first.job.trajectory_id, second.job.trajectory_id}
    assert group.cancelled == (third.job.trajectory_id,)
    assert not group.failures
    assert group.ended_by == "quorum"
    assert await world.trajectories.renew("a1", [third]) == [third.job.trajectory_id]
    kept = await world.turns.exchange("w1", progress=[TurnProgress(claim=turn)])
    assert kept.lost == [turn.job.turn_id]
    assert not await settle(world, third)

    # And nothing is left of it once the trainer is done
    assert await world.rollouts.acknowledge(delivery)
    status = await world.board.run_status("r1")
    assert (status.depth, status.memory_bytes) == (0, 0)
    assert status.counters["trajectories_cancelled"] == 1
    assert not any(status.turns.values())


async def test_failures_do_not_hold_up_a_quorum_that_can_not_be_reached(world: World) -> None:
    # Given a group of two with a quorum of two
    await push(world, size=2, quorum=2)
    good, bad = await world.trajectories.claim("a1", 2)

    # When one ends and the other fails for good
    await settle(world, good)
    assert await world.trajectories.fail(bad.job.trajectory_id, bad.fence, letter_of(bad), is_final=True) == "dead"

    # Then the group comes with what there is
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert delivery.group.failures == (Failure(bad.job.trajectory_id, "it raised"),)
    assert delivery.group.ended_by == "all"


async def test_a_failure_has_a_reason_though_its_dead_letter_is_gone(world: World) -> None:
    claim = await held_one(world)
    name = claim.job.trajectory_id
    assert await world.trajectories.fail(name, claim.fence, letter_of(claim), is_final=True) == "dead"
    assert await world.rollouts.discard([name, "x.0"]) == {name: "done", "x.0": "unknown"}
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert delivery.group.failures == (Failure(name, "its dead letter was retried or discarded since"),)


async def test_a_group_is_complete_at_its_deadline_with_what_it_has(world: World) -> None:
    # Given a group with a deadline, one of its three trajectories ended, one running, one waiting
    await push(world, size=3, deadline_s=0.2)
    (first, _) = await world.trajectories.claim("a1", 2)
    await settle(world, first)
    assert await world.rollouts.reap() == 0

    # When the deadline has passed
    await expire(world)

    # Then it comes with one rollout, and what waited is never claimed
    assert await world.rollouts.reap() == 1
    assert await world.rollouts.reap() == 0
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert [each.trajectory_id for each in delivery.group.rollouts] == [first.job.trajectory_id]
    assert len(delivery.group.cancelled) == 2
    assert delivery.group.ended_by == "deadline"
    assert not await world.trajectories.claim("a2", 3)


async def test_a_group_that_was_complete_before_its_deadline_is_left_alone(world: World) -> None:
    await push(world, size=1, deadline_s=0.1)
    (claim,) = await world.trajectories.claim("a1", 1)
    await settle(world, claim)
    await expire(world)
    assert await world.rollouts.reap() == 0
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert delivery.group.ended_by == "all"


async def test_urgent_groups_are_served_first(world: World) -> None:
    last, normal, first = neighbours(world, 3)
    for name, priority in ((last, 2), (normal, 1), (first, 0)):
        await push(world, name, size=1, priority=priority)
    order = [(await world.trajectories.claim("a1", 1))[0].job.group_id for _ in range(3)]
    assert order == [first, normal, last]


async def test_what_was_begun_goes_before_what_was_not(world: World) -> None:
    # Given one trajectory that was begun and given back, and another that came before it to the queue's end
    begun, other = neighbours(world, 2)
    await push(world, begun, size=1)
    (claim,) = await world.trajectories.claim("a1", 1)
    await push(world, other, size=1)
    await world.trajectories.release("a1", [claim])

    # Then the one that was begun comes first
    (again,) = await world.trajectories.claim("a2", 1)
    assert again.job.group_id == begun


async def test_a_nearly_complete_group_goes_first(world: World) -> None:
    # Given two groups of four, three of the second have ended
    other, nearly = neighbours(world, 2)
    await push(world, other, size=4)
    await push(world, nearly, size=4)
    claims = await world.trajectories.claim("a1", 8)
    for claim in [each for each in claims if each.job.group_id == nearly][:3]:
        await settle(world, claim)
    waiting = [each for each in claims if each.job.group_id == other]
    (straggler,) = [each for each in claims if each.job.group_id == nearly][3:]

    # When each asks for a turn, the straggler last
    await world.turns.push("a1", [turn_of(each) for each in [*waiting, straggler]])

    # Then the straggler's is served first
    (turn,) = (await claim_turns(world, "w1", want=1)).claims
    assert turn.job.turn_id.startswith(straggler.job.trajectory_id)


async def test_a_rollout_that_ends_too_stale_runs_again(world: World) -> None:
    # Given a running trajectory, whose tokens are of version 3, while the head goes on to 5 (staleness is 1)
    claim = await held_one(world)
    await world.set_head(5)

    # When it ends
    assert not await settle(world, claim, version=3)

    # Then it runs again from the start, and that is no failed attempt
    (again,) = await world.trajectories.claim("a1", 1)
    assert again.fence > claim.fence
    assert (again.attempt, again.turns) == (0, ())
    assert (await world.board.run_status("r1")).counters["reruns"] == 1
    assert await settle(world, again, version=4)


async def test_a_rollout_that_is_too_stale_when_delivered_runs_again(world: World) -> None:
    # Given a complete group of two, one made at version 3, one at version 4, while the head goes on to 5
    await push(world, size=2)
    old, fresh = await world.trajectories.claim("a1", 2)
    assert await settle(world, old, version=3)
    assert await settle(world, fresh, version=4)
    await world.set_head(5)

    # When the trainer asks
    assert not await world.rollouts.receive("t", 1, 0.01)
    taken_back = (await world.board.run_status("r1")).counters
    assert (taken_back["groups_completed"], taken_back["trajectories_completed"]) == (0, 1)
    assert (ever(taken_back, "groups_completed"), ever(taken_back, "trajectories_completed")) == (1, 2)

    # Then only the old one runs again, and the group comes when it has ended
    (again,) = await world.trajectories.claim("a1", 2)
    assert again.job.trajectory_id == old.job.trajectory_id
    assert await settle(world, again, version=5)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert len(delivery.group.rollouts) == 2
    assert await world.rollouts.acknowledge(delivery)
    status = await world.board.run_status("r1")
    assert (status.depth, status.memory_bytes, status.counters["groups_completed"]) == (0, 0, 1)


async def test_a_rollout_that_is_always_too_stale_is_given_up_in_the_end(world: World) -> None:
    await push(world, size=1)
    await world.set_head(9)
    for _ in range(20):
        (claim,) = await world.trajectories.claim("a1", 1)
        assert not await settle(world, claim, version=3)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert len(delivery.group.failures) == 1
    (letter,) = await world.rollouts.dead_letters(10)
    assert "stale" in letter.reason


async def test_a_group_that_is_run_again_keeps_its_deadline(world: World) -> None:
    # Given a group with a deadline that was complete, and is open again because a rollout was too stale
    await push(world, size=2, deadline_s=60.0)
    old = await complete_too_stale(world)
    assert not await world.rollouts.receive("t", 1, 0.01)
    assert await world.rollouts.reap() == 0

    # When the deadline passes while nobody has run that one again
    assert await pass_time(world, 61) == 1

    # Then the group comes with what it has
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert len(delivery.group.rollouts) == 1
    assert delivery.group.cancelled == (old.job.trajectory_id,)
    assert delivery.group.ended_by == "deadline"
    assert not await world.trajectories.claim("a2", 1)
    assert await world.rollouts.acknowledge(delivery)
    status = await world.board.run_status("r1")
    assert (status.depth, status.memory_bytes, status.counters["groups_completed"]) == (0, 0, 1)


async def test_a_deadline_that_passed_before_a_group_is_run_again_holds_at_once(world: World) -> None:
    # Given a complete group whose deadline passes before the trainer asks for it
    await push(world, size=2, deadline_s=20.0)
    old = await complete_too_stale(world)
    assert await pass_time(world, 21) == 0

    # When it is taken back
    assert not await world.rollouts.receive("t", 1, 0.01)

    # Then the next look closes it with what it has
    assert await world.rollouts.reap() == 1
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert len(delivery.group.rollouts) == 1
    assert delivery.group.cancelled == (old.job.trajectory_id,)
    assert delivery.group.ended_by == "deadline"


async def test_a_group_that_is_given_up_as_too_stale_is_not_closed_again_at_its_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollfab.fabric.queue.rollouts.RERUN_COUNT_MAX", 1)
    # Given a complete group with a deadline, a rollout of which is too stale and may not run again
    await push(world, size=2, deadline_s=20.0)
    old = await complete_too_stale(world)

    # When the trainer asks, Then it is complete without that one, and its deadline means nothing any more
    assert not await world.rollouts.receive("t", 1, 0.01)
    assert await pass_time(world, 21) == 0
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    (failure,) = delivery.group.failures
    assert failure.trajectory_id == old.job.trajectory_id
    assert failure.reason.startswith("stale")
    assert delivery.group.ended_by == "all"


async def complete(world: World, *names: str, version: int = 3) -> None:
    for name in names:
        await push(world, name, size=1)
    for claim in await world.trajectories.claim("a1", len(names)):
        assert await settle(world, claim, version=version)


def at(world: World, how: str) -> tuple[Any, str]:
    """Who receives next, and under which name."""
    return (world.rollouts, "t") if how == "put back" else (world.again, "t" if how == "restarted" else "other")


@pytest.mark.parametrize("how", ["put back", "restarted", "taken over"])
async def test_a_group_that_is_too_stale_when_it_comes_again_runs_again(world: World, how: str) -> None:
    # Given a group that was delivered while it was fresh, and not acknowledged
    await complete(world, "g1")
    await world.rollouts.beat("t", 2.0)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    world.rollouts.put_back(delivery)

    # When it would come again after the head went on, wherever
    await world.set_head(5)
    await pass_time(world, 3)
    stream, name = at(world, how)
    await stream.beat(name, 60.0)
    assert not await stream.receive(name, 1, 0.01)

    # Then it runs again, and comes with fresh tokens, marked, for somebody may have used it
    (claim,) = await world.trajectories.claim("a2", 1)
    assert await settle(world, claim, version=5)
    (again,) = await stream.receive(name, 1, 1.0)
    assert again.group.redelivered
    assert [each.policy_version for each in again.group.rollouts] == [5]
    assert await stream.acknowledge(again)
    status = await world.board.run_status("r1")
    assert (status.depth, status.memory_bytes, status.counters["groups_consumed"]) == (0, 0, 1)


async def test_a_group_in_hand_is_not_run_again_there(world: World) -> None:
    await complete(world, "g1")
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    await world.set_head(9)
    await world.rollouts.beat("t", 60.0)
    assert not await world.rollouts.receive("t", 1, 0.01)
    assert not await world.trajectories.claim("a2", 1)
    assert await world.rollouts.acknowledge(delivery)


async def dropped(world: World, **wishes: Any) -> Delivery:
    """A group of three, pushed with wishes, that is complete and in the hands of "t"."""
    await push(world, "g1", **wishes)
    for claim in (await world.trajectories.claim("a1", 3))[: wishes.get("quorum", 3)]:
        assert await settle(world, claim)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    return delivery


def next_one(world: World, size: int = 3, **wishes: Any) -> GroupPush:
    """What takes the place of group g1: of its shard."""
    shard_count = world.run.shard_count
    names = (f"next{index}" for index in range(100))
    name = next(each for each in names if shard_of(each, shard_count) == shard_of("g1", shard_count))
    return dataclasses.replace(group_of_size(name, size), **wishes)


async def test_a_group_is_swapped_for_another_that_has_its_place_and_its_wishes(world: World) -> None:
    # Given a run that is full, with a complete group of two out of three, urgent, with a deadline
    run = dataclasses.replace(world.run, trajectory_count_max=3 * world.run.shard_count)
    await world.board.create_run(run)
    delivery = await dropped(world, quorum=2, priority=0, deadline_s=30.0)

    # When it is swapped, as by a caller that says nothing of those
    push_next = next_one(world)
    assert await world.rollouts.swap(delivery, push_next)

    # Then it is gone, and the other one runs, with a deadline of as long
    status = await world.board.run_status("r1")
    assert (status.depth, status.counters["groups_consumed"], status.counters["groups_submitted"]) == (3, 1, 2)
    assert not await world.rollouts.receive("t", 1, 0.01)
    claims = await world.trajectories.claim("a1", 9)
    assert {claim.job.group_id for claim in claims} == {push_next.group_id}
    assert await pass_time(world, 25) == 0
    await world.trajectories.renew("a1", claims)
    for claim in claims[:2]:
        assert await settle(world, claim)
    (found,) = await world.rollouts.receive("t", 1, 1.0)
    assert (found.group.group_id, found.group.ended_by, len(found.group.rollouts)) == (push_next.group_id, "quorum", 2)


async def test_a_swapped_groups_deadline_begins_again(world: World) -> None:
    delivery = await dropped(world, deadline_s=5.0)
    await pass_time(world, 6)
    assert await world.rollouts.swap(delivery, next_one(world))
    assert [await pass_time(world, 4), await pass_time(world, 2)] == [0, 1]


async def test_a_swap_whose_answer_was_lost_is_repeated_without_effect(world: World) -> None:
    delivery = await dropped(world)
    assert await world.rollouts.swap(delivery, next_one(world))
    assert await world.rollouts.swap(delivery, next_one(world))
    assert not await world.rollouts.swap(delivery, next_one(world, task_id="other"))
    assert (await world.board.run_status("r1")).counters["groups_submitted"] == 2
    assert len(await world.trajectories.claim("a1", 9)) == 3


async def test_a_swap_is_repeated_without_effect_though_what_came_in_its_place_was_consumed(world: World) -> None:
    delivery = await dropped(world)
    assert await world.rollouts.swap(delivery, next_one(world))
    for claim in await world.trajectories.claim("a1", 9):
        assert await settle(world, claim)
    (found,) = await world.rollouts.receive("t", 1, 1.0)
    assert await world.rollouts.acknowledge(found)
    assert await world.rollouts.swap(delivery, next_one(world)), "its task ran: another group is not to run it again"
    assert (await world.board.run_status("r1")).counters["groups_submitted"] == 2


async def test_a_group_that_another_task_replaces_already_is_acknowledged(world: World) -> None:
    delivery = await dropped(world)
    await world.rollouts.push([next_one(world, task_id="other")])
    assert not await world.rollouts.swap(delivery, next_one(world))
    status = await world.board.run_status("r1")
    assert (status.depth, status.counters["groups_consumed"]) == (3, 1)


@pytest.mark.parametrize("end", ["acknowledge", "cancel", "take over"])
async def test_a_group_that_ended_otherwise_is_not_replaced(world: World, end: str) -> None:
    delivery = await dropped(world)
    if end == "acknowledge":
        assert await world.rollouts.acknowledge(delivery)
    elif end == "cancel":
        assert await world.rollouts.cancel("g1")
    else:
        await world.rollouts.beat("t", 2.0)
        await pass_time(world, 3)
        assert (await world.again.beat("other", 60.0)).taken_count == 1
    if end == "take over":
        with pytest.raises(ClaimLost, match="another consumer"):
            await world.rollouts.swap(delivery, next_one(world))
    else:
        assert not await world.rollouts.swap(delivery, next_one(world))
    assert (await world.board.run_status("r1")).counters["groups_submitted"] == 1
    assert not await world.trajectories.claim("a1", 9)


@pytest.mark.parametrize("cause", ["dead letters", "too large"])
async def test_a_swap_that_is_refused_leaves_the_group(
    world: World, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = await dropped(world)
    if cause == "dead letters":
        monkeypatch.setattr("rollfab.fabric.queue.rollouts.DEAD_COUNT_MAX", 0)
    else:
        run = dataclasses.replace(world.run, memory_bytes_max=world.run.shard_count)
        await world.board.create_run(run)
    with pytest.raises(QueueFull, match="dead letters" if cause == "dead letters" else "memory_bytes_max"):
        await world.rollouts.swap(delivery, next_one(world))
    assert (await world.board.run_status("r1")).counters["groups_submitted"] == 1
    world.rollouts.put_back(delivery)
    (again,) = await world.rollouts.receive("t", 1, 0.01)
    assert again.group.group_id == "g1"


async def test_groups_of_a_silent_consumer_are_taken_over_and_it_is_told(world: World) -> None:
    # Given a consumer that received five groups, and one that did not
    names = [f"g{index}" for index in range(5)]
    await complete(world, *names)
    await world.rollouts.beat("dead", 2.0)
    held = [delivery for _ in names for delivery in await world.rollouts.receive("dead", 1, 1.0)]
    assert (await world.again.beat("other", 60.0)).taken_count == 0
    assert not await world.again.receive("other", 5, 0.01)

    # When it has been silent for longer than it said
    await pass_time(world, 3)

    # Then another one gets them all, at once, marked, and its acknowledgements count; the first one's do not
    assert (await world.again.beat("other", 60.0)).taken_count == 5
    with pytest.raises(ClaimLost, match="another consumer"):
        await world.rollouts.acknowledge(held[0])
    taken = [delivery for _ in names for delivery in await world.again.receive("other", 1, 0.01)]
    assert sorted(each.group.group_id for each in taken) == names
    assert all(each.group.redelivered for each in taken)
    for delivery in taken:
        assert await world.again.acknowledge(delivery)
    assert not await world.rollouts.acknowledge(held[1])
    assert (await world.rollouts.beat("dead", 60.0)).was_lost
    status = await world.board.run_status("r1")
    assert (status.depth, status.counters["groups_consumed"]) == (0, 5)


async def test_groups_of_a_consumer_that_gives_signs_of_life_stay_its_own(world: World) -> None:
    await complete(world, "g1")
    await world.rollouts.beat("slow", 2.0)
    (delivery,) = await world.rollouts.receive("slow", 1, 1.0)
    for _ in range(5):
        await pass_time(world, 1)
        assert not (await world.rollouts.beat("slow", 2.0)).was_lost
        assert (await world.again.beat("other", 2.0)).taken_count == 0
    assert not await world.again.receive("other", 1, 0.01)
    assert await world.rollouts.acknowledge(delivery)


async def test_a_consumer_that_never_said_how_long_it_lives_is_given_that_time_from_when_it_is_noticed(
    world: World,
) -> None:
    await complete(world, "g1")
    assert await world.rollouts.receive("old", 1, 1.0)
    assert (await world.again.beat("other", 2.0)).taken_count == 0
    await pass_time(world, 3)
    assert (await world.again.beat("other", 2.0)).taken_count == 1


async def test_a_client_follows_its_namesakes_at_once_and_both_learn_of_each_other(world: World) -> None:
    # Given a client that holds groups
    await complete(world, "g1", "g2")
    assert (await world.rollouts.beat("t", 60.0)).namesakes == ()
    held = [delivery for _ in range(2) for delivery in await world.rollouts.receive("t", 1, 1.0)]

    # When another one starts under the same name
    beat = await world.again.beat("t", 60.0)

    # Then it has what they left
    assert (beat.taken_count, beat.namesakes) == (2, ())
    assert len([delivery for _ in held for delivery in await world.again.receive("t", 1, 1.0)]) == 2

    # And if the first one lives after all, both learn of each other, and neither takes more from the other
    first, second = await world.rollouts.beat("t", 60.0), await world.again.beat("t", 60.0)
    assert first.was_lost
    assert not second.was_lost
    assert len(first.namesakes) == len(second.namesakes) == 1
    assert first.namesakes != second.namesakes
    assert (first.taken_count, second.taken_count) == (0, 0)


async def test_a_group_that_was_taken_over_and_taken_back_is_not_acknowledged_by_whoever_lost_it(world: World) -> None:
    # Given a group whose holder is silent, and that another one takes over and finds too stale
    await complete(world, "g1")
    await world.rollouts.beat("dead", 1.0)
    (lost,) = await world.rollouts.receive("dead", 1, 1.0)
    await pass_time(world, 2)
    await world.set_head(5)
    await world.again.beat("other", 60.0)
    assert not await world.again.receive("other", 1, 0.01)

    # When the first one acknowledges it, while it runs and when it is complete again
    with pytest.raises(ClaimLost):
        await world.rollouts.acknowledge(lost)
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await settle(world, claim, version=5)
    with pytest.raises(ClaimLost):
        await world.rollouts.acknowledge(lost)

    # Then it has changed nothing
    (delivery,) = await world.again.receive("other", 1, 1.0)
    assert await world.again.acknowledge(delivery)
    assert (await world.board.run_status("r1")).depth == 0


async def test_a_refused_push_says_which_groups_are_in(world: World) -> None:
    # Given a run with room for some of these groups, the second of which is the largest
    names = neighbours(world, 4)
    sizes = dict(zip(names, (9, 15, 9, 9), strict=True))
    with pytest.raises(QueueFull, match="trajectory_count_max") as caught:
        await world.rollouts.push([group_of_size(name, size) for name, size in sizes.items()])

    # Then what it says is so
    taken = [names[0], names[2]]
    assert caught.value.facts["taken"] == taken
    assert caught.value.facts["refused"] == [names[1], names[3]]
    assert caught.value.facts["doubtful"] == []
    assert caught.value.facts["need"] == 15
    claims = await world.trajectories.claim("a1", 60)
    assert sorted({claim.job.group_id for claim in claims}) == sorted(taken)

    # And repeating it changes nothing of what is in
    with pytest.raises(QueueFull):
        await world.rollouts.push([group_of_size(name, size) for name, size in sizes.items()])
    assert (await world.board.run_status("r1")).depth == 18


async def test_a_name_of_another_task_or_size_is_refused_and_the_same_task_changes_nothing(world: World) -> None:
    one = dataclasses.replace(group_of_size("g1", 2), task={"map": "4x4", "question": "first"})
    two = group_of_size("g2", 2)
    await world.rollouts.push([one])
    other = dataclasses.replace(one, task={**one.task, "question": "another"})

    with pytest.raises(
        InputError, match="'g1' is in run 'r1' already, with another task: give this one a name"
    ) as info:
        await world.rollouts.push([other, two])
    assert (info.value.facts["refused"], info.value.facts["taken"]) == (["g1"], ["g2"])
    for size in (1, 7):
        with pytest.raises(InputError, match="'g1' is in run 'r1' already, with 2 trajectories: give this one a name"):
            await world.rollouts.push([dataclasses.replace(one, jobs=group_of_size("g1", size).jobs)])

    assert await world.rollouts.push([dataclasses.replace(one, task=dict(reversed(one.task.items())))]) == [False]
    assert {each.job.group_id for each in await world.trajectories.claim("a1", 9)} == {"g1", "g2"}
    assert (await world.rollouts.known(["g1", "g2"])) == [True, True]


async def test_a_run_that_keeps_stale_rollouts_delivers_them(world: World) -> None:
    run = dataclasses.replace(world.run, when_stale="keep")
    await world.board.create_run(run)
    claim = await held_one(world)
    await world.set_head(9)
    assert await world.view(run).trajectories.settle(claim, rollout_of(claim), is_scored=True)
    assert await world.view(run).rollouts.receive("t", 1, 1.0)


async def test_a_run_at_its_memory_limit_takes_nothing_in_until_something_is_consumed(world: World) -> None:
    # Given a run whose limit holds about one group
    await push(world, "g1", size=1)
    held = (await world.board.run_status("r1")).memory_bytes
    run = dataclasses.replace(world.run, memory_bytes_max=(held + 10) * world.run.shard_count)
    await world.board.create_run(run)
    view = world.view(run)

    # When it is pushed more
    with pytest.raises(QueueFull, match="memory_bytes_max"):
        await view.rollouts.push([group_of_size(f"more{index}", 4) for index in range(10)])

    # Then nothing of the refused group was written
    depth = (await world.board.run_status("r1")).depth
    claims = await view.trajectories.claim("a1", 20)
    assert len(claims) == depth


async def test_above_the_memory_limit_only_urgent_trajectories_start_while_the_trainer_has_groups_to_take(
    world: World,
) -> None:
    # Given a run above its limit, with a complete group that waits for the trainer
    for name in neighbours(world, 2):
        await push(world, name, size=1)
    (claim,) = await world.trajectories.claim("a1", 1)
    run = dataclasses.replace(world.run, memory_bytes_max=1)
    await world.board.create_run(run)
    view = world.view(run)
    await settle(world, claim)

    # Then nothing new starts, until the trainer has taken the group
    assert not await view.trajectories.claim("a1", 1)
    assert await world.rollouts.receive("t", 1, 1.0)
    assert await view.trajectories.claim("a1", 1)


async def test_a_stalled_turn_goes_on_elsewhere_and_is_given_up_when_it_stalls_everywhere(world: World) -> None:
    await held_one(world, asks=True)
    fences: list[int] = []
    for _ in range(4):
        (turn,) = (await claim_turns(world, "w1")).claims
        fences.append(turn.fence)
        await world.turns.release("w1", [TurnProgress(claim=turn, log=TokenLog())], is_stalled=True)
    (turn,) = (await claim_turns(world, "w1")).claims
    assert turn.loss == 4
    await world.turns.release("w1", [TurnProgress(claim=turn)], is_stalled=True)
    assert not (await claim_turns(world, "w2")).claims
    assert (await world.turns.reap("reaper")).dead_count == 1
    (result,) = await world.turns.results("a1", 1.0)
    assert result.finish_reason == "error"
    assert "stalled" in (result.error or "")
    assert fences == sorted(set(fences))


async def test_fences_of_a_later_attempts_turns_go_on_where_the_last_ones_ended(world: World) -> None:
    # Given a turn of a first attempt
    claim = await held_one(world, asks=True)
    (first,) = (await claim_turns(world, "w1")).claims

    # When the attempt fails and the second asks for the turn of the same name
    assert await world.trajectories.fail(claim.job.trajectory_id, claim.fence, letter_of(claim)) == "retry"
    (claim,) = await world.trajectories.claim("a1", 1)
    await world.turns.push("a1", [turn_of(claim)])
    (second,) = (await claim_turns(world, "w1")).claims

    # Then its fence was never used before
    assert second.job.turn_id == first.job.turn_id
    assert second.fence > first.fence


async def test_a_reward_that_somebody_sees_to_is_not_asked_for_again(world: World) -> None:
    claim = await held_one(world)
    await world.trajectories.settle(claim, rollout_of(claim, reward=None), is_scored=False)
    name = claim.job.trajectory_id
    assert await world.trajectories.keep_scoring([(name, claim.fence), ("g9.0", 1)], 60.0) == ["g9.0"]
    await expire(world)
    assert not (await world.trajectories.reap("a2")).scoring
    await world.trajectories.keep_scoring([(name, claim.fence)], 0.0)
    assert (await world.trajectories.reap("a2")).scoring == ((name, claim.fence),)


async def test_another_worker_with_the_same_fence_settles_nothing(world: World) -> None:
    """As after a fail-over that lost the last writes: a fence may then be given out twice."""
    claim = await held_one(world)
    twin = dataclasses.replace(claim, worker_id="a2")
    assert not await settle(world, twin)
    assert await settle(world, claim)


async def test_a_cancelled_group_does_not_come_back_when_it_is_pushed_again(world: World) -> None:
    await push(world, size=1)
    assert await world.rollouts.cancel("g1")
    assert await world.rollouts.push([group_of_size("g1", 1)]) == [False]
    assert not await world.trajectories.claim("a1", 1)


async def test_what_was_cancelled_is_not_counted_as_waiting(world: World) -> None:
    # Given three groups, one trajectory of which asks for a turn
    await held_one(world, asks=True)
    await world.rollouts.push([group_of_size("g2", 2), group_of_size("g3", 3)])
    status = await world.board.run_status("r1")
    assert (status.trajectories["queued"], status.turns["ready"]) == (5, 1)

    # When two are cancelled, and nobody has claimed anything since; then what is left waits
    for name, queued in (("g3", 2), ("g1", 2), ("g2", 0)):
        assert await world.rollouts.cancel(name)
        status = await world.board.run_status("r1")
        assert (status.trajectories["queued"], status.trajectories["running"]) == (queued, int(name == "g3"))
        assert status.turns["ready"] <= status.depth
    assert status.turns == {"ready": 0, "claimed": 0}


async def test_turns_of_a_cancelled_group_can_not_be_pushed(world: World) -> None:
    claim = await held_one(world)
    assert await world.rollouts.cancel("g1")
    assert await world.turns.push("a1", [turn_of(claim)]) == ["lost"]
    status = await world.board.run_status("r1")
    assert (status.depth, status.memory_bytes) == (0, 0)


# ---- looking without taking


async def test_a_look_shows_complete_groups_in_anybodys_hands_the_oldest_first_and_takes_none(world: World) -> None:
    # Given three complete groups, on whatever shards, of which the first is in a consumer's hands, and an open one
    names = ["g1", "g2", "g3"]
    for name in names:
        await push(world, name, size=1)
        (claim,) = await world.trajectories.claim("a1", 1)
        assert await settle(world, claim)
        await world.set_clock_ahead(0.01)
    await push(world, "g4", size=1)
    held = await world.rollouts.receive("trainer", 1, 0.0)  # of each shard

    # When one looks, twice
    seen = [[group.group_id for group in await world.rollouts.peek(count)] for count in (10, 10, 2)]

    # Then all complete ones are shown each time, and a consumer still gets what it would have
    assert seen == [names, names, names[:2]]
    assert all(len(group.rollouts) == 1 and not group.redelivered for group in await world.rollouts.peek(10))
    for each in held:
        await world.rollouts.acknowledge(each)
    rest = sorted(set(names) - {each.group.group_id for each in held})
    assert held
    assert [group.group_id for group in await world.rollouts.peek(10)] == rest
    got = [each for _ in rest for each in await world.rollouts.receive("trainer", 1, 0.0)]
    assert sorted(each.group.group_id for each in got) == rest
    assert not any(each.group.redelivered for each in got)


async def test_a_look_shows_a_group_that_is_too_stale_to_be_delivered_and_runs_nothing_again(world: World) -> None:
    await push(world, size=2)
    await complete_too_stale(world)
    assert [group.group_id for group in await world.rollouts.peek(10)] == ["g1"]
    assert await world.trajectories.claim("a1", 2) == []


# ---- trajectories that were given up and are retried: each once, in its own group, or refused with the cause


async def bury(world: World, *claims: TrajectoryClaim) -> list[str]:
    """Give trajectories up for good; returns their names."""
    for claim in claims:
        found = await world.trajectories.fail(claim.job.trajectory_id, claim.fence, letter_of(claim), is_final=True)
        assert found == "dead"
    return [claim.job.trajectory_id for claim in claims]


async def letters(world: World) -> list[DeadLetter]:
    return list(await world.rollouts.dead_letters(99))


async def ended(world: World, group_id: str = "g1") -> TrajectoryClaim:
    """A group of two that is complete: one of its trajectories has ended well, the other is dead, and returned."""
    await push(world, group_id, size=2)
    good, bad = await world.trajectories.claim("a1", 2)
    assert await settle(world, good)
    await bury(world, bad)
    return bad


async def test_a_retried_trajectory_ends_in_its_own_open_group_with_all_attempts(world: World) -> None:
    # Given an open group of two, one of which is dead
    await push(world, size=2)
    bad, good = await world.trajectories.claim("a1", 2)
    (name,) = await bury(world, bad)

    # When it is retried, also by a call that is repeated, or is of a second operator
    assert await world.rollouts.retry([name], is_dry=True) == {name: "done"}
    found = await asyncio.gather(world.rollouts.retry([name]), world.again.retry([name]))

    # Then it runs again once, with its task and a new fence, and no writing of its former life counts
    assert sorted(each[name] for each in found) == ["done", "unknown"]
    assert await letters(world) == []
    (again,) = await world.trajectories.claim("a1", 2)
    assert again.job == bad.job and again.attempt == 0 and again.fence > bad.fence
    assert not await settle(world, bad)

    # And its group comes whole
    assert await settle(world, good) and await settle(world, again)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert len(delivery.group.rollouts) == 2 and not delivery.group.failures
    assert await world.rollouts.acknowledge(delivery)
    status = await world.board.run_status("r1")
    assert (status.depth, status.memory_bytes, status.counters["trajectories_failed"]) == (0, 0, 0)


async def test_a_complete_group_that_nobody_received_is_taken_back_whole(world: World) -> None:
    bad = await ended(world)
    name = bad.job.trajectory_id
    assert await world.rollouts.retry([name], is_dry=True) == {name: "done"}
    assert len(await world.rollouts.peek(9)) == 1, "a dry run leaves all as it is"

    assert await world.rollouts.retry([name]) == {name: "done"}
    assert await world.rollouts.receive("t", 1, 0.01) == []
    (again,) = await world.trajectories.claim("a1", 2)
    assert await settle(world, again)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert len(delivery.group.rollouts) == 2
    assert (await world.board.run_status("r1")).counters["groups_completed"] == 1


async def test_a_group_that_was_received_or_consumed_is_left_alone(world: World) -> None:
    name = (await ended(world)).job.trajectory_id
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert await world.rollouts.retry([name]) == {name: "received"}
    assert await world.rollouts.acknowledge(delivery)
    assert await world.rollouts.retry([name]) == {name: "consumed"}
    assert [each.trajectory_id for each in await letters(world)] == [name], "what is refused is kept"

    cancelled = (await ended(world, "g2")).job.trajectory_id
    await world.rollouts.cancel("g2")
    assert await world.rollouts.retry([cancelled]) == {cancelled: "consumed"}


async def test_a_group_that_had_its_quorum_or_its_deadline_is_left_alone(world: World) -> None:
    await push(world, size=2, quorum=1)
    bad, good = await world.trajectories.claim("a1", 2)
    (name,) = await bury(world, bad)
    assert await settle(world, good)
    assert await world.rollouts.retry([name]) == {name: "quorum"}

    await push(world, "g2", size=2, deadline_s=2.0)
    late, _ = await world.trajectories.claim("a1", 2)
    (name,) = await bury(world, late)
    assert await pass_time(world, 3) == 1
    assert await world.rollouts.retry([name]) == {name: "deadline"}


async def test_a_deadline_still_holds_for_a_group_that_was_taken_back(world: World) -> None:
    await push(world, size=1, deadline_s=20.0)
    (name,) = await bury(world, *await world.trajectories.claim("a1", 1))
    assert await world.rollouts.retry([name]) == {name: "done"}
    assert await pass_time(world, 21) == 1
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert (delivery.group.ended_by, delivery.group.cancelled) == ("deadline", (name,))


async def test_what_is_no_dead_letter_is_told_so_and_several_groups_go_at_once(world: World) -> None:
    names = []
    for group_id in ("g1", "g2", "g3"):
        await push(world, group_id, size=2)
        names += await bury(world, *await world.trajectories.claim("a1", 2))
    wrong = ["g1.7", "nobody.0", "g1", "", "g1.0.0", "}{", "\x1b[2J.0", "g" * 500]
    assert await world.rollouts.retry([*names, *wrong, *names]) == {
        **dict.fromkeys(names, "done"),
        **dict.fromkeys(wrong, "unknown"),
    }
    again = await world.trajectories.claim("a1", 9)
    assert sorted(each.job.trajectory_id for each in again) == sorted(names)


async def test_a_group_that_was_too_stale_once_may_be_taken_back_for_its_dead(world: World) -> None:
    # Given a group that ran again as it was too stale, and whose trajectory then died
    await push(world, size=2)
    await complete_too_stale(world)
    assert await world.rollouts.receive("t", 1, 0.01) == []
    (again,) = await world.trajectories.claim("a1", 2)
    (name,) = await bury(world, again)

    assert await world.rollouts.retry([name]) == {name: "done"}
    (again,) = await world.trajectories.claim("a1", 2)
    assert await settle(world, again, version=5)
    (delivery,) = await world.rollouts.receive("t", 1, 1.0)
    assert len(delivery.group.rollouts) == 2


async def test_a_row_that_somebody_wrote_over_keeps_no_other_group_waiting(world: World) -> None:
    names = []
    for group_id in ("g1", "g2"):
        names.append((await ended(world, group_id)).job.trajectory_id)
    bad = RunShards("r1", world.run.shard_count).of("g1").group("g1")
    await world.do("HSET", bad, "deadline", "soon", "quorum", "many", "completed", "none")

    assert await world.rollouts.retry(names) == dict.fromkeys(names, "done")


async def test_who_evaluates_a_version_pushes_while_it_is_the_one_that_is_pinned(world: World) -> None:
    # Given two clients that evaluate one version, and later one of them the next
    for client in (world.rollouts, world.again):
        await client.pin(1)
        assert await client.push([group_of_size(f"g{id(client)}", 1)]) == [True]
    await world.again.pin(2)
    # Then the other is refused, and nothing is pushed; a client that evaluates nothing is not asked
    for refused in (
        lambda: world.rollouts.push([group_of_size("late", 1)]),
        lambda: world.rollouts.beat("t", 60.0),
        lambda: world.rollouts.cancel(f"g{id(world.again)}"),
        world.rollouts.check_there,
    ):
        with pytest.raises(VersionConflict, match=r"run 'r1' evaluates version 2 by now.*this handle of version 1"):
            await refused()
    assert await world.rollouts.known(["late"]) == [False]
    assert await world.again.push([group_of_size("next", 1)]) == [True]
    assert await world.view(world.run).rollouts.push([group_of_size("any", 1)]) == [True]


@pytest.mark.parametrize("does", ["push", "beat", "receive", "cancel", "check"])
async def test_a_client_of_a_deleted_run_is_refused_by_one_of_its_name(world: World, does: str) -> None:
    # Given a client that has pushed and consumed, whose run is deleted and made again; the new one has a group to give
    await push(world, "old", size=1)
    await world.rollouts.beat("t", 60.0)
    await world.board.delete_run("r1")
    await world.board.create_run(world.run)
    await world.again.push([group_of_size("g1", 1)])
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await settle(world, claim)

    # Then it can neither push nor consume, and says what has become of its run
    assert not await world.rollouts.is_there() and await world.again.is_there()
    calls = {
        "push": lambda: world.rollouts.push([group_of_size("older", 1)]),
        "beat": lambda: world.rollouts.beat("t", 60.0),
        "receive": lambda: world.rollouts.receive("t", 1, 1.0),
        "cancel": lambda: world.rollouts.cancel("g1"),
        "check": world.rollouts.check_there,
    }
    with pytest.raises(RunUnknown, match=r"run 'r1' was deleted \d+ s ago"):
        await calls[does]()

    # And who opened the new one has its group
    await world.again.beat("other", 60.0)
    await pass_time(world, 65)
    await world.again.beat("other", 60.0)
    (delivery,) = await world.again.receive("other", 1, 1.0)
    assert delivery.group.group_id == "g1"


@pytest.mark.parametrize("total", ["depth", "bytes"])
async def test_a_total_that_is_not_that_of_the_groups_would_be_found_at_the_end_of_each_test_here(
    world: World, total: str
) -> None:
    await push(world)
    world.check_integrity()
    run = RunShards("r1", world.run.shard_count).of("g1").run
    await world.do("HINCRBY", run, total, 1)
    with pytest.raises(AssertionError, match=f"{total} is counted as"):
        world.check_integrity()
    await world.do("HINCRBY", run, total, -1)
