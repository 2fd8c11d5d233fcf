"""What every queue promises, on a server, a cluster and the stand-in alike."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from rollfab.fabric.contract.errors import QueueFull
from rollfab.fabric.contract.ids import trajectory_id, turn_id
from rollfab.fabric.contract.images import ImagePlace, digest_of
from rollfab.fabric.contract.records import (
    DeadLetter,
    Failure,
    Lease,
    Rollout,
    Sampling,
    Span,
    TokenLog,
    TrajectoryJob,
    TurnJob,
    TurnResult,
)
from rollfab.fabric.ports.queue import GroupPush, Reaped, TrajectoryClaim, TurnProgress, TurnPush, TurnSettle
from rollfab.fabric.queue.keys import RunShards
from rollfab.fabric.rules.queue.retries import BLAME_COUNT_MAX, SUSPECT_LOSS_COUNT, is_suspect
from rollfab.fabric.rules.queue.token_parts import NOTHING_SAVED, next_save
from tests.contracts.conftest import World
from tests.support import records
from tests.support.leases import set_lease

EXPIRED_S = 0.3  # claims in these tests last 200 ms


def group_of_size(group_id: str, size: int) -> GroupPush:
    jobs = tuple(
        TrajectoryJob(
            trajectory_id=trajectory_id(group_id, index),
            group_id=group_id,
            task_id="t1",
            index=index,
            task={"map": "4x4"},
            seed=7,
        )
        for index in range(size)
    )
    return GroupPush(group_id=group_id, task_id="t1", task={"map": "4x4"}, jobs=jobs)


def rollout_of(claim: TrajectoryClaim, reward: float | None = 1.0) -> Rollout:
    return records.rollout_of(claim.job, reward, **records.made_of((4, 5), version=3), attempt=claim.attempt)


def letter_of(claim: TrajectoryClaim) -> DeadLetter:
    return DeadLetter(
        trajectory_id=claim.job.trajectory_id,
        run_id="r1",
        worker_id="a1",
        reason="it raised",
        traceback="Traceback …",
        attempt=claim.attempt,
        job=dataclasses.asdict(claim.job),
    )


def turn_of(claim: TrajectoryClaim, index: int = 0, agent_id: str = "a1") -> TurnPush:
    job = TurnJob(
        turn_id=turn_id(claim.job.trajectory_id, index),
        agent_id=agent_id,
        sampling=Sampling(max_tokens=4, seed=(1 << 63) - 1),
        prompt_ids=np.arange(5, dtype=np.int32),
    )
    return TurnPush(
        trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job, turn_count_max=claim.turn_count_max
    )


def result_of(name: str, tokens: int = 2) -> TurnResult:
    return records.result_of(name, np.arange(tokens))


async def lease(world: World, worker_id: str = "w1", epoch: int = 1, slots: int = 8, ms: int | None = None) -> None:
    made = Lease(worker_id=worker_id, run_id="r1", lease_epoch=epoch, slot_count=slots, lease_until_ms=None)
    await set_lease(world.board, made, ms)


async def claimed_turn(world: World) -> tuple[TrajectoryClaim, object]:
    claim = await held_one(world, asks=True)
    await lease(world)
    exchange = await world.turns.exchange("w1", want=1, lease_epoch=1)
    return claim, exchange.claims[0]


async def expire(world: World) -> None:
    """End claims by the broker's clock: it goes on at once by what it would in the time that they last."""
    await world.set_clock_ahead(EXPIRED_S)


async def held_one(world: World, group_id: str = "g1", *, asks: bool = False) -> TrajectoryClaim:
    """A group of one trajectory that an agent holds, and perhaps asks for a turn of."""
    assert await world.rollouts.push([group_of_size(group_id, 1)]) == [True]
    (claim,) = await world.trajectories.claim("a1", 1)
    if asks:
        assert not any(await world.turns.push("a1", [turn_of(claim)]))
    return claim


async def test_a_group_goes_from_push_to_acknowledge(world: World) -> None:
    # Given a pushed group whose two trajectories are run and settled
    assert await world.rollouts.push([group_of_size("g1", 2)]) == [True]
    claims = await world.trajectories.claim("a1", 10)
    assert sorted(claim.job.trajectory_id for claim in claims) == ["g1.0", "g1.1"]
    for claim in claims:
        assert await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)
    # When the trainer receives and acknowledges it
    (delivery,) = await world.rollouts.receive("trainer", 4, 0.5)
    assert [rollout.reward for rollout in delivery.group.rollouts] == [1.0, 1.0]
    assert delivery.group.rollouts[0].completion_ids.tolist() == [4, 5]
    assert not delivery.group.redelivered
    assert await world.rollouts.acknowledge(delivery)
    # Then nothing of it is left, and it does not come again
    assert await world.rollouts.receive("trainer", 4, 0.05) == []
    status = await world.board.run_status("r1")
    assert status.depth == 0
    assert status.counters["groups_consumed"] == 1


async def test_a_repeated_push_changes_nothing_even_after_the_group_was_consumed(world: World) -> None:
    group = group_of_size("g1", 1)
    assert await world.rollouts.push([group]) == [True]
    assert await world.rollouts.push([group]) == [False]
    assert await world.rollouts.known(["g1", "g2"]) == [True, False]
    (claim,) = await world.trajectories.claim("a1", 9)
    await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.5)
    await world.rollouts.acknowledge(delivery)
    assert await world.rollouts.push([group]) == [False]
    assert await world.rollouts.known(["g2", "g1"]) == [False, True]
    assert await world.trajectories.claim("a1", 9) == []


async def test_a_push_above_the_bound_is_refused_whole(world: World) -> None:
    size = 21
    with pytest.raises(QueueFull) as caught:
        await world.rollouts.push([group_of_size("g1", size)])
    assert caught.value.facts["limit"] == 20
    assert await world.trajectories.claim("a1", 9) == []
    assert (await world.board.run_status("r1")).depth == 0


async def test_an_unacknowledged_group_comes_again_to_a_restarted_trainer_and_says_so(world: World) -> None:
    claim = await held_one(world)
    await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)
    (first,) = await world.rollouts.receive("trainer", 1, 0.5)
    # When the trainer dies before it acknowledges, and another process takes its name
    assert (await world.again.beat("trainer", 60.0)).taken_count == 1
    (again,) = await world.again.receive("trainer", 1, 0.5)
    # Then the same group arrives, marked, and only one of the two acknowledgements counts
    assert again.group.group_id == first.group.group_id
    assert again.group.redelivered
    assert await world.again.acknowledge(again)
    assert not await world.rollouts.acknowledge(first)


async def test_a_turn_goes_from_agent_to_worker_and_back(world: World) -> None:
    _, turn = await claimed_turn(world)
    assert turn.job.prompt_ids.tolist() == [0, 1, 2, 3, 4]
    settle = TurnSettle(claim=turn, result=result_of("g1.0.0"))
    exchange = await world.turns.exchange("w1", settles=[settle])
    assert exchange.refused == []
    (result,) = await world.turns.results("a1", 0.5)
    assert result.turn_id == "g1.0.0"
    assert await world.turns.results("a1", 0.02) == []
    counters = (await world.board.run_status("r1")).counters
    assert counters["turns_settled"] == 1
    assert counters["tokens"] == 2


async def test_settling_twice_with_one_fence_is_one_settling(world: World) -> None:
    _, turn = await claimed_turn(world)
    settle = TurnSettle(claim=turn, result=result_of("g1.0.0"))
    for _ in range(2):
        assert (await world.turns.exchange("w1", settles=[settle])).refused == []
    assert len(await world.turns.results("a1", 0.2)) == 1
    assert (await world.board.run_status("r1")).counters["turns_settled"] == 1


async def test_a_trajectory_has_its_turns_and_no_more_however_many_agents_hold_it(world: World) -> None:
    # Given an agent that has asked for one of two turns, and is gone
    world = world.view(dataclasses.replace(world.run, turn_count_max=2))
    claim = await held_one(world)
    assert await world.turns.push("a1", [turn_of(claim)]) == [None]
    await expire(world)
    await world.trajectories.reap("a2")
    # When another one, which does not know of it, asks for three, and the broker does not know one of them
    (taken,) = await world.trajectories.claim("a2", 1)
    assert taken.turn_count_max == 2
    pushes = [turn_of(taken, index, "a2") for index in (2, 0, 3, 1)]
    # Then it gets two, whatever comes with them, and also when it asks again
    for _ in range(2):
        assert await world.turns.push("a2", pushes) == ["over", None, "over", None]
    await lease(world)
    exchange = await world.turns.exchange("w1", want=9, lease_epoch=1)
    assert sorted(each.job.turn_id for each in exchange.claims) == ["g1.0.0", "g1.0.1"]


@pytest.mark.parametrize("name", ["g1.0", "g1.0.", "g1.0.01", "g1.0.0.0", "g1.0.1e0", "g1.0.-1", "g1.1.0", "g1.00"])
async def test_a_turn_of_no_number_of_its_trajectory_is_not_taken(world: World, name: str) -> None:
    claim = await held_one(world)
    push = turn_of(claim)
    made_up = dataclasses.replace(push, job=dataclasses.replace(push.job, turn_id=name))
    assert await world.turns.push("a1", [made_up]) == ["over"]
    assert (await world.board.run_status("r1")).turns["ready"] == 0


async def test_a_cancelled_turn_is_nobody_s_and_says_so_to_its_agent(world: World) -> None:
    # Given three turns of one trajectory: one settled, one that a worker makes, one that waits
    claim, turn = await claimed_turn(world)
    await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))])
    pushes = [turn_of(claim, index) for index in range(3)]
    await world.turns.push("a1", pushes[1:2])
    (second,) = (await world.turns.exchange("w1", want=1, lease_epoch=1)).claims
    await world.turns.push("a1", pushes[2:])
    assert [result.turn_id for result in await world.turns.results("a1", 0.5)] == ["g1.0.0"]
    # When their agent cancels them, twice
    for _ in range(2):
        await world.turns.cancel("a1", pushes)
    # Then the two that were not settled come back as cancelled, once; and the settled one is as it was
    results = await world.turns.results("a1", 0.5)
    assert [(each.turn_id, each.finish_reason) for each in results] == [
        ("g1.0.1", "cancelled"),
        ("g1.0.2", "cancelled"),
    ]
    # And no worker keeps, settles or gets one
    late = TurnSettle(claim=second, result=result_of("g1.0.1"))
    outcome = await world.turns.exchange("w1", progress=[TurnProgress(claim=second)], want=4, lease_epoch=1)
    assert (outcome.lost, outcome.claims) == (["g1.0.1"], [])
    assert (await world.turns.exchange("w1", settles=[late])).refused == ["g1.0.1"]
    # And the next agent of the trajectory knows all three
    await world.trajectories.release("a1", [claim])
    (taken,) = await world.trajectories.claim("a2", 1)
    assert [each.finish_reason for each in taken.turns] == ["stop", "cancelled", "cancelled"]
    # And an agent that lost the trajectory cancels nothing
    await world.turns.push("a2", [turn_of(taken, 3, "a2")])
    await world.turns.cancel("a1", [turn_of(claim, 3)])
    assert len((await world.turns.exchange("w1", want=4, lease_epoch=1)).claims) == 1


async def test_a_turn_s_fence_counts_in_the_hands_of_its_holder_alone(world: World) -> None:
    # Given a turn that a worker holds, and another who was given the same number before a fail-over lost the giving
    _, turn = await claimed_turn(world)
    # When that one saves tokens, hands the turn in and gives it back
    late = await world.turns.exchange(
        "w2", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))], progress=[TurnProgress(claim=turn)]
    )
    await world.turns.release("w2", [TurnProgress(claim=turn)])
    # Then it is refused, nothing is written, and the holder goes on
    assert (late.refused, late.lost) == ([turn.job.turn_id], [turn.job.turn_id])
    assert (await world.board.run_status("r1")).turns == {"ready": 0, "claimed": 1}
    found = await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))])
    assert found.refused == []


async def test_a_late_worker_settles_nothing(world: World) -> None:
    # Given a worker that froze until its claim was taken back and given to another
    _, turn = await claimed_turn(world)
    await asyncio.sleep(EXPIRED_S)
    assert (await world.turns.reap("a1")).ready_count == 1
    await lease(world, "w2")
    exchange = await world.turns.exchange("w2", want=4, lease_epoch=1)
    assert exchange.claims[0].fence > turn.fence
    # When it wakes and hands in, then it is refused, and so is its renewal
    late = await world.turns.exchange(
        "w1", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))], progress=[TurnProgress(claim=turn)]
    )
    assert late.refused == ["g1.0.0"]
    assert late.lost == ["g1.0.0"]
    assert await world.turns.results("a1", 0.02) == []


async def test_a_renewed_claim_does_not_expire(world: World) -> None:
    _, turn = await claimed_turn(world)
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert (await world.turns.exchange("w1", progress=[TurnProgress(claim=turn)])).lost == []
        assert (await world.turns.reap("a1")).ready_count == 0


async def test_a_released_turn_continues_elsewhere_with_its_tokens(world: World) -> None:
    _, turn = await claimed_turn(world)
    log = TokenLog(
        spans=(Span(0, 2, "w1", 0),), completion_ids=np.array([8, 9], np.int32), logprobs=np.zeros(2, np.float32)
    )
    await world.turns.release("w1", [TurnProgress(claim=turn, log=log)])
    await lease(world, "w2")
    (claim,) = (await world.turns.exchange("w2", want=1, lease_epoch=1)).claims
    assert claim.log.completion_ids.tolist() == [8, 9]
    assert claim.loss == 0


async def test_tokens_saved_by_a_killed_worker_are_not_lost(world: World) -> None:
    _, turn = await claimed_turn(world)
    log = TokenLog(completion_ids=np.array([8], np.int32), logprobs=np.zeros(1, np.float32))
    await world.turns.exchange("w1", progress=[TurnProgress(claim=turn, log=log)])
    await expire(world)
    await world.turns.reap("a1")
    await lease(world, "w2")
    (claim,) = (await world.turns.exchange("w2", want=1, lease_epoch=1)).claims
    assert claim.log.completion_ids.tolist() == [8]
    assert claim.loss == 1


async def test_tokens_saved_in_parts_are_read_together_and_what_is_given_back_takes_their_place(world: World) -> None:
    # Given a turn that was saved in three parts
    _, turn = await claimed_turn(world)
    ids = np.arange(600, dtype=np.int32)
    saved, places = NOTHING_SAVED, []
    for count in (10, 20, 500, 600):
        log = TokenLog(
            spans=(Span(0, count, "w1", 0),), completion_ids=ids[:count], logprobs=np.zeros(count, np.float32)
        )
        save = next_save(log, saved, f"{turn.fence}.{count}")
        progress = TurnProgress(
            claim=turn, log=save.log, place=save.place, saved_before=saved.text, saved_then=save.saved.text
        )
        outcome = await world.turns.exchange("w1", progress=[progress])
        assert (outcome.saved, outcome.lost) == ({"g1.0.0"}, [])
        saved, places = save.saved, [*places, save.place]
        if save.place == 1:  # it came, and its answer did not: the broker has other parts than were there before it
            outcome = await world.turns.exchange("w1", progress=[progress])
            assert (outcome.saved, outcome.lost) == (set(), [])
    assert places == [0, 2, 1, 2]
    # When another goes on with it
    await expire(world)
    await world.turns.reap("a1")
    await lease(world, "w2")
    (claim,) = (await world.turns.exchange("w2", want=1, lease_epoch=1)).claims
    # Then it has them all; and what it gives back is all there is
    assert claim.log.completion_ids.tolist() == ids.tolist() and claim.log.spans == (Span(0, 600, "w1", 0),)
    less = TokenLog(completion_ids=ids[:10], logprobs=np.zeros(10, np.float32))
    await world.turns.release("w2", [TurnProgress(claim=claim, log=less)])
    (claim,) = (await world.turns.exchange("w2", want=1, lease_epoch=1)).claims
    assert claim.log.completion_ids.tolist() == ids[:10].tolist()


IMAGES = {digest_of(data): data for data in (b"one file", b"another file", b"")}


def seeing_turn_of(claim: TrajectoryClaim, index: int = 0, *, count: int = 2) -> TurnPush:
    """A turn that shows the first images, two tokens each, and the first one twice."""
    push = turn_of(claim, index)
    shown = [*list(IMAGES)[:count], next(iter(IMAGES))]
    places = tuple(ImagePlace(2 * n, 2 * n + 2, digest) for n, digest in enumerate(shown))
    ids = np.zeros(2 * len(shown), np.int32)
    job = dataclasses.replace(push.job, prompt_ids=ids, images=places)
    return dataclasses.replace(push, job=job, images=IMAGES)


async def test_images_come_with_the_claims_of_all_turns_that_show_them_until_their_trajectory_ends(
    world: World,
) -> None:
    # Given turns of one trajectory, the second of which shows an image more; its agent sends all that it has each time
    claim = await held_one(world)
    await lease(world)
    for index, count in enumerate((2, 3)):
        push = seeing_turn_of(claim, index, count=count)
        assert await world.turns.push("a1", [push]) == [None]
        # When they are claimed; then each place has the very bytes of its file
        (turn,) = (await world.turns.exchange("w1", want=1, lease_epoch=1)).claims
        assert [(each.start, each.digest) for each in turn.images] == [(p.start, p.digest) for p in push.job.images]
        assert [each.data for each in turn.images] == [IMAGES[each.digest] for each in turn.images]
        await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of(turn.job.turn_id))])
    # When the trajectory ends, then nothing is left of them: a later attempt sends its own
    assert await world.trajectories.fail(claim.job.trajectory_id, claim.fence, letter_of(claim)) == "retry"
    (again,) = await world.trajectories.claim("a1", 1)
    with pytest.raises(KeyError):
        await world.turns.push("a1", [dataclasses.replace(seeing_turn_of(again), images={})])
    assert await world.turns.push("a1", [seeing_turn_of(again)]) == [None]


async def test_who_lost_a_trajectory_shows_no_images_of_it(world: World) -> None:
    claim = await held_one(world)
    await expire(world)
    await world.trajectories.reap("a2")
    (other,) = await world.trajectories.claim("a2", 1)
    assert await world.turns.push("a1", [seeing_turn_of(claim)]) == ["lost"]
    with pytest.raises(KeyError):
        await world.turns.push("a2", [dataclasses.replace(seeing_turn_of(other), images={})])


async def test_a_turn_whose_images_are_gone_or_damaged_is_settled_as_an_error(world: World) -> None:
    # Given turns that wait, of whose images somebody took one and wrote another over
    claim = await held_one(world)
    await lease(world)
    assert await world.turns.push("a1", [seeing_turn_of(claim, index) for index in range(2)]) == [None, None]
    table, name = RunShards("r1", world.run.shard_count).of(claim.job.trajectory_id).turn_image, list(IMAGES)[1]
    for damage in ("HDEL", "HSET"):
        values = () if damage == "HDEL" else (b"another",)
        await world.do(damage, table, f"{claim.job.trajectory_id}/{name}", *values)
        # When a worker claims one; then it gets none, and the agent hears why
        assert (await world.turns.exchange("w1", want=1, lease_epoch=1)).claims == []
        (result,) = await world.turns.results("a1", 1.0)
        fault = "is not there" if damage == "HDEL" else "is damaged"
        assert result.finish_reason == "error" and f"image {name} of turn {result.turn_id} {fault}" in result.error


async def test_nothing_is_claimed_without_a_lease_or_above_its_slots(world: World) -> None:
    await world.rollouts.push([group_of_size("g1", 4)])
    claims = await world.trajectories.claim("a1", 4)
    await world.turns.push("a1", [turn_of(claim) for claim in claims])
    assert not (await world.turns.exchange("w1", want=4, lease_epoch=1)).has_lease
    await lease(world, slots=3)
    exchange = await world.turns.exchange("w1", want=4, lease_epoch=1)
    assert len(exchange.claims) == 3
    assert (await world.turns.exchange("w1", want=4, lease_epoch=1)).claims == []
    # A newer lease ends the older: what is known under the old epoch is worth nothing
    await lease(world, epoch=2)
    assert not (await world.turns.exchange("w1", want=4, lease_epoch=1)).has_lease
    assert (await world.turns.exchange("w1", want=4, lease_epoch=2)).has_lease


async def test_an_expired_lease_claims_nothing(world: World) -> None:
    await claimed_turn(world)
    await lease(world, epoch=2, ms=50)
    await asyncio.sleep(0.1)
    assert not (await world.turns.exchange("w1", want=1, lease_epoch=2)).has_lease


async def test_a_restarted_agent_inherits_trajectory_turns_and_the_turn_under_way(world: World) -> None:
    # Given a trajectory with one settled turn and one under way, whose agent dies
    claim, turn = await claimed_turn(world)
    await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))])
    await world.turns.push("a1", [turn_of(claim, 1)])
    (second,) = (await world.turns.exchange("w1", want=1, lease_epoch=1)).claims
    await expire(world)
    assert (await world.trajectories.reap("a2")).ready_count == 1
    # When another agent takes it over
    (taken,) = await world.trajectories.claim("a2", 1)
    # Then it knows the settled turn, and the result of the one under way comes to it
    assert [result.turn_id for result in taken.turns] == ["g1.0.0"]
    assert taken.loss == 0  # it only waited for its turn
    await world.turns.push("a2", [turn_of(taken, 1, "a2")])
    outcome = await world.turns.exchange("w1", settles=[TurnSettle(claim=second, result=result_of("g1.0.1"))])
    assert outcome.refused == []
    assert [result.turn_id for result in await world.turns.results("a2", 0.5)] == ["g1.0.1"]
    # And the dead agent, should it wake, can neither push nor settle
    assert await world.turns.push("a1", [turn_of(claim, 2)]) == ["lost"]
    assert not await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)


async def test_a_turn_settled_while_its_agent_was_gone_is_delivered_to_the_next(world: World) -> None:
    claim, turn = await claimed_turn(world)
    await expire(world)
    await world.trajectories.reap("a2")
    (taken,) = await world.trajectories.claim("a2", 1)
    await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))])
    await world.turns.push("a2", [turn_of(taken, 0, "a2")])
    assert [result.turn_id for result in await world.turns.results("a2", 0.5)] == ["g1.0.0"]
    assert claim.fence < taken.fence


async def test_a_failed_attempt_starts_again_and_the_last_one_is_a_dead_letter(world: World) -> None:
    await world.rollouts.push([group_of_size("g1", 2)])
    first, other = await world.trajectories.claim("a1", 2)
    await world.turns.push("a1", [turn_of(first)])
    assert await world.trajectories.fail(first.job.trajectory_id, first.fence, letter_of(first)) == "retry"
    (second,) = await world.trajectories.claim("a1", 2)
    assert (second.attempt, second.turns) == (1, ())
    assert await world.trajectories.fail(first.job.trajectory_id, first.fence, letter_of(first)) == "lost"
    assert await world.trajectories.fail(second.job.trajectory_id, second.fence, letter_of(second)) == "dead"
    # Its group still arrives, naming the failure instead of scoring it
    await world.trajectories.settle(other, rollout_of(other), is_scored=True)
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.5)
    assert len(delivery.group.rollouts) == 1
    assert delivery.group.failures == (Failure(first.job.trajectory_id, "it raised"),)
    (letter,) = await world.rollouts.dead_letters(10)
    assert letter.traceback == "Traceback …"
    name = letter.trajectory_id
    assert await world.rollouts.discard([name], is_dry=True) == {name: "done"} == await world.rollouts.discard([name])


# ---- workers that were lost


async def lose_agent(world: World, want: int = 1, **how: bool) -> tuple[list[TrajectoryClaim], Reaped]:
    """An agent claims, and is never heard of again."""
    claims = await world.trajectories.claim("a1", want, **how)
    await expire(world)
    return claims, await world.trajectories.reap("reaper")


async def test_a_trajectory_that_ends_every_agent_is_given_up_after_a_bounded_number(world: World) -> None:
    await world.rollouts.push([group_of_size("g1", 1)])
    for loss in range(SUSPECT_LOSS_COUNT + BLAME_COUNT_MAX):
        (claim,), reaped = await lose_agent(world)
        assert claim.loss == loss
        assert reaped.dead_count == (loss == SUSPECT_LOSS_COUNT + BLAME_COUNT_MAX - 1)
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.5)
    (failure,) = delivery.group.failures
    assert failure.trajectory_id == "g1.0"
    assert "5 agent workers died" in failure.reason


async def test_what_cannot_end_its_agent_is_never_blamed_for_it(world: World) -> None:
    # Given one whose environment has a process of its own; when it loses more agents than would give it up
    await world.rollouts.push([group_of_size("g1", 1)])
    for _ in range(SUSPECT_LOSS_COUNT + BLAME_COUNT_MAX + 1):
        (claim,), reaped = await lose_agent(world, is_inside=False)
        # Then nothing speaks against it
        assert (claim.loss, reaped.ready_count, reaped.dead_count) == (0, 1, 0)


async def test_what_waits_for_its_turn_is_never_blamed_for_its_agent(world: World) -> None:
    await world.rollouts.push([group_of_size("g1", 1)])
    for _ in range(SUSPECT_LOSS_COUNT + BLAME_COUNT_MAX + 1):
        (claim,) = await world.trajectories.claim("a1", 1)
        await world.turns.push("a1", [turn_of(claim)])
        await expire(world)
        reaped = await world.trajectories.reap("reaper")
        assert (claim.loss, reaped.ready_count, reaped.dead_count) == (0, 1, 0)


async def test_progress_clears_a_trajectory(world: World) -> None:
    # Given a suspect
    await world.rollouts.push([group_of_size("g1", 1)])
    for _ in range(SUSPECT_LOSS_COUNT):
        await lose_agent(world)
    assert await world.trajectories.claim("a1", 1, takes_suspect=False) == []
    # When it gets on, and then loses its agent again
    (claim,) = await world.trajectories.claim("a1", 1)
    await lease(world, "w1")
    await world.turns.push("a1", [turn_of(claim)])
    (turn,) = (await world.turns.exchange("w1", want=1, lease_epoch=1)).claims
    await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))])
    await expire(world)
    await world.trajectories.reap("reaper")
    # Then it begins anew
    (claim,) = await world.trajectories.claim("a1", 1, takes_suspect=False)
    assert claim.loss == 1


async def test_an_agent_gets_one_suspect_at_a_time(world: World) -> None:
    # Given three suspects, and one trajectory that is new
    await world.rollouts.push([group_of_size("g1", 3)])
    for _ in range(SUSPECT_LOSS_COUNT):
        assert len((await lose_agent(world, 3))[0]) == 3
    await world.rollouts.push([group_of_size("g2", 1)])
    # When agents ask for all there is
    first, second, third = [await world.trajectories.claim(name, 9) for name in ("a1", "a2", "a3")]
    # Then each has one suspect, others wait apart, and none is lost
    assert [sum(is_suspect(claim.loss) for claim in claims) for claims in (first, second, third)] == [1, 1, 1]
    assert sum(map(len, (first, second, third))) == 4
    # And who takes none gets none, also when one is given back
    await world.trajectories.release("a1", [claim for claim in first if is_suspect(claim.loss)])
    assert (await world.board.run_status("r1")).trajectories["queued"] == 1
    assert await world.trajectories.claim("a4", 9, takes_suspect=False) == []
    assert len(await world.trajectories.claim("a4", 9)) == 1


async def test_among_innocents_the_one_that_ends_its_agents_is_found_and_nobody_else_is_given_up(world: World) -> None:
    # Given four trajectories, of which one ends every agent that runs it
    await world.rollouts.push([group_of_size("g1", 4)])
    await lease(world, "w1", slots=9)
    dead_agents = 0
    while (await world.board.run_status("r1")).dead_count == 0:
        claims = await world.trajectories.claim("a1", 9)
        if any(claim.job.trajectory_id == "g1.2" for claim in claims):  # it is quicker than all beside it
            dead_agents += 1
            await expire(world)
            await world.trajectories.reap("reaper")
        else:
            for claim in claims:
                assert await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)
        assert dead_agents < 30
    # Then nobody else had to pay
    for claim in await world.trajectories.claim("a1", 9):
        assert await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.5)
    assert [failure.trajectory_id for failure in delivery.group.failures] == ["g1.2"]


async def test_a_turn_that_ends_every_worker_is_given_up_and_one_whose_tokens_are_saved_is_not(world: World) -> None:
    # Given two turns, one of which makes tokens
    await world.rollouts.push([group_of_size("g1", 2)])
    await lease(world, "w1", slots=9)
    await world.turns.push("a1", [turn_of(claim) for claim in await world.trajectories.claim("a1", 2)])
    dead_count, lost_count, made = 0, 0, 0
    # When workers that run them die one after the other
    while dead_count == 0:
        claims = (await world.turns.exchange("w1", want=2, lease_epoch=1)).claims
        assert claims and lost_count <= SUSPECT_LOSS_COUNT + BLAME_COUNT_MAX
        for claim in claims:
            if claim.job.turn_id == "g1.1.0":
                made += 2
                log = TokenLog(completion_ids=np.zeros(made, np.int32), logprobs=np.zeros(made, np.float32))
                await world.turns.exchange("w1", progress=[TurnProgress(claim=claim, log=log)])
        lost_count += 1
        await expire(world)
        dead_count += (await world.turns.reap("a1")).dead_count
    # Then the other is given up, and it goes on
    (result,) = await world.turns.results("a1", 0.5)
    assert (result.turn_id, result.finish_reason) == ("g1.0.0", "error")
    (claim,) = (await world.turns.exchange("w1", want=2, lease_epoch=1)).claims
    assert (claim.job.turn_id, claim.loss) == ("g1.1.0", 1)


async def test_scoring_completes_once_and_is_asked_for_again_when_nobody_answers(world: World) -> None:
    claim = await held_one(world)
    assert await world.trajectories.settle(claim, rollout_of(claim, None), is_scored=False)
    assert await world.rollouts.receive("trainer", 1, 0.05) == []
    await expire(world)
    assert (await world.trajectories.reap("a1")).scoring == (("g1.0", claim.fence),)
    begun = await world.trajectories.begin_score("g1.0", claim.fence, "w1", 1.0)
    assert begun.task == {"map": "4x4"}
    assert begun.rollout.reward is None
    assert await world.trajectories.score("g1.0", claim.fence, 0.5)
    assert await world.trajectories.score("g1.0", claim.fence, 0.7)  # asked again: settled already, unchanged
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.5)
    assert delivery.group.rollouts[0].reward == 0.5
    assert (await world.board.run_status("r1")).counters["trajectories_completed"] == 1


async def test_cancelling_a_group_takes_its_claims_away_and_leaves_nothing(world: World) -> None:
    claim, turn = await claimed_turn(world)
    assert await world.rollouts.cancel("g1")
    assert not await world.rollouts.cancel("g1")
    assert await world.trajectories.renew("a1", [claim]) == ["g1.0"]
    assert (await world.turns.exchange("w1", progress=[TurnProgress(claim=turn)])).lost == ["g1.0.0"]
    assert not await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)
    status = await world.board.run_status("r1")
    assert (status.depth, status.turns["claimed"], status.trajectories["running"]) == (0, 0, 0)


async def test_a_released_trajectory_is_no_failure(world: World) -> None:
    claim = await held_one(world)
    assert await world.trajectories.save("a1", claim, b"state")
    await world.trajectories.release("a1", [claim])
    (again,) = await world.trajectories.claim("a2", 1)
    assert (again.attempt, again.loss, again.snapshot) == (0, 0, b"state")


async def test_who_waits_is_woken_by_a_push(world: World) -> None:
    waiting = asyncio.create_task(world.trajectories.wait(5))
    await asyncio.sleep(0.05)
    await world.rollouts.push([group_of_size("g1", 1)])
    await asyncio.wait_for(waiting, 1)


async def test_a_turn_that_a_second_claim_finishes_counts_as_resumed(world: World) -> None:
    _, turn = await claimed_turn(world)
    await world.turns.release("w1", [TurnProgress(claim=turn)])
    (again,) = (await world.turns.exchange("w1", want=1, lease_epoch=1)).claims
    await world.turns.exchange("w1", settles=[TurnSettle(claim=again, result=result_of("g1.0.0"))])
    assert (await world.board.run_status("r1")).counters["turns_resumed"] == 1


async def test_dead_letters_that_pile_up_stop_the_pusher(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollfab.fabric.queue.rollouts.DEAD_COUNT_MAX", 1)
    claim = await held_one(world)
    assert await world.trajectories.fail("g1.0", claim.fence, letter_of(claim), is_final=True) == "dead"
    with pytest.raises(QueueFull, match="1 dead letter,"):
        await world.rollouts.push([group_of_size(f"h{index}", 1) for index in range(12)])  # some on every shard


async def test_who_still_works_for_a_deleted_run_can_write_nothing_into_one_of_its_name(world: World) -> None:
    # Given an agent and a worker with claims of a run that is deleted, and made again with the same group
    old, turn = await claimed_turn(world)
    await world.board.delete_run("r1")
    await world.board.create_run(world.run)
    world = world.view(world.run)

    # When others work for that, or the same ones again
    new, again = await claimed_turn(world)
    assert (new.job.trajectory_id, again.job.turn_id) == (old.job.trajectory_id, turn.job.turn_id)

    # Then what the old claims bring is refused, and the new ones' counts
    assert (await world.turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result_of("g1.0.0"))])).refused
    assert not await world.trajectories.settle(old, rollout_of(old), is_scored=True)
    assert await world.trajectories.fail("g1.0", old.fence, letter_of(old), is_final=True) == "lost"
    assert not (await world.turns.exchange("w1", settles=[TurnSettle(claim=again, result=result_of("g1.0.0"))])).refused
    assert await world.trajectories.settle(new, rollout_of(new), is_scored=True)


async def test_a_claim_says_whether_it_is_the_first(world: World) -> None:
    claim = await held_one(world)
    assert claim.is_first
    await world.trajectories.release("a1", [claim])
    (again,) = await world.trajectories.claim("a1", 1)
    assert not again.is_first


async def test_a_worker_that_holds_weights_of_an_earlier_publisher_gets_no_turn(world: World) -> None:
    """A run made again, or a fail-over that lost a version, may have other weights under the same number."""
    # Given a version that a publisher has made the head, and one of the same number by an earlier publisher
    for epoch in (20, 10):
        await world.set_head(3, epoch)
    await held_one(world, asks=True)
    await lease(world)

    # Then who holds the earlier one's gets nothing, and is told of the head
    outcome = await world.turns.exchange("w1", want=1, lease_epoch=1, active_version=3, weights_epoch=10)
    assert (outcome.claims, outcome.behind) == ([], 3)
    outcome = await world.turns.exchange("w1", want=1, lease_epoch=1, active_version=3, weights_epoch=20)
    assert len(outcome.claims) == 1


async def test_a_run_that_has_no_weights_yet_gives_no_turn_to_who_holds_an_older_run_s(world: World) -> None:
    await held_one(world, asks=True)
    await lease(world)
    outcome = await world.turns.exchange("w1", want=1, lease_epoch=1, active_version=3, weights_epoch=1)
    assert (outcome.claims, outcome.behind) == ([], -1)
