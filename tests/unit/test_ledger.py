"""A trainer beside a broker that forgets its last writes, as a replica that took over may."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollfab.fabric.memory.fabric import MemoryFabric
from rollfab.fabric.ports import TrajectoryClaim
from rollfab.fabric.records import Rollout, RunConfig
from rollfab.trainer import ledger as module
from rollfab.trainer.checks import make_groups
from rollfab.trainer.ledger import Ledger
from tests.rollouts import rollout_of

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=4)


@pytest.fixture
async def fabric() -> MemoryFabric:
    made = MemoryFabric()
    await made.board.create_run(RUN)
    return made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_AGAIN_S", 0.0)


def state(fabric: MemoryFabric) -> dict[str, Any]:
    """What a replica would hold now, without what belongs to this process."""
    run = fabric.broker.runs["r1"]
    names = ("groups", "completed", "completed_names", "pending", "depth", "bytes_held", "consumed", "completed_next")
    jobs = ("ready", "jobs", "records", "deadlines", "held")
    kept = {name: copy.deepcopy(getattr(run, name)) for name in names}
    return {**kept, "trajectories": {name: copy.deepcopy(getattr(run.trajectories, name)) for name in jobs}}


def forget_since(fabric: MemoryFabric, before: dict[str, Any]) -> None:
    run = fabric.broker.runs["r1"]
    for name, value in before["trajectories"].items():
        setattr(run.trajectories, name, value)
    for name in before.keys() - {"trajectories"}:
        setattr(run, name, before[name])


async def finish_all(fabric: MemoryFabric) -> None:
    queue = fabric.trajectories(RUN)
    for claim in await queue.claim("a1", 10):
        assert await queue.settle(claim, made(claim), is_scored=True)


def made(claim: TrajectoryClaim) -> Rollout:
    return rollout_of(claim.job)


async def test_a_push_that_the_broker_forgot_is_repeated_while_no_group_comes(
    fabric: MemoryFabric, at_once: None
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


async def test_nothing_is_pushed_twice_where_nothing_was_lost(fabric: MemoryFabric, at_once: None) -> None:
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["g1"]))
    for _ in range(3):
        assert await ledger.receive("t", 0.01) is None
    assert fabric.broker.runs["r1"].depth == 1


async def test_a_run_that_is_full_does_not_stop_a_waiting_trainer(fabric: MemoryFabric, at_once: None) -> None:
    # Given pushes that were lost, and a run that others filled up since
    ledger = Ledger(fabric.rollouts(RUN))
    before = state(fabric)
    await ledger.push(make_groups([{}], 1, ["g1"]))
    forget_since(fabric, before)
    await fabric.rollouts(RUN).push(make_groups([{}], 4, ["other"]))

    # Then the trainer goes on waiting
    assert await ledger.receive("t", 0.01) is None


async def test_a_group_whose_acknowledgement_the_broker_forgot_is_not_handed_out_again(fabric: MemoryFabric) -> None:
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
    assert "g1" in fabric.broker.runs["r1"].consumed
    assert fabric.broker.runs["r1"].depth == 0


async def test_what_is_remembered_is_bounded(fabric: MemoryFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_COUNT_MAX", 2)
    ledger = Ledger(fabric.rollouts(RUN))
    for index in range(4):
        await ledger.push(make_groups([{}], 1, [f"g{index}"]))
    assert list(ledger._open) == ["g2", "g3"]
