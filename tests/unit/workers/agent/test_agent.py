"""The agent worker over the ports: real environment, turns answered by the test in place of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from rollfab.fabric.contract import limits
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import BrokerError, WireError
from rollfab.fabric.contract.records import Group, Lease, RunConfig, TurnResult
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.ports.queue import Exchange, TrajectoryClaim, TurnPush, TurnSettle
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.queue.turns import RedisTurnQueue
from rollfab.trainer.checks import make_groups
from rollfab.workers.agent.worker import AgentConfig, AgentWorker
from rollfab.workers.environments.registry import Registry
from tests.standin.broker import DirectClient
from tests.standin.fabric import StandInFabric
from tests.support.leases import set_lease
from tests.support.records import made_of, result_of
from tests.support.until import until

TEXT = CharTokenizer()
TO_THE_GOAL = "DDRRDR"  # on FrozenLake's own 4x4 map


class Setting:
    """A fabric with one run, and a worker played by the test."""

    def __init__(self, worker: str = "w") -> None:
        self.worker = worker
        self.fabric = StandInFabric()
        self.run = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
        self.worlds: list[str] = []
        self.asked: list[tuple[str, str, int]] = []

    async def begin(self) -> Setting:
        await self.fabric.board.create_run(self.run)
        lease = Lease(worker_id=self.worker, run_id=self.run.run_id, lease_epoch=1, slot_count=8, lease_until_ms=None)
        await set_lease(self.fabric.board, lease, None)
        self.fabric.tables_of(self.run.run_id).head_version = 4
        return self

    async def push(self, size: int = 1, name: str = "g", fault: str = "", **settings: Any) -> None:
        (group,) = make_groups([{"seed": 1, "fault": fault}], size, [name])
        await self.fabric.rollouts(self.run).push([dataclasses.replace(group, **settings)])

    def held(self, run_id: str = "r1") -> list[str]:
        """Trajectories that an agent holds."""
        records = self.fabric.tables_of(run_id).trajectories.records
        return sorted(name for name, record in records.items() if record.state == "claimed")

    @contextlib.asynccontextmanager
    async def agent(self, name: str = "a1", **settings: float) -> AsyncIterator[None]:
        async def ask_reward(run_id: str, trajectory_id: str, fence: int, *, is_again: bool = False) -> None:
            self.asked.append((run_id, trajectory_id, fence))

        config = AgentConfig(worker_id=name, runs_s=0.01, **settings)  # type: ignore[arg-type]
        async with Registry(self.worlds) as registry:
            worker = AgentWorker(self.fabric, registry, config, SystemClock(), ask_reward=ask_reward)
            stop = asyncio.Event()
            task = asyncio.create_task(worker.run(stop))
            try:
                yield
            finally:
                stop.set()
                await task

    async def claims(self) -> Exchange:
        turns = self.fabric.turns(self.run)
        while True:
            exchange = await turns.exchange(self.worker, want=8, lease_epoch=1, active_version=4)
            if exchange.claims:
                return exchange
            await asyncio.sleep(0.005)

    async def answer(self, left: int = len(TO_THE_GOAL)) -> None:
        """Answer so many turns, the n-th of a trajectory with the n-th step to the goal."""
        turns = self.fabric.turns(self.run)
        while left:
            exchange = await self.claims()
            left -= len(exchange.claims)
            for claim in exchange.claims:
                ids = TEXT.encode(TO_THE_GOAL[int(claim.job.turn_id.rsplit(".", 1)[1])])
                result = result_of(claim.job.turn_id, finish_reason="length", **made_of(ids, self.worker, 4))
                await turns.exchange(self.worker, settles=[TurnSettle(claim=claim, result=result)])

    async def start_again(self, **settings: Any) -> None:
        """As a trainer that starts again with other settings; returns when an agent has looked for such."""
        self.run = dataclasses.replace(self.run, **settings)
        await self.fabric.board.create_run(self.run)
        await self.looked_at()

    async def looked_at(self) -> None:
        """Wait until an agent has looked twice at what runs there are: it has done as the first look says."""
        runs, looks = self.fabric.board.runs, []

        async def watched() -> dict[str, RunConfig]:
            looks.append(await runs())
            return looks[-1]

        self.fabric.board.runs = watched  # type: ignore[method-assign]
        await until(lambda: len(looks) >= 2)
        self.fabric.board.runs = runs  # type: ignore[method-assign]

    async def group(self) -> Group:
        rollouts = self.fabric.rollouts(self.run)
        (delivery,) = await rollouts.receive("trainer", 1, 1.0)
        assert await rollouts.acknowledge(delivery)
        return delivery.group


async def test_a_trajectory_becomes_a_token_exact_rollout() -> None:
    setting = await Setting().begin()
    await setting.push()
    async with setting.agent():
        await setting.answer()
        (rollout,) = (await setting.group()).rollouts
    assert (rollout.reward, rollout.finish_reason, rollout.turn_count) == (1.0, "terminated", 6)
    # Actions and observations alternate: a letter per cell, and no observation after the last action
    assert TEXT.decode(rollout.prompt_ids) == "a"
    assert TEXT.decode(rollout.completion_ids) == "DeDiRjRkDoR"
    assert rollout.completion_mask.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert rollout.logprobs.tolist() == [-0.5, 0] * 5 + [-0.5]
    assert [(span.start, span.end, span.policy_version) for span in rollout.spans] == [
        (i, i + 1, 4) for i in range(0, 11, 2)
    ]
    assert rollout.policy_version == 4


async def test_an_agent_that_leaves_gives_its_trajectories_back_unharmed() -> None:
    setting = await Setting().begin()
    await setting.push(3)
    async with setting.agent():
        await setting.claims()
    run = setting.fabric.tables_of("r1")
    assert run.trajectories.held == {}
    assert sorted(run.trajectories.ready) == ["g.0", "g.1", "g.2"]
    assert {(each.attempt, each.loss) for each in run.trajectories.records.values()} == {(0, 0)}


async def test_another_agent_goes_on_where_the_first_left_off() -> None:
    setting = await Setting().begin()
    await setting.push()
    async with setting.agent("a1"):
        await setting.answer(3)
    async with setting.agent("a2"):
        await setting.answer(3)
        (rollout,) = (await setting.group()).rollouts
    assert (rollout.reward, rollout.turn_count) == (1.0, 6)
    assert setting.fabric.tables_of("r1").counters["turns_settled"] == 6  # none was made twice


async def test_what_was_lost_is_taken_back_though_groups_cannot_be_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(self: object) -> int:
        raise BrokerError("a shard is away")

    # Given a trajectory of an agent that is gone, and a broker that cannot say which groups are late
    setting = await Setting().begin()
    await setting.push()
    monkeypatch.setattr(RedisRolloutStream, "reap", fail)
    (claim,) = await setting.fabric.trajectories(setting.run).claim("gone", 1)
    records = setting.fabric.tables_of("r1").trajectories
    records.expire(claim.job.trajectory_id)
    # When another agent looks after the run
    async with setting.agent(reap_s=0.01):
        # Then it takes the trajectory over
        await until(lambda: records.held == {"a1": 1})


async def test_a_result_that_was_lost_on_its_way_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an inbox that loses the first delivery of every result
    results = RedisTurnQueue.results
    lost: list[str] = []

    async def forgetful(self: RedisTurnQueue, agent_id: str, timeout_s: float) -> list[TurnResult]:
        found = await results(self, agent_id, timeout_s)
        kept = [each for each in found if each.turn_id in lost]
        lost.extend(each.turn_id for each in found if each not in kept)
        return kept

    monkeypatch.setattr(RedisTurnQueue, "results", forgetful)
    setting = await Setting().begin()
    await setting.push()
    # When the agent asks again for what it has waited for too long, then it gets what was made, not something new
    async with setting.agent(ask_again_s=0.05):
        await setting.answer()
        assert (await setting.group()).rollouts[0].reward == 1.0
    assert len(lost) == 6
    assert setting.fabric.tables_of("r1").counters["turns_settled"] == 6


async def test_a_run_with_a_reward_function_waits_for_its_reward() -> None:
    setting = Setting()
    setting.run = RunConfig(run_id="r1", model="tiny", environment="frozenlake", reward="success")
    await setting.begin()
    await setting.push()
    async with setting.agent():
        await setting.answer()
        await until(lambda: setting.asked)
    assert [name for _, name, _ in setting.asked] == ["g.0"]
    assert (await setting.fabric.board.run_status("r1")).trajectories["scoring"] == 1


@pytest.mark.parametrize("fault", ["", "reset hangs"], ids=["it waits for a turn", "its world hangs"])
async def test_a_cancelled_group_lets_go_of_its_places(fault: str) -> None:
    # Given an agent whose only place is taken
    setting = Setting()
    setting.worlds = ["broken=tests.support.worlds.worlds:Broken"]
    setting.run = dataclasses.replace(setting.run, environment="broken")
    await setting.begin()
    await setting.push(1, "first", fault)
    async with setting.agent(environment_count=1, environment_timeout_s=1000.0):
        await until(lambda: setting.held() == ["first.0"])
        await setting.push(1, "second")
        # When the group is cancelled, then the place goes to another
        assert await setting.fabric.rollouts(setting.run).cancel("first")
        await until(lambda: setting.held() == ["second.0"])


async def test_a_world_that_is_never_closed_holds_no_rollout_up_and_its_place_until_its_limit() -> None:
    setting = Setting()
    setting.worlds = ["broken=tests.support.worlds.worlds:Broken"]
    setting.run = dataclasses.replace(setting.run, environment="broken")
    await setting.begin()
    await setting.push(1, "first", "close hangs")
    async with setting.agent(environment_count=1, environment_timeout_s=1.0):
        await setting.answer(2)
        # Its rollout is there while its world is being closed, and its place is not
        assert (await setting.group()).rollouts[0].reward == 1.0
        await setting.push(1, "second")
        assert setting.held() == []
        # And then the place is given to another
        await setting.answer(2)
        assert (await setting.group()).group_id == "second"


async def test_a_group_past_its_deadline_is_completed_with_what_it_has() -> None:
    setting = await Setting().begin()
    await setting.push(2, deadline_s=0.05)
    async with setting.agent():
        group = await setting.group()
    assert (group.ended_by, group.rollouts) == ("deadline", ())


async def test_runs_share_the_places_of_one_agent() -> None:
    # Given an agent that is full of one run
    setting = await Setting().begin()
    await setting.push(12)
    other = Setting()
    other.fabric, other.run = setting.fabric, dataclasses.replace(setting.run, run_id="r2")
    async with setting.agent(environment_count=4):
        await until(lambda: len(setting.held()) == 4)
        # When another run has work too, then it gets its half as trajectories of the first end
        await other.begin()
        await other.push(12)
        finishing = asyncio.create_task(setting.answer(12 * len(TO_THE_GOAL)))
        await until(lambda: len(other.held("r2")) >= 2)
        await until(lambda: len(setting.held()) == 0)
        # and all of them once the first has no more
        await until(lambda: len(other.held("r2")) == 4)
        await finishing


async def test_a_run_that_nobody_generates_leaves_room_for_others_also_between_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given an agent that is full of a run whose turns nobody takes, beside a run without work
    monkeypatch.setattr("rollfab.workers.agent.run.STALL_S", 0.5)
    setting = await Setting().begin()
    await setting.push(12)
    other = Setting("w2")
    other.fabric, other.run = setting.fabric, dataclasses.replace(setting.run, run_id="r2")
    await other.begin()
    async with setting.agent(environment_count=4):
        await until(lambda: len(setting.held()) == 4)
        # When it has had no turn for long, then it goes down to its share, and stays there
        for step in range(2):
            await until(lambda: len(setting.held()) == 2)
            await setting.looked_at()
            assert len(setting.held()) == 2
            # and the other run has room at once, step by step
            await other.push(2, name=f"step-{step}")
            await until(lambda: len(other.held("r2")) == 2)
            assert len(setting.held()) == 2
            await other.answer(2 * len(TO_THE_GOAL))
        # When its turns are generated after all, then it takes what nobody else wants
        finishing = asyncio.create_task(setting.answer(12 * len(TO_THE_GOAL)))
        await until(lambda: len(setting.held()) == 4)
        await finishing


@pytest.mark.parametrize("place_count", [1, 4])
async def test_a_run_that_nobody_generates_and_whose_share_is_small_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, place_count: int
) -> None:
    # Given a run of the smallest weight that has stalled, and one that moves in steps
    monkeypatch.setattr("rollfab.workers.agent.run.STALL_S", 0.5)
    setting = Setting()
    setting.run = dataclasses.replace(setting.run, weight=0.1)
    await setting.begin()
    await setting.push(12)
    other = Setting("w2")
    other.fabric, other.run = setting.fabric, dataclasses.replace(setting.run, run_id="r2", weight=1.0)
    await other.begin()
    async with setting.agent(environment_count=place_count):
        await until(lambda: len(setting.held()) == place_count)
        for step in range(3):
            # When the other has work, then it has places, and after the first time at once
            await other.push(place_count, name=f"step-{step}")
            await until(lambda: len(other.held("r2")) == place_count)
            monkeypatch.setattr("rollfab.workers.agent.run.STALL_S", 1e6)  # nobody stalls anew
            await other.answer(place_count * len(TO_THE_GOAL))
            # and between its steps the first is tried with one
            await until(lambda: len(setting.held()) == 1)
        # When its turns are generated after all, then it goes on with all places
        finishing = asyncio.create_task(setting.answer(12 * len(TO_THE_GOAL)))
        await until(lambda: len(setting.held()) == place_count)
        await finishing


class ReluctantQueue(RedisTrajectoryQueue):
    """One call at a time, as over one connection; settling is answered late."""

    late_s = 0.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._turn = asyncio.Lock()

    async def settle(self, *args: Any, **settings: Any) -> bool:
        async with self._turn:
            is_settled = await super().settle(*args, **settings)
            await asyncio.sleep(self.late_s)
            return is_settled

    async def renew(self, worker_id: str, claims: Sequence[TrajectoryClaim]) -> list[str]:
        async with self._turn:
            return await super().renew(worker_id, claims)


async def test_a_trajectory_that_is_being_handed_in_is_not_given_up_by_a_renewal() -> None:
    # Given a broker that has settled a trajectory long before it says so
    setting = Setting()
    setting.run = RunConfig(run_id="r1", model="tiny", environment="frozenlake", reward="success")
    await setting.begin()
    queues: list[ReluctantQueue] = []

    def trajectories(run: RunConfig) -> ReluctantQueue:
        queues.append(ReluctantQueue(DirectClient(setting.fabric.broker), run))
        queues[-1].late_s = 0.4
        return queues[-1]

    setting.fabric.trajectories = trajectories  # type: ignore[method-assign]
    await setting.push()
    # When claims are renewed meanwhile, then the agent still learns of it, and asks for the reward
    async with setting.agent(renew_s=0.02, reap_s=60.0):
        await setting.answer()
        await until(lambda: setting.asked)
    assert [name for _, name, _ in setting.asked] == ["g.0"]


async def test_a_slow_call_does_not_hold_up_the_renewal_of_other_claims() -> None:
    # Given a trajectory that is handed in for longer than claims last
    setting = await Setting().begin()

    def trajectories(run: RunConfig) -> ReluctantQueue:
        queue = ReluctantQueue(DirectClient(setting.fabric.broker), run, claim_ms=400)
        queue.late_s = 1.2
        return queue

    setting.fabric.trajectories = trajectories  # type: ignore[method-assign]
    await setting.push(1, "one")
    async with setting.agent(renew_s=0.05, reap_s=0.05):
        await setting.answer()
        # When another one is claimed meanwhile
        await setting.push(1, "two")
        await until(lambda: "two.0" in setting.held())
        await asyncio.sleep(0.9)
        # Then the other is still held by its first claim
        record = setting.fabric.tables_of("r1").trajectories.records["two.0"]
        assert (record.state, record.loss) == ("claimed", 0)


async def test_changed_settings_count_for_claims_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an agent with a trajectory under way
    temperatures: dict[str, float] = {}

    async def push(self: Any, agent_id: str, pushes: Sequence[TurnPush]) -> list[str]:
        temperatures.update({row.job.turn_id: row.job.sampling.temperature for row in pushes})
        return await ask(self, agent_id, pushes)

    ask = RedisTurnQueue.push
    monkeypatch.setattr(RedisTurnQueue, "push", push)
    setting = Setting()
    setting.run = dataclasses.replace(setting.run, sampling={"temperature": 0.75})
    await setting.begin()
    await setting.push(1, "first")
    async with setting.agent():
        await setting.answer(1)
        await until(lambda: "first.0.1" in temperatures)
        # When the trainer starts again with other settings
        await setting.start_again(sampling={"temperature": 0.25}, turn_count_max=2)
        await setting.push(1, "second")
        await setting.answer(len(TO_THE_GOAL) - 1 + 2)
        stream, groups = setting.fabric.rollouts(setting.run), list[Group]()
        while len(groups) < 2:
            groups += [delivery.group for delivery in await stream.receive("trainer", 2, 1.0)]
    # Then what was under way ends as it began, and what is claimed from then on has the new ones
    ends = {group.group_id: (group.rollouts[0].finish_reason, group.rollouts[0].turn_count) for group in groups}
    assert ends == {"first": ("terminated", len(TO_THE_GOAL)), "second": ("turns", 2)}
    assert {temperatures[f"first.0.{index}"] for index in range(len(TO_THE_GOAL))} == {0.75}
    assert {temperatures[f"second.0.{index}"] for index in range(2)} == {0.25}


async def test_a_changed_number_of_attempts_counts() -> None:
    # Given a run whose environment cannot be made, and an agent that serves it
    setting = Setting()
    setting.run = dataclasses.replace(setting.run, environment_options={"map": "nowhere"}, attempt_count_max=3)
    await setting.begin()
    async with setting.agent():
        await setting.looked_at()
        # When the trainer starts again and allows one attempt
        await setting.start_again(attempt_count_max=1)
        await setting.push()
        # Then there is one
        await setting.group()
    assert setting.fabric.tables_of("r1").counters["attempts_failed"] == 1


async def test_a_context_over_the_limit_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a prompt of more tokens than a turn may have, which every attempt would come to
    monkeypatch.setattr(limits, "PROMPT_TOKENS_MAX", 0)
    setting = await Setting().begin()
    # When an agent plays it
    async with setting.agent():
        await setting.push()
        await until(lambda: setting.fabric.tables_of("r1").counters.get("attempts_failed"))
        # Then one attempt has failed, of the three that the run allows
        (failure,) = (await setting.group()).failures
    assert "tokens, the limit is 0" in failure.reason
    assert setting.fabric.tables_of("r1").counters["attempts_failed"] == 1


async def test_a_run_that_is_made_anew_under_its_name_is_served_as_what_it_is_now() -> None:
    # Given an agent that serves a run
    setting = await Setting().begin()
    async with setting.agent():
        await setting.looked_at()
        # When it is deleted, and another made under its name before the agent looks again
        await setting.fabric.board.delete_run("r1")
        setting.run = dataclasses.replace(setting.run, environment="guess-the-number")
        await setting.begin()
        await setting.looked_at()
        await setting.push()
        # Then its trajectories are in the environment of that one
        (claim,) = (await setting.claims()).claims
        assert TEXT.decode(claim.job.prompt_ids) == "?"


async def test_a_row_of_runs_that_cannot_be_read_ends_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an agent that serves a run
    setting = await Setting().begin()
    async with setting.agent():
        await setting.looked_at()
        # When something else is written among the runs
        is_read = asyncio.Event()

        async def runs() -> dict[str, RunConfig]:
            is_read.set()
            raise WireError("RunConfig: no such field")

        monkeypatch.setattr(setting.fabric.board, "runs", runs)
        await is_read.wait()
        # Then the run is served as before
        await setting.push()
        assert len((await setting.claims()).claims) == 1
