"""A trainer beside a broker that forgets its last writes, as a replica that took over may."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.records import Rollout, RunConfig
from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.trainer import groups as module
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
        assert await queue.settle(claim, made(claim), is_scored=True)


def made(claim: TrajectoryClaim) -> Rollout:
    return rollout_of(claim.job)


async def test_a_push_that_the_broker_forgot_is_repeated_while_no_group_comes(
    fabric: StandInFabric, at_once: None
) -> None:
    # Given a push that was acknowledged, and then lost
    ledger = Ledger(fabric.rollouts(RUN))
    before = state(fabric)
    await ledger.push(make_groups([{}], 1, ["g1"]))
    forget_since(fabric, before)
    await finish_all(fabric)

    # When the trainer waits
    assert await ledger.receive("t", 0.01) is None

    # Then the group is there again, and comes
    await finish_all(fabric)
    delivery = await ledger.receive("t", 0.01)
    assert delivery is not None
    assert delivery.group.group_id == "g1"


async def test_nothing_is_pushed_twice_where_nothing_was_lost(fabric: StandInFabric, at_once: None) -> None:
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["g1"]))
    for _ in range(3):
        assert await ledger.receive("t", 0.01) is None
    assert fabric.tables_of("r1").depth == 1


async def test_a_run_that_is_full_does_not_stop_a_waiting_trainer(fabric: StandInFabric, at_once: None) -> None:
    # Given pushes that were lost, and a run that others filled up since
    ledger = Ledger(fabric.rollouts(RUN))
    before = state(fabric)
    await ledger.push(make_groups([{}], 1, ["g1"]))
    forget_since(fabric, before)
    await fabric.rollouts(RUN).push(make_groups([{}], 4, ["other"]))

    # Then the trainer goes on waiting
    assert await ledger.receive("t", 0.01) is None


async def test_a_group_whose_acknowledgement_the_broker_forgot_is_not_handed_out_again(fabric: StandInFabric) -> None:
    # Given a group that was used, and whose acknowledgement was lost
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["g1"]))
    await finish_all(fabric)
    before = state(fabric)
    delivery = await ledger.receive("t", 0.01)
    assert delivery is not None
    await ledger.acknowledge(delivery)
    forget_since(fabric, before)

    # When the trainer asks on
    assert await ledger.receive("t", 0.01) is None

    # Then it is acknowledged again
    assert "g1" in fabric.tables_of("r1").consumed
    assert fabric.tables_of("r1").depth == 0


async def test_what_is_remembered_is_bounded(fabric: StandInFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_COUNT_MAX", 2)
    ledger = Ledger(fabric.rollouts(RUN))
    for index in range(4):
        await ledger.push(make_groups([{}], 1, [f"g{index}"]))
    assert list(ledger._open) == ["g2", "g3"]


async def test_an_acknowledgement_that_did_not_arrive_is_said_again_before_anything_is_delivered(
    fabric: StandInFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a group that was used, a broker that is away when it is acknowledged, and a head that has gone on since
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["g1"]))
    await finish_all(fabric)
    delivery = await ledger.receive("t", 0.01)
    assert delivery is not None

    async def away(*_: Any) -> bool:
        raise BrokerError("the broker does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(RedisRolloutStream, "acknowledge", away)
        with pytest.raises(BrokerError):
            await ledger.acknowledge(delivery)
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
    delivery = await ledger.receive("t", 0.01, takeover_s=0.2)
    assert delivery is not None
    assert ledgers == {ledger}

    # While its event loop runs, nobody takes it over
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert await other.receive("other", 0.001, takeover_s=0.01) is None

    # When it stops, another one does
    ledger.close()
    assert ledgers == set()
    await asyncio.sleep(0.3)
    taken = await other.receive("other", 0.01, takeover_s=0.01)
    assert taken is not None
    assert taken.group.redelivered
    other.close()


async def test_a_late_acknowledgement_is_warned_of(fabric: StandInFabric, caplog: pytest.LogCaptureFixture) -> None:
    # Given two groups that others took over from a ledger that said nothing for a while; one of them is used up
    late, other = Ledger(fabric.rollouts(RUN), run_id="r1"), Ledger(fabric.rollouts(RUN))
    await late.push(make_groups([{}, {}], 1, ["g1", "g2"]))
    await finish_all(fabric)
    held = [await late.receive("t", 0.01, takeover_s=0.01) for _ in range(2)]
    late.close()
    await asyncio.sleep(0.05)
    taken = [await other.receive("other", 0.01) for _ in range(2)]
    assert taken[0] is not None
    await other.acknowledge(taken[0])

    # When it acknowledges them, Then it is told, once
    for delivery in held:
        assert delivery is not None
        await late.acknowledge(delivery)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "2 groups in the hands of this process" in text
    assert fabric.tables_of("r1").counters["groups_consumed"] == 1
    late.close()
    other.close()


async def test_a_group_that_was_cancelled_while_in_hand_is_no_reason_to_warn(
    fabric: StandInFabric, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["g1"]))
    await finish_all(fabric)
    delivery = await ledger.receive("t", 0.01)
    assert delivery is not None
    await ledger.cancel("g1")
    await ledger.acknowledge(delivery)
    assert caplog.records == []


async def test_groups_that_failed_as_a_whole_are_warned_of_once_and_counted(
    fabric: StandInFabric, caplog: pytest.LogCaptureFixture
) -> None:
    # Given three groups whose every trajectory failed
    ledger, queue = Ledger(fabric.rollouts(RUN), run_id="r1"), fabric.trajectories(RUN)
    await ledger.push(make_groups([{}] * 3, 1, ["g1", "g2", "g3"]))
    for claim in await queue.claim("a1", 10):
        letter = dead_letter(ValueError("no such\nworld\x1b"), claim.job, run_id="r1", worker_id="a1", attempt=0)
        await queue.fail(claim.job.trajectory_id, claim.fence, letter, is_final=True)

    # When they are received
    for _ in range(3):
        delivery = await ledger.receive("t", 0.01)
        assert delivery is not None
        await ledger.acknowledge(delivery)

    # Then the first one is warned of, with a reason and where to look
    (record,) = caplog.records
    assert "group 'g1' failed" in record.getMessage()
    assert r"ValueError: no such\nworld\x1b." in record.getMessage()
    assert "rollfab dead ls --run r1" in record.getMessage()
    assert ledger.failed_group_count == 3
