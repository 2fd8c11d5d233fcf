"""A trainer beside a broker that forgets its last writes, as a replica that took over may."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest import mock

import pytest

from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.ports.queue import Delivery
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.trainer import groups as module
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.checks import make_groups
from rollfab.trainer.groups import Ledger
from rollfab.workers.environments.failures import dead_letter
from tests.standin.fabric import StandInFabric
from tests.support.records import rollout_of

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=4)


@pytest.fixture
async def fabric() -> StandInFabric:
    made = StandInFabric()
    await made.board.create_run(RUN)
    return made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_AGAIN_S", 0.0)


def state(fabric: StandInFabric) -> Any:
    """What a replica would hold now of the run."""
    return fabric.broker.keys.remember(fabric.tables_of("r1").keys.base)


def forget_since(fabric: StandInFabric, before: Any) -> None:
    fabric.broker.keys.fall_back(fabric.tables_of("r1").keys.base, before)


async def finish_all(fabric: StandInFabric) -> None:
    queue = fabric.trajectories(RUN)
    for claim in await queue.claim("a1", 10):
        assert await queue.settle(claim, rollout_of(claim.job), is_scored=True)


async def taken(ledger: Ledger, consumer: str = "t", takeover_s: float | None = None) -> Delivery:
    """The next group."""
    wishes = {} if takeover_s is None else {"takeover_s": takeover_s}
    delivery = await ledger.receive(consumer, 0.01, **wishes)
    assert delivery is not None
    return delivery


@pytest.fixture
async def ledger(fabric: StandInFabric) -> Ledger:
    return Ledger(fabric.rollouts(RUN), run_id="r1")


@pytest.fixture
async def in_hand(fabric: StandInFabric, ledger: Ledger) -> Delivery:
    """The group "g1", which has ended; no replica has heard of its delivery."""
    await ledger.push(make_groups([{}], 1, ["g1"]))
    await finish_all(fabric)
    return await taken(ledger)


async def test_a_push_that_the_broker_forgot_is_repeated_while_no_group_comes(
    fabric: StandInFabric, ledger: Ledger, at_once: None
) -> None:
    # Given a push that was acknowledged, and then lost
    before = state(fabric)
    await ledger.push(make_groups([{}], 1, ["g1"]))
    forget_since(fabric, before)
    await finish_all(fabric)

    # When the trainer waits
    assert await ledger.receive("t", 0.01) is None

    # Then the group is there again, and comes
    await finish_all(fabric)
    assert (await taken(ledger)).group.group_id == "g1"


async def test_nothing_is_sent_twice_where_nothing_was_lost(fabric: StandInFabric, at_once: None) -> None:
    # Given a group that waits, one that another trainer has consumed, and one that was cancelled
    stream = fabric.rollouts(RUN)
    ledger, other = Ledger(stream, run_id="r1"), Ledger(fabric.rollouts(RUN), run_id="r1")
    await ledger.push(make_groups([{}] * 2, 1, ["consumed", "cancelled"]))
    assert await stream.cancel("cancelled")
    await finish_all(fabric)
    while (delivery := await other.receive("t", 0.01)) is not None:
        await other.acknowledge(delivery)
    await ledger.push(make_groups([{}], 1, ["waits"]))
    assert await stream.known(["waits", "consumed", "cancelled", "never"]) == [True, True, True, False]
    # When the trainer waits
    with mock.patch.object(stream, "push") as push:
        for _ in range(3):
            assert await ledger.receive("t", 0.01) is None
    # Then it sends none of them again: their tasks may be large
    push.assert_not_called()
    assert fabric.tables_of("r1").depth == 1


async def test_a_run_that_is_full_does_not_stop_a_waiting_trainer(
    fabric: StandInFabric, ledger: Ledger, at_once: None
) -> None:
    # Given pushes that were lost, and a run that others filled up since
    before = state(fabric)
    await ledger.push(make_groups([{}], 1, ["g1"]))
    forget_since(fabric, before)
    await fabric.rollouts(RUN).push(make_groups([{}], 4, ["other"]))

    # Then the trainer goes on waiting
    assert await ledger.receive("t", 0.01) is None


async def test_a_group_whose_acknowledgement_the_broker_forgot_is_not_handed_out_again(
    fabric: StandInFabric, ledger: Ledger
) -> None:
    # Given a group that was used, and whose acknowledgement was lost
    await ledger.push(make_groups([{}], 1, ["g1"]))
    await finish_all(fabric)
    before = state(fabric)
    await ledger.acknowledge(await taken(ledger))
    forget_since(fabric, before)

    # When the trainer asks on
    assert await ledger.receive("t", 0.01) is None

    # Then it is acknowledged again
    assert "g1" in fabric.tables_of("r1").consumed
    assert fabric.tables_of("r1").depth == 0


async def test_what_is_remembered_is_bounded(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_COUNT_MAX", 2)
    for index in range(4):
        await ledger.push(make_groups([{}], 1, [f"g{index}"]))
    assert list(ledger._open) == ["g2", "g3"]


async def test_an_acknowledgement_that_did_not_arrive_is_said_again_before_anything_is_delivered(
    fabric: StandInFabric, ledger: Ledger, in_hand: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a group that was used, a broker that is away when it is acknowledged, and a head that has gone on since
    async def away(*_: Any) -> bool:
        raise BrokerError("the broker does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(RedisRolloutStream, "acknowledge", away)
        with pytest.raises(BrokerError):
            await ledger.acknowledge(in_hand)
    fabric.tables_of("r1").head_version = 9

    # When the trainer asks on, Then it is acknowledged, and neither handed out nor run again
    assert await ledger.receive("t", 0.01) is None
    assert fabric.tables_of("r1").depth == 0
    assert fabric.tables_of("r1").counters["groups_consumed"] == 1
    assert not await fabric.trajectories(RUN).claim("a1", 10)


async def test_a_group_in_hand_stays_so_while_this_process_lives_and_no_longer(fabric: StandInFabric) -> None:
    ledgers = set[Ledger]()
    ledger, other = Ledger(fabric.rollouts(RUN), open_ledgers=ledgers), Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["g1"]))
    await finish_all(fabric)
    await taken(ledger, takeover_s=0.2)
    assert ledgers == {ledger}

    # While its event loop runs, nobody takes it over
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert await other.receive("other", 0.001, takeover_s=0.01) is None

    # When it stops, another one does
    ledger.close()
    assert ledgers == set()
    await asyncio.sleep(0.3)
    assert (await taken(other, "other", 0.01)).group.redelivered
    other.close()


async def test_a_late_acknowledgement_is_warned_of(fabric: StandInFabric, caplog: pytest.LogCaptureFixture) -> None:
    # Given two groups that others took over from a ledger that said nothing for a while; one of them is used up
    late, other = Ledger(fabric.rollouts(RUN), run_id="r1"), Ledger(fabric.rollouts(RUN))
    await late.push(make_groups([{}, {}], 1, ["g1", "g2"]))
    await finish_all(fabric)
    held = [await taken(late, takeover_s=0.01) for _ in range(2)]
    late.close()
    await asyncio.sleep(0.05)
    first, _ = [await taken(other, "other") for _ in range(2)]
    await other.acknowledge(first)

    # When it acknowledges them, Then it is told, once
    for delivery in held:
        await late.acknowledge(delivery)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "2 groups in the hands of this process" in text
    assert fabric.tables_of("r1").counters["groups_consumed"] == 1
    late.close()
    other.close()


async def test_a_group_that_was_cancelled_while_in_hand_is_no_reason_to_warn(
    ledger: Ledger, in_hand: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.cancel("g1")
    await ledger.acknowledge(in_hand)
    assert caplog.records == []


async def test_groups_that_failed_as_a_whole_are_warned_of_once_and_counted(
    fabric: StandInFabric, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    # Given three groups whose every trajectory failed
    queue = fabric.trajectories(RUN)
    await ledger.push(make_groups([{}] * 3, 1, ["g1", "g2", "g3"]))
    for claim in await queue.claim("a1", 10):
        letter = dead_letter(ValueError("no such\nworld\x1b"), claim.job, run_id="r1", worker_id="a1", attempt=0)
        await queue.fail(claim.job.trajectory_id, claim.fence, letter, is_final=True)

    # When they are received
    for _ in range(3):
        await ledger.acknowledge(await taken(ledger))

    # Then the first one is warned of, with a reason and where to look
    (record,) = caplog.records
    assert "group 'g1' failed" in record.getMessage()
    assert r"ValueError: no such\nworld\x1b." in record.getMessage()
    assert "rollfab dead ls --run r1" in record.getMessage()
    assert ledger.failed_group_count == 3


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("how", ["break", "Ctrl-C"])
async def test_a_plain_loop_that_was_left_has_used_its_group_once_the_program_goes_on(
    fabric: StandInFabric, how: str, goes_on: bool
) -> None:
    # Given a loop that is left with a group in hand
    await fabric.rollouts(RUN).push(make_groups([{}], 1, ["g1"]))
    await finish_all(fabric)
    run = AsyncRun(fabric, RUN)  # type: ignore[arg-type]
    with contextlib.suppress(KeyboardInterrupt):
        async for _ in run.groups(timeout=0.01):
            if how == "break":
                break
            raise KeyboardInterrupt
    # When the program goes on, or ends and is started again
    if goes_on:
        await run.submit([{}], group_ids=["g2"])
    # Then the group counts as used, or comes again
    later = AsyncRun(fabric, RUN)  # type: ignore[arg-type]
    assert [group.group_id async for group in later.groups(timeout=0.01)] == ([] if goes_on else ["g1"])


async def test_a_block_that_an_interrupt_leaves_gives_all_its_groups_back(fabric: StandInFabric) -> None:
    await fabric.rollouts(RUN).push(make_groups([{}] * 2, 1, ["g1", "g2"]))
    await finish_all(fabric)
    run = AsyncRun(fabric, RUN)  # type: ignore[arg-type]
    with contextlib.suppress(KeyboardInterrupt):
        async with run.groups(timeout=0.01) as groups:
            async for group in groups:
                if group.group_id == "g2":
                    raise KeyboardInterrupt
    await run.submit([{}], group_ids=["g3"])
    assert [group.group_id async for group in run.groups(timeout=0.01)] == ["g1", "g2"]
