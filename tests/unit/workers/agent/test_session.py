"""Sessions over the ports: real broker scripts, turns answered by the test in place of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.chat.choice import FREE, ToolChoice
from rollfab.fabric.chat.conversation import Ask, Conversation
from rollfab.fabric.chat.template import ChatTemplate
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import (
    BrokerError,
    ClaimLost,
    EngineError,
    EngineUnsupported,
    EnvironmentFailed,
    InputError,
    QueueFull,
    RunUnknown,
)
from rollfab.fabric.contract.limits import INFO_BYTES_MAX
from rollfab.fabric.contract.records import Group, Lease, Rollout, RunConfig, TurnJob
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.ports.queue import TurnClaim, TurnProgress, TurnSettle
from rollfab.fabric.ports.sessions import Call, Opened, Reply
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.queue.turns import RedisTurnQueue
from rollfab.trainer.checks import make_groups
from rollfab.workers.agent import desk as desk_module
from rollfab.workers.agent import episode as episode_module
from rollfab.workers.agent import keeper as keeper_module
from rollfab.workers.agent import session as session_module
from rollfab.workers.agent.desk import Desk, RemoteWorlds
from rollfab.workers.agent.worker import AgentConfig, AgentWorker
from rollfab.workers.engines.model_tokenizer import CALL_ID, chat_of
from tests.standin.fabric import StandInFabric
from tests.support.leases import set_lease
from tests.support.records import made_of, result_of
from tests.support.until import until

TEXT = CharTokenizer()
END = TEXT.eos_id
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
Policy = Callable[[TurnJob], Sequence[int]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> Policy:
    return lambda job: [*TEXT.encode(text).tolist(), END]


def echo(job: TurnJob) -> Sequence[int]:
    """Answer with the last user's line, and the turn's number."""
    ids = job.prompt_ids[:-1].tolist()
    line = TEXT.decode(ids[len(ids) - ids[::-1].index(END) :] if END in ids else ids).splitlines()[-1]
    return said(f"{line[1:]}/{job.turn_id.rsplit('.', 1)[1]}")(job)


class Gateway:
    """A fabric with one run that is played through sessions; turns are answered by `policy` as they come."""

    def __init__(self, **settings: Any) -> None:
        self.fabric = StandInFabric()
        self.run = RunConfig(run_id="r1", model="tiny", environment="gateway", **settings)
        self.policy: Policy | None = echo
        self.jobs: list[TurnJob] = []
        self.lost: list[str] = []
        self.held: list[TurnClaim] = []

    async def begin(self, group_size: int = 1) -> None:
        await self.fabric.board.create_run(self.run)
        lease = Lease(worker_id="w", run_id="r1", lease_epoch=1, slot_count=64, lease_until_ms=None)
        await set_lease(self.fabric.board, lease, None)
        self.fabric.tables_of("r1").head_version = 4
        (group,) = make_groups([{"word": "cat"}], group_size, ["g"])
        await self.fabric.rollouts(self.run).push([group])

    @contextlib.asynccontextmanager
    async def up(self, name: str = "a1", **settings: Any) -> AsyncIterator[Desk]:
        async def ask_reward(run_id: str, trajectory_id: str, fence: int, *, is_again: bool = False) -> None:
            await self.fabric.trajectories(self.run).score(trajectory_id, fence, 0.25)

        desk = Desk(**settings)
        config = AgentConfig(worker_id=name, runs_s=0.01, renew_s=0.05)
        worker = AgentWorker(
            self.fabric,
            RemoteWorlds(desk),
            config,
            SystemClock(),
            ask_reward=ask_reward,
            desk=desk,
            takes_what_is_opened=True,
        )
        stop = asyncio.Event()
        tasks = [asyncio.create_task(worker.run(stop)), asyncio.create_task(self._work())]
        try:
            await until(lambda: bool(desk._runs))
            yield desk
        finally:
            stop.set()
            await tasks[0]
            tasks[1].cancel()
            await asyncio.gather(tasks[1], return_exceptions=True)

    async def _work(self) -> None:
        turns = self.fabric.turns(self.run)
        while True:
            kept = [TurnProgress(claim=claim) for claim in self.held]
            exchange = await turns.exchange("w", progress=kept, want=64, lease_epoch=1, active_version=4)
            self.lost += exchange.lost
            self.held = [each for each in [*self.held, *exchange.claims] if each.job.turn_id not in exchange.lost]
            self.jobs += [claim.job for claim in exchange.claims]
            if self.policy is not None:
                ready, self.held = self.held, []
                await turns.exchange("w", settles=[self._settled(claim) for claim in ready])
            await asyncio.sleep(0.002)

    def _settled(self, claim: TurnClaim) -> TurnSettle:
        assert self.policy is not None
        ids = np.array(self.policy(claim.job), np.int32)
        reason = "stop" if len(ids) and ids[-1] == END else "length"
        made = made_of(ids, "w", 4)
        result = result_of(claim.job.turn_id, finish_reason=reason, context_digest=claim.job.context_digest, **made)
        return TurnSettle(claim=claim, result=result)

    async def group(self) -> Group:
        (delivery,) = await self.fabric.rollouts(self.run).receive("trainer", 1, 5.0)
        return delivery.group


async def opened(desk: Desk) -> Opened:
    return await desk.open("r1", wait_s=30.0)


@contextlib.asynccontextmanager
async def one_session(*, answers: bool = True, **settings: Any) -> AsyncIterator[tuple[Gateway, Any]]:
    """A session, open, of a gateway that answers its calls, or leaves them until it has a policy."""
    gateway = Gateway(**settings)
    await gateway.begin()
    if not answers:
        gateway.policy = None
    async with gateway.up() as desk:
        yield gateway, (await opened(desk)).session


def content(reply: Reply) -> list[Any]:
    return [each.message.get("content") for each in reply.completions]


def branches(rollout: Rollout) -> list[str]:
    """Each branch's text, what the policy made in brackets."""
    shown = []
    for branch in rollout.branches():
        ids = np.concatenate((branch.prompt_ids, branch.completion_ids))
        mask = np.concatenate((np.zeros(len(branch.prompt_ids), np.uint8), branch.completion_mask))
        parts = [
            f"[{TEXT.decode([each])}]" if made else TEXT.decode([each]) for each, made in zip(ids, mask, strict=True)
        ]
        shown.append("".join(parts).replace("][", ""))
    return shown


async def test_a_session_s_calls_become_a_token_exact_rollout() -> None:
    gateway = Gateway()
    await gateway.begin()
    async with gateway.up() as desk:
        # When an agent opens a session, and goes on with what it was answered
        session = (await opened(desk)).session
        assert (session.facts.task, session.facts.model, session.facts.attempt) == ({"word": "cat"}, "tiny", 0)
        first = await session.ask(Call(messages=[user("hi")]))
        going_on = Call(messages=[user("hi"), first.completions[0].message, user("on")])
        counted = await session.count(going_on)  # which asks for nothing
        second = await session.ask(going_on)
        session.reward(0.5)
        await session.end(info={"won": True})
        # Then the rollout is in the broker by the time that `end` returns
        (rollout,) = (await gateway.group()).rollouts
    assert (content(first), content(second)) == (["hi/0"], ["on/1"])
    assert [each.text for each in first.completions[0].tokens] == ["h", "i", "/", "0", "</s>"]
    assert first.completions[0].finish == "stop" and first.prompt_token_count == 5
    assert counted == second.prompt_token_count == 5 + 5 + 5
    assert (rollout.reward, rollout.turn_count, rollout.finish_reason) == (0.5, 2, "terminated")
    assert rollout.info == {"won": True, "rewards": [0.5]}
    assert branches(rollout) == ["uhi\na[hi/0]uon\na[on/1]"]
    assert {(span.worker_id, span.policy_version) for span in rollout.spans} == {("w", 4)}


async def test_tools_samples_edits_and_text_are_branches_of_one_rollout() -> None:
    async with one_session() as (gateway, session):
        gateway.policy = lambda job: [CALL_ID, END]
        call = (await session.ask(Call(messages=[user("q")], tools=[LOOK]))).completions[0]
        assert call.finish == "tool_calls"
        result = {"role": "tool", "content": "7", "tool_call_id": call.message["tool_calls"][0]["id"]}
        gateway.policy = said("7")
        await session.ask(Call(messages=[user("q"), call.message, result], tools=[LOOK]))
        gateway.policy = lambda job: said(job.turn_id[-1])(job)
        two = await session.ask(Call(messages=[user("n")], count=2))
        assert sorted(map(str, content(two))) == ["2", "3"]
        edited = {**two.completions[0].message, "content": "x"}
        await session.ask(Call(messages=[user("n"), edited, user("m")]))
        gateway.policy = lambda job: TEXT.encode("bc").tolist()
        text = await session.ask(Call(text="a"))
        assert (text.completions[0].text, text.completions[0].finish) == ("bc", "length")
        await session.ask(Call(text="abcd"))  # a text that was cut goes on
        session.reward(1)
        await session.end()
        (rollout,) = (await gateway.group()).rollouts
    assert rollout.turn_count == 7
    assert branches(rollout) == [
        "flook uq\na[�]t7\na[7]",
        "un\na[2]",
        "un\na[3]",
        "un\naxum\na[4]",
        "a[bc]d[bc]",
    ]


async def test_who_comes_back_gets_the_answer_and_who_asks_again_another_one() -> None:
    async with one_session(answers=False) as (gateway, session):
        call = Call(messages=[user("hi")])
        # Given a call whose client goes away before the answer is there
        asking = asyncio.create_task(session.ask(call))
        await until(lambda: bool(gateway.jobs))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        # When it asks again, as clients do, then it gets that turn's answer
        asking = asyncio.create_task(session.ask(call))
        await asyncio.sleep(0)
        gateway.policy = echo
        assert content(await asking) == ["hi/0"]
        # And when it says that it repeats, the same, though that was received; else another sample
        assert content(await session.ask(dataclasses.replace(call, is_repeated=True))) == ["hi/0"]
        assert content(await session.ask(call)) == ["hi/1"]
        keyed = [await session.ask(dataclasses.replace(call, key=key)) for key in ("k", "k", "l")]
        assert list(map(content, keyed)) == [["hi/2"], ["hi/2"], ["hi/3"]]
        assert keyed[0].call_id == keyed[1].call_id != keyed[2].call_id
        session.reward(0)
        await session.end()
        (rollout,) = (await gateway.group()).rollouts
    assert rollout.turn_count == len(gateway.jobs) == 4


async def test_a_call_that_nobody_waits_for_frees_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RETURN_S", 0.01)
    async with one_session(answers=False) as (gateway, session):
        call = Call(messages=[user("hi")], count=2)
        asking = asyncio.create_task(session.ask(call))
        await until(lambda: len(gateway.jobs) == 2)
        asking.cancel()
        # Then the worker that makes its turns loses them
        await until(lambda: sorted(gateway.lost) == ["g.0.0", "g.0.1"])
        # And the same call is made anew
        gateway.policy = echo
        assert sorted(map(str, content(await session.ask(call)))) == ["hi/2", "hi/3"]
        session.reward(0)
        await session.end()
        assert (await gateway.group()).rollouts[0].turn_count == 2


class Switch:
    """Takes the broker away from an agent's part of the fabric, and brings it back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_away = False
        for queue, name in ((RedisTurnQueue, "push"), (RedisTurnQueue, "results"), (RedisTrajectoryQueue, "settle")):
            monkeypatch.setattr(queue, name, self._switched(getattr(queue, name)))
        monkeypatch.setattr(keeper_module, "BROKER_PAUSE_S", 0.01)

    def _switched(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        async def asked(*values: Any, **named: Any) -> Any:
            if self.is_away:
                raise BrokerError("away")
            return await ask(*values, **named)

        return asked


async def test_who_waits_while_the_broker_is_away_is_told_and_what_it_repeats_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "RETURN_S", 0.01)
    monkeypatch.setattr(session_module, "AWAY_S", 0.2)
    broker, gateway, call = Switch(monkeypatch), Gateway(), Call(messages=[user("hi")])
    await gateway.begin()
    async with gateway.up(broker_wait_s=1.0) as desk:
        one = await opened(desk)
        # Given a call that waits for a broker which does not answer: its client is told to ask again
        broker.is_away = True
        with pytest.raises(BrokerError, match="has not answered for 1 s"):
            await one.session.ask(call)
        # When it comes back, though only after a while, then it gets the answer of the turn that it asked for first
        await asyncio.sleep(0.1)
        asking = asyncio.create_task(one.session.ask(dataclasses.replace(call, is_repeated=True)))
        await asyncio.sleep(0)
        broker.is_away = False
        assert content(await asking) == ["hi/0"]
        # And its end is told likewise, and is one
        broker.is_away = True
        with pytest.raises(BrokerError):
            await one.session.end(reward=1)
        with pytest.raises(BrokerError):
            await desk.find_recorded(one.key)
        broker.is_away = False
        await one.session.end(reward=1)
        (rollout,) = (await gateway.group()).rollouts
    assert rollout.turn_count == len(gateway.jobs) == 1


async def test_a_call_in_an_agent_worker_waits_until_the_broker_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "AWAY_S", 0.01)
    broker = Switch(monkeypatch)
    async with one_session() as (_, session):
        broker.is_away = True
        asking = asyncio.create_task(session.ask(Call(messages=[user("hi")])))
        await asyncio.wait([asking], timeout=0.2)
        assert not asking.done()
        broker.is_away = False
        assert content(await asking) == ["hi/0"]


async def test_an_agent_that_does_the_same_again_gets_the_same_after_its_worker_was_lost() -> None:
    gateway = Gateway()
    await gateway.begin()
    async with gateway.up("a1") as desk:
        session = (await opened(desk)).session
        first = await session.ask(Call(messages=[user("hi")]))
        await session.ask(Call(messages=[user("other")]))
        gateway.policy = None
        asking = asyncio.create_task(session.ask(Call(messages=[user("late")])))
        await until(lambda: len(gateway.jobs) == 3)
    # Given an agent worker that left in the middle of a call
    assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], (ClaimLost, asyncio.CancelledError))
    gateway.policy = echo
    async with gateway.up("a2") as desk:
        # When the agent begins again, elsewhere, and in another order
        session = (await opened(desk)).session
        fresh = await session.ask(Call(messages=[user("new")]))
        again = await session.ask(Call(messages=[user("hi")]))
        late = await session.ask(Call(messages=[user("late")]))
        session.reward(1)
        await session.end()
        (rollout,) = (await gateway.group()).rollouts
    # Then what was made before is not made again, and what it did not ask for again is no part of the rollout
    assert (content(again), content(late)) == (content(first), ["late/2"])
    assert content(fresh) == ["new/3"]
    assert len(gateway.jobs) == 4
    assert branches(rollout) == ["unew\na[new/3]", "uhi\na[hi/0]", "ulate\na[late/2]"]


async def test_a_lost_claim_ends_the_session_and_its_key() -> None:
    gateway = Gateway()
    await gateway.begin()
    async with gateway.up() as desk:
        one = await opened(desk)
        assert desk.find(one.key) is one.session
        assert desk.find(one.key + "x") is None
        asking = asyncio.create_task(one.session.ask(Call(messages=[user("hi")])))
        gateway.policy = None
        await gateway.fabric.rollouts(gateway.run).cancel("g")
        await until(lambda: desk.find(one.key) is None)
        await asyncio.gather(asking, return_exceptions=True)
        with pytest.raises(ClaimLost, match=r"session g\.0 is over"):
            await one.session.ask(Call(messages=[user("hi")]))
        with pytest.raises(ClaimLost):
            await one.session.end(error="never mind")


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (Call(messages=[]), InputError, "at least one message"),
        (Call(messages=[{"role": "u"}]), InputError, "message 0"),
        (Call(messages=[user("x")], count=0), InputError, "n is 0"),
        (Call(messages=[user("x")], count=129), InputError, "n is 129"),
        (Call(messages=[user("x")], sampling={"temperature": -1}), InputError, "temperature"),
        (Call(messages=[user("x")], sampling={"temprature": 1}), InputError, "temprature"),
        (
            Call(messages=[user("x")], tools=[LOOK], choice=ToolChoice(is_forced=True)),
            InputError,
            "tool_choice: .*preset",
        ),
        (Call(messages=[user("x"), {"role": "assistant", "content": "y"}]), InputError, "the assistant's"),
        (Call(text=""), InputError, "prompt"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused_and_costs_nothing(
    call: Call, error: type[Exception], told: str
) -> None:
    async with one_session() as (_, session):
        with pytest.raises(error, match=told):
            await session.ask(call)
        assert content(await session.ask(Call(messages=[user("hi")]))) == ["hi/0"]


async def test_how_tools_are_to_be_called_is_part_of_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a template that has a grammar for each choice
    def tag(self: ChatTemplate, choice: ToolChoice, tools: Any, *, prompt: str) -> str:
        return "" if choice == FREE else json.dumps({"asked": [choice.name, len(tools)]})

    monkeypatch.setattr(ChatTemplate, "tag", tag)
    free = Call(messages=[user("hi")], tools=[LOOK], is_repeated=True)
    named = dataclasses.replace(free, choice=ToolChoice(is_forced=True, name="look"))
    async with one_session() as (gateway, session):
        # When the same messages are asked with and without a choice, then only the same choice is a repetition
        replies = [await session.ask(each) for each in (free, named, free, named)]
        assert [text[-1:] for each in replies for text in content(each)] == ["0", "1", "0", "1"]
        assert [job.sampling.guided_tag for job in gateway.jobs] == ["", '{"asked": ["look", 1]}']
        # And an answer cannot be two things
        with pytest.raises(InputError, match="tool_choice cannot be kept beside response_format"):
            await session.ask(dataclasses.replace(named, sampling={"guided_json": {"type": "object"}}))


async def test_a_choice_is_refused_where_the_run_guides_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplate, "tag", lambda self, choice, tools, *, prompt: "{}")
    gateway = Gateway(sampling={"guided_regex": "a+"})
    await gateway.begin()
    async with gateway.up() as desk:
        with pytest.raises(InputError, match="where the run guides"):
            await (await opened(desk)).session.ask(Call(messages=[user("hi")]))


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


async def test_values_nested_as_deeply_as_a_request_may_be_are_rendered_or_refused() -> None:
    async with one_session() as (_, session):
        await session.ask(Call(messages=[user("x")], options=nested(250)))
        for depth, is_taken in ((150, True), (450, False)):  # a text's depth is bounded by no reader of requests
            function = {"name": "look", "arguments": json.dumps(nested(depth))}
            asked = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
            told = {"role": "tool", "tool_call_id": "c", "content": "x"}
            call = Call(messages=[user("x"), asked, told], tools=[LOOK])
            with contextlib.nullcontext() if is_taken else pytest.raises(InputError, match="no text of a JSON object"):
                await session.ask(call)


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (Call(text="t" * 20_000, size_bytes=session_module.BRIEF + 1), "asyncio"),
        (Call(messages=[user("x")], tools=[LOOK], size_bytes=session_module.BRIEF + 1), "asyncio"),
        (Call(messages=[user("x")], size_bytes=session_module.BRIEF), "MainThread"),
        (Call(text="t", size_bytes=session_module.HUGE + 1), "huge-ask"),
        (Call(messages=[user("x")], size_bytes=session_module.HUGE + 1), "huge-ask"),
    ],
)
async def test_a_large_request_is_rendered_where_the_loop_goes_on(
    call: Call, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given: whatever makes the request large, its size is what counts
    places: list[str] = []

    def seen(work: Callable[..., Ask]) -> Callable[..., Ask]:
        def work_there(*values: Any) -> Ask:
            places.append(threading.current_thread().name)
            return work(*values)

        return work_there

    monkeypatch.setattr(Conversation, "ask", seen(Conversation.ask))
    monkeypatch.setattr(Conversation, "ask_text", seen(Conversation.ask_text))
    gateway = Gateway()
    gateway.policy = said("a")
    await gateway.begin()
    async with gateway.up() as desk:
        # When
        await (await opened(desk)).session.ask(call)
    # Then
    assert [each.startswith(place) for each in places] == [True]


async def test_a_chat_template_is_loaded_where_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []

    def chat_there(*values: Any) -> ChatTemplate:
        places.append(threading.current_thread().name)
        return chat_of(*values)

    monkeypatch.setattr(episode_module, "chat_of", chat_there)
    gateway = Gateway()
    await gateway.begin()
    async with gateway.up() as desk:
        await opened(desk)
    assert places and "MainThread" not in places


async def test_huge_requests_of_all_sessions_are_rendered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given: rendering that ends when the test says so
    begun, ended, is_free = [], [], threading.Event()
    work = Conversation.ask

    def ask(conversation: Conversation, messages: Any, *others: Any) -> Ask:
        begun.append(messages[0]["content"])
        is_free.wait(20)
        ended.append(messages[0]["content"])
        return work(conversation, messages, *others)

    gateway = Gateway()
    await gateway.begin(group_size=2)
    async with gateway.up() as desk:
        one, two = [(await opened(desk)).session for _ in range(2)]
        monkeypatch.setattr(Conversation, "ask", ask)
        size = session_module.HUGE + 1
        asking = [
            asyncio.create_task(session.ask(Call(messages=[user(text)], size_bytes=size)))
            for session, text in ((one, "a"), (one, "b"), (two, "c"))
        ]
        await until(lambda: len(begun) == 1)
        # When: one whose turn has not come is left by its client
        asking[1].cancel()
        await asyncio.wait([asking[1]])
        is_free.set()
        await asyncio.gather(asking[0], asking[2])
    # Then: it is never rendered; and none began before the other's end
    assert begun == ended == ["a", "c"]


async def test_turns_are_bounded_and_so_are_calls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CALL_COUNT_MAX", 2)
    async with one_session(turn_count_max=3, answers=False) as (gateway, session):
        asking = [asyncio.create_task(session.ask(Call(messages=[user(text)]))) for text in "ab"]
        await until(lambda: len(gateway.jobs) == 2)
        with pytest.raises(QueueFull, match="2 calls under way") as busy:
            await session.ask(Call(messages=[user("c")]))
        assert busy.value.facts["is_final"] is False
        gateway.policy = echo
        await asyncio.gather(*asking)
        with pytest.raises(QueueFull, match="turn_count_max") as over:
            await session.ask(Call(messages=[user("c")], count=2))
        assert over.value.facts["is_final"] is True
        assert content(await session.ask(Call(messages=[user("c")]))) == ["c/2"]


async def test_turns_that_an_earlier_life_asked_for_count_though_nobody_knew_of_them() -> None:
    # Given a gateway that was lost with all three turns under way
    gateway = Gateway(turn_count_max=3)
    await gateway.begin()
    gateway.policy = None
    async with gateway.up("a1") as desk:
        session = (await opened(desk)).session
        asking = [asyncio.create_task(session.ask(Call(messages=[user(text)]))) for text in "abc"]
        await until(lambda: len(gateway.jobs) == 3)
    await asyncio.gather(*asking, return_exceptions=True)
    async with gateway.up("a2") as desk:
        # When the session goes on elsewhere, before they are made, with another call
        session = (await opened(desk)).session
        gateway.policy = echo
        with pytest.raises(QueueFull, match="may ask for 3 completions in all") as over:
            await session.ask(Call(messages=[user("d")]))
        # Then the run's limit holds, and what was made is there
        assert over.value.facts["is_final"] is True
        assert content(await session.ask(Call(messages=[user("b")]))) == ["b/1"]
    assert len(gateway.jobs) == 3


async def test_an_engine_that_refuses_or_fails_is_told_of_and_may_be_asked_again() -> None:
    async with one_session(answers=False) as (gateway, session):
        for reason, error in (("refused", EngineUnsupported), ("error", EngineError)):
            asking = asyncio.create_task(session.ask(Call(messages=[user("hi")])))
            await until(lambda: bool(gateway.held))
            (claim,), gateway.held = gateway.held, []
            result = result_of(
                claim.job.turn_id, finish_reason=reason, error="it cannot", context_digest=claim.job.context_digest
            )
            await gateway.fabric.turns(gateway.run).exchange("w", settles=[TurnSettle(claim=claim, result=result)])
            with pytest.raises(error, match="it cannot"):
                await asking
        gateway.policy = echo
        assert content(await session.ask(Call(messages=[user("hi")]))) == ["hi/2"]


async def test_a_session_ends_with_calls_and_a_reward_or_says_why_it_failed() -> None:
    async with one_session(attempt_count_max=1) as (gateway, session):
        with pytest.raises(InputError, match="without a call to the model"):
            await session.end()
        await session.ask(Call(messages=[user("hi")]))
        with pytest.raises(InputError, match="no reward"):
            await session.end()
        with pytest.raises(InputError, match="finite"):
            session.reward(float("nan"))
        await session.end(error="the task's files are missing")
        (failure,) = (await gateway.group()).failures
    assert "its client says: the task's files are missing" in failure.reason


async def test_an_end_that_is_refused_changes_nothing() -> None:
    async with one_session() as (gateway, session):
        with pytest.raises(InputError, match="without a call to the model"):
            await session.end(reward=1)
        assert session.facts.reward is None
        await session.ask(Call(messages=[user("hi")]))
        session.reward(0.25)
        for wrong in ({"reward": float("nan")}, {"reward": 1, "info": {"text": "x" * INFO_BYTES_MAX}}):
            with pytest.raises(InputError):
                await session.end(**wrong)
        assert session.facts.reward == 0.25
        await session.end()
        assert (await gateway.group()).rollouts[0].reward == 0.25


async def test_who_lost_the_answer_to_its_end_may_ask_again_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given three sessions: ended with a reward, ended with an error, and lost without an end
    gateway = Gateway()
    await gateway.begin(group_size=3)
    async with gateway.up() as desk:
        good, void, lost = [await opened(desk) for _ in range(3)]
        for each in (good, void):
            await each.session.ask(Call(messages=[user("hi")]))
        good.session.reward(0.5)
        # When both ends are asked for, and one of them is asked about before it is recorded
        first = asyncio.create_task(good.session.end())
        await until(lambda: desk.find(good.key) is None)
        facts = await desk.find_recorded(good.key)
        await first
        await void.session.end(error="never mind")
        # Then they are known to have ended, and others not
        assert facts is not None and (facts.session_id, facts.reward, facts.call_count) == ("g.0", 0.5, 1)
        found = await desk.find_recorded(void.key)
        assert found is not None and found.session_id == void.session.facts.session_id
        assert await desk.find_recorded(lost.key) is None and desk.find(lost.key) is not None
        assert await desk.find_recorded("rfs-unknown") is None
        # And only the last ones are kept
        monkeypatch.setattr(desk_module, "OVER_COUNT_MAX", 2)
        await lost.session.ask(Call(messages=[user("hi")]))
        await lost.session.end(error="as well")
        assert await desk.find_recorded(lost.key) is not None and await desk.find_recorded(good.key) is None


async def test_an_end_that_is_repeated_while_it_is_recorded_is_one_end() -> None:
    async with one_session() as (gateway, session):
        await session.ask(Call(messages=[user("hi")]))
        ends = [session.end(reward=reward) for reward in (1, None, 1, 0.5)]
        *same, other, void = await asyncio.gather(*ends, session.end(error="fell"), return_exceptions=True)
        assert same == [None] * 3 and "with reward 1.0, not with reward 0.5" in str(other)
        assert "with reward 1.0, not with the error 'fell'" in str(void)
        with pytest.raises(InputError, match="ended already"):
            session.reward(0.5)
        (rollout,) = (await gateway.group()).rollouts
        assert rollout.reward == 1


async def test_a_reward_after_the_end_is_refused_though_nothing_is_recorded_yet() -> None:
    async with one_session() as (gateway, session):
        await session.ask(Call(messages=[user("hi")]))
        ending = asyncio.create_task(session.end(reward=1))
        await asyncio.sleep(0)
        assert not ending.done()
        session.reward(1)  # as it was
        with pytest.raises(
            InputError, match=r"ended already, with reward 1\.0, not with reward 0\.5: the first end counts"
        ):
            session.reward(0.5)
        await ending
        (rollout,) = (await gateway.group()).rollouts
        assert (rollout.reward, session.facts.reward) == (1, 1)


async def test_an_end_that_was_not_recorded_is_not_said_to_be() -> None:
    gateway = Gateway()
    await gateway.begin()
    async with gateway.up() as desk:
        one = await opened(desk)
        await one.session.ask(Call(messages=[user("hi")]))
        one.session.reward(0.5)
        # Given that its claim is lost before its rollout is taken
        await gateway.fabric.rollouts(gateway.run).cancel("g")
        with pytest.raises(ClaimLost):
            await one.session.end()
        assert await desk.find_recorded(one.key) is None


async def test_a_reward_function_scores_what_sessions_made() -> None:
    async with one_session(reward="success") as (gateway, session):
        await session.ask(Call(messages=[user("hi")]))
        await session.end()
        (rollout,) = (await gateway.group()).rollouts
    assert rollout.reward == 0.25


async def test_a_silent_session_fails_and_its_trajectory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    await gateway.begin()
    monkeypatch.setattr(session_module.AgentSession.__init__, "__kwdefaults__", {"idle_s_max": 0.05})
    async with gateway.up() as desk:
        one = await opened(desk)
        await until(lambda: desk.find(one.key) is None)
        again = await opened(desk)
    assert (again.session.facts.session_id, again.session.facts.attempt) == ("g.0", 1)


async def test_a_session_is_not_silent_while_its_call_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module.AgentSession.__init__, "__kwdefaults__", {"idle_s_max": 0.05})
    render, may_go_on = session_module.AgentSession._ask, asyncio.Event()

    async def rendered_late(self: session_module.AgentSession, call: Call) -> Ask:
        await may_go_on.wait()
        return await render(self, call)

    monkeypatch.setattr(session_module.AgentSession, "_ask", rendered_late)
    gateway = Gateway()
    await gateway.begin(2)
    async with gateway.up() as desk:
        # Given a session whose call is rendered for longer than it may be silent: a later one has ended meanwhile
        busy = (await opened(desk)).session
        asking = asyncio.create_task(busy.ask(Call(messages=[user("hi")])))
        silent = await opened(desk)
        await until(lambda: desk.find(silent.key) is None)
        # Then it gets its answer
        may_go_on.set()
        assert content(await asking) == ["hi/0"]


async def test_who_leaves_again_may_come_back_for_as_long_again() -> None:
    async with one_session(answers=False) as (_, session):
        assert isinstance(session, session_module.AgentSession)
        timers = []
        for _ in range(2):
            asking = asyncio.create_task(session.ask(Call(messages=[user("hi")])))
            await until(lambda: any(given.taker_count for calls in session._given.values() for given in calls))
            asking.cancel()
            await asyncio.wait([asking])
            ((given,),) = session._given.values()
            timers.append(given.giving_up)
        first, second = timers
        assert first is not None and second is not None
        assert first.cancelled() and not second.cancelled()


async def test_a_session_without_an_answer_says_what_its_last_call_was_refused_with() -> None:
    async with one_session(attempt_count_max=1) as (_, session):
        session.reward(1)
        with pytest.raises(InputError, match="without a call to the model"):
            await session.end()
        session.note_refusal("400 invalid_request: there is no field 'tempature'")
        with pytest.raises(InputError, match="its last call was refused with 400 invalid_request: there is no field"):
            await session.end()
        assert isinstance(session, session_module.AgentSession)
        with pytest.raises(EnvironmentFailed, match=r"without an answer of the model: .* 400 invalid_request: there"):
            session.record()
        await session.ask(Call(messages=[user("hi")]))
        await session.end()


async def test_a_trajectory_is_claimed_only_where_somebody_opens_a_session() -> None:
    gateway = Gateway()
    await gateway.begin(group_size=3)
    trajectories = gateway.fabric.tables_of("r1").trajectories
    async with gateway.up() as desk:
        assert trajectories.held == {}
        two = [await opened(desk) for _ in range(2)]
        assert trajectories.held == {"a1": 2}
        assert {each.session.facts.session_id for each in two} == {"g.0", "g.1"}
        assert two[0].key != two[1].key
        await opened(desk)
        with pytest.raises(QueueFull, match="no trajectory of run r1 came within"):
            await desk.open("r1", wait_s=0.05)
        with pytest.raises(RunUnknown, match="no run 'r2'"):
            await desk.open("r2", wait_s=0.05)
