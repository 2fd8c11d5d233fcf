"""What an episode is told when it asks for a turn: the result, or that its claim is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import BrokerError, ClaimLost, QueueFull
from rollfab.fabric.contract.records import NO_LOGPROBS, RunConfig, Sampling, Span, TrajectoryJob, TurnJob, TurnResult
from rollfab.fabric.host.helpers import Helpers
from rollfab.fabric.ports.queue import NotPushed, TrajectoryClaim, TurnPush
from rollfab.fabric.rules.queue.timings import RunTimings
from rollfab.workers.agent.episode import TurnCaller
from rollfab.workers.agent.slots import Quarantine

IDS = np.array([5], np.int32)
RUN = RunConfig(run_id="r", model="tiny", environment="frozenlake", prefix_affinity=True)
MADE = Span(0, 1, "w1", 3)


def job_of(turn_id: str) -> TurnJob:
    return TurnJob(turn_id=turn_id, agent_id="a", sampling=Sampling(), prompt_ids=IDS)


def claim_of(fence: int) -> TrajectoryClaim:
    job = TrajectoryJob(trajectory_id="g.0", group_id="g", task_id="t", index=0, task={}, seed=0)
    return TrajectoryClaim(job=job, worker_id="a", fence=fence, attempt=0, loss=0)


class Turns:
    """A broker that answers each turn at once, unless it is away, or the turn is in `refused`."""

    def __init__(self) -> None:
        self.pushes: list[list[TurnPush]] = []
        self.refused: dict[str, NotPushed] = {}
        self.is_away = False
        self._inbox: asyncio.Queue[TurnResult] = asyncio.Queue()

    async def push(self, agent_id: str, pushes: list[TurnPush]) -> list[NotPushed | None]:
        if self.is_away:
            raise BrokerError("away")
        self.pushes.append(pushes)
        for name in [push.job.turn_id for push in pushes if push.job.turn_id not in self.refused]:
            self._inbox.put_nowait(
                TurnResult(turn_id=name, finish_reason="stop", spans=(MADE,), completion_ids=IDS, logprobs=NO_LOGPROBS)
            )
        return [self.refused.get(push.job.turn_id) for push in pushes]

    async def results(self, agent_id: str, timeout_s: float) -> list[TurnResult]:
        return [await self._inbox.get()]


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def caller(turns: Any) -> TurnCaller:
    return TurnCaller("a", turns, None, Quarantine(), ask_again_s=60.0, timings=RunTimings(), run=RUN)  # type: ignore[arg-type]


async def test_an_episode_whose_claim_is_lost_is_told_when_it_asks(turns: Turns, caller: TurnCaller) -> None:
    turns.refused = {"g.0.0": "lost"}
    async with Helpers(caller.push()), asyncio.timeout(30):
        with pytest.raises(ClaimLost, match="is held by someone else"):
            await caller.ask(claim_of(1), job_of("g.0.0"))


async def test_a_turn_above_their_number_is_told_to_who_asks_and_takes_no_other_with_it(
    turns: Turns, caller: TurnCaller
) -> None:
    turns.refused = {"g.0.1": "over"}
    async with Helpers(caller.push(), caller.receive()), asyncio.timeout(30):
        asked = [caller.ask(claim_of(1), job_of(name)) for name in ("g.0.0", "g.0.1")]
        first, second = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, TurnResult) and isinstance(second, QueueFull)
    assert second.facts["is_final"] is True


async def test_turns_asked_for_in_one_round_of_the_loop_go_in_one_call(turns: Turns, caller: TurnCaller) -> None:
    names = ["g.0.0", "g.1.0"]
    async with Helpers(caller.push(), caller.receive()), asyncio.timeout(30):
        results = await asyncio.gather(*(caller.ask(claim_of(1), job_of(name)) for name in names))
    assert [result.turn_id for result in results] == names
    assert [[push.job.turn_id for push in pushes] for pushes in turns.pushes] == [names]


async def test_what_nobody_waits_for_any_more_is_not_asked_for_when_the_broker_is_back(
    turns: Turns, caller: TurnCaller
) -> None:
    # Given a turn that was asked for while the broker was away, by an episode that has lost its claim meanwhile
    turns.is_away = True
    first = asyncio.create_task(caller.ask(claim_of(1), job_of("g.0.0")))
    await asyncio.sleep(0)
    with pytest.raises(BrokerError):
        await caller.push()
    first.cancel()
    await asyncio.wait([first])
    # When a later claim asks for the same turn, and the broker is back
    turns.is_away = False
    async with Helpers(caller.push(), caller.receive()), asyncio.timeout(30):
        result = await caller.ask(claim_of(2), job_of("g.0.0"))
    # Then that alone is pushed, and has the result
    assert result.turn_id == "g.0.0"
    assert [push.fence for pushes in turns.pushes for push in pushes] == [2]


async def test_a_turn_goes_to_the_worker_of_the_one_before_if_its_context_goes_on_from_it(
    turns: Turns, caller: TurnCaller
) -> None:
    async with Helpers(caller.push(), caller.receive()), asyncio.timeout(30):
        for name, goes_home in (("g.0.0", True), ("g.0.1", True), ("g.0.2", False), ("g.0.3", True)):
            await caller.ask(claim_of(1), job_of(name), goes_home=goes_home)
    homes = [(push.home, push.home_version) for pushes in turns.pushes for push in pushes]
    assert homes == [("", -1), ("w1", 3), ("", -1), ("w1", 3)]
