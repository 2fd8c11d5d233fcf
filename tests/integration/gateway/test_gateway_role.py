"""`rollfab gateway` from outside: sessions opened over HTTP, played with unmodified clients, recorded exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.integration.gateway.exactness import check_exact
from tests.support.processes.fabric_processes import processes
from tests.support.processes.gateway_process import Gateway, running_gateway, user

pytest.importorskip("torch")
pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]


BIAS = 3.0


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("gateway")
    with processes(directory) as fabric:
        fabric.start("controller", "controller", "--name", "controller")
        fabric.start("dedicated", "worker")
        with running_gateway(fabric, directory) as gateway:
            fabric.wait_for_role("controller", "dedicated")
            yield gateway


def test_a_session_is_a_trajectory(gateway: Gateway) -> None:
    run = gateway.fabric.new_run("one", "gateway", is_lively=True)
    run.submit([{"word": "cat"}], group_size=1)
    session = gateway.open("one")
    assert session.facts["task"] == {"word": "cat"}
    # When an agent goes on, asks for samples, streams, and asks the same again
    first = session.say(user("hi"))
    session.say(user("hi"), first.choices[0].message, user("on"), n=2)
    streamed = session.say(user("stream"), stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text
    repeated = session.say(user("hi"), extra_headers={"x-stainless-retry-count": "1"})
    assert repeated.id == first.id
    ended = session.end(reward=0.5, info={"won": True})
    assert (ended.status_code, ended.json()["state"]) == (200, "over")
    # Then its rollout is there, exact, with four completions
    (group,) = gateway.fabric.collect(run, 1, 30.0)
    (rollout,) = group.rollouts
    check_exact(rollout)
    assert (rollout.turn_count, rollout.reward, rollout.info["won"]) == (4, 0.5, True)
    # And the key is nobody's any more
    with pytest.raises(openai.AuthenticationError):
        session.say(user("hi"))


@pytest.mark.fault
def test_calls_survive_the_loss_of_their_workers(gateway: Gateway) -> None:
    # Given what greedy sessions say undisturbed
    fabric, count = gateway.fabric, 4
    sampling = {"temperature": 0.0, "max_tokens": 200, "logprobs": 3}

    runs = {name: fabric.new_run(name, "gateway", is_lively=True, sampling=sampling) for name in ("calm", "killed")}

    async def talk(run_id: str) -> list[str]:
        runs[run_id].submit([{"n": index} for index in range(count)], group_size=1)

        async def one(index: int) -> str:
            session = await asyncio.to_thread(gateway.open, run_id)
            base_url = gateway.url + session.facts["path"]
            async with openai.AsyncOpenAI(base_url=base_url, api_key=session.facts["key"]) as client:
                reply = await client.chat.completions.create(model="any", messages=[user(f"tell {index}")])
            await asyncio.to_thread(session.end, reward=1.0)
            return str(reply.choices[0].message.content)

        return await asyncio.gather(*map(one, range(count)))

    calm = asyncio.run(talk("calm"))

    async def killing() -> list[str]:
        talking = asyncio.create_task(talk("killed"))
        for _ in range(3):
            await asyncio.to_thread(
                fabric.until,
                lambda: talking.done() or fabric.claimed_by(runs["killed"], "dedicated"),
                60.0,
                "the worker has a turn of the run in hand",
            )
            fabric.kill("dedicated")
        await asyncio.to_thread(fabric.until, talking.done, 90.0, "all calls are answered")
        return await talking

    # When their worker is killed in the middle, again and again: then every call completes, and says the same
    assert asyncio.run(killing()) == calm
    (run_status,) = [fabric.ask(lambda ports: ports.board.run_status("killed"))]
    assert run_status.counters["turns_settled"] == count
    assert run_status.counters.get("turns_resumed", 0) > 0
    # And what was recorded beside tokens is there for all of them, whichever worker made them
    for group in fabric.collect(runs["killed"], count, 30.0):
        for rollout in group.rollouts:
            check_exact(rollout)
            assert {side.name for side in rollout.sides} == {"top_ids", "top_logprobs"}


@pytest.mark.fault
def test_a_killed_gateway_ends_its_sessions_and_nothing_that_was_made_is_made_again(gateway: Gateway) -> None:
    run = gateway.fabric.new_run("lost", "gateway", is_lively=True, sampling={"seed": 3})
    run.submit([{}], group_size=1)
    session = gateway.open("lost")
    first = session.say(user("hi")).choices[0].message.content
    gateway.fabric.kill("gateway")
    gateway.fabric.until(lambda: not gateway.answers(), 10.0, "it is gone")
    gateway.fabric.until(gateway.answers, 60.0, "it is back")
    with pytest.raises(openai.AuthenticationError):
        session.say(user("hi"))
    fresh = gateway.open("lost")
    assert fresh.facts["session"] == session.facts["session"]
    assert fresh.say(user("hi")).choices[0].message.content == first
    fresh.end(reward=1)
    (group,) = gateway.fabric.collect(run, 1, 30.0)
    assert group.rollouts[0].turn_count == 1
    status = gateway.fabric.ask(lambda ports: ports.board.run_status("lost"))
    assert status.counters["turns_settled"] == 1


@pytest.mark.parametrize("way", ["responses", "chat"])
def test_an_agent_framework_plays_unchanged(gateway: Gateway, way: str) -> None:
    import agents

    # Given an agent of openai-agents with a tool, as its documentation writes one
    # and a model whose answers end by themselves: a cut one is the framework's error
    sampling = {"max_tokens": 64, "logit_bias": {"2": BIAS}, "seed": 5}
    run = gateway.fabric.new_run(f"framework-{way}", "gateway", is_lively=True, sampling=sampling)
    run.submit([{}], group_size=1, group_ids=["framework"])
    session = gateway.open(run.run_id)
    client = openai.AsyncOpenAI(base_url=gateway.url + session.facts["path"], api_key=session.facts["key"])
    model_of = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}[way]

    @agents.function_tool
    def look(place: str) -> str:
        """Say what is there."""
        return f"nothing at {place}"

    agent = agents.Agent(name="a", instructions="Help.", tools=[look], model=model_of("policy", client))
    agents.set_tracing_disabled(True)

    # When it talks for two rounds with a model of random weights
    async def talk() -> list[str]:
        said, asked = [], [user("hi")]
        async with client:
            for _ in range(2):
                result = await agents.Runner.run(agent, asked, max_turns=4)  # type: ignore[arg-type]
                said.append(str(result.final_output))
                asked = [*result.to_input_list(), user("and then?")]  # type: ignore[list-item]
        return said

    assert len(asyncio.run(talk())) == 2
    assert session.end(reward=1).status_code == 200
    # Then what it said is in an exact rollout
    (group,) = gateway.fabric.collect(run, 1, 30.0)
    (rollout,) = group.rollouts
    check_exact(rollout, bias={2: BIAS})
    assert rollout.turn_count >= 2


def test_anthropic_s_client_plays_unchanged(gateway: Gateway) -> None:
    run = gateway.fabric.new_run("anthropic", "gateway", is_lively=True)
    run.submit([{}], group_size=1)
    session = gateway.open("anthropic")
    path = session.facts["path"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=gateway.url + path, api_key=session.facts["key"]) as client:
        asked: list[Any] = [user("hi")]
        reply = client.messages.create(model="policy", max_tokens=8, messages=asked)
        asked += [{"role": "assistant", "content": reply.content}, user("on")]
        with client.messages.stream(model="policy", max_tokens=8, messages=asked) as stream:
            assert stream.get_final_message().usage.output_tokens > 0
    assert session.end(reward=1).status_code == 200
    (group,) = gateway.fabric.collect(run, 1, 30.0)
    check_exact(group.rollouts[0])
    assert group.rollouts[0].turn_count == 2


def test_a_session_of_one_run_cannot_touch_another(gateway: Gateway) -> None:
    runs = [gateway.fabric.new_run(name, "gateway", is_lively=True) for name in ("mine", "yours")]
    for run in runs:
        run.submit([{}], group_size=1)
    mine, yours = gateway.open("mine"), gateway.open("yours")
    foreign = {"authorization": f"Bearer {mine.facts['key']}"}
    for path, body in (("end", {"reward": 1}), ("reward", {"reward": 1})):
        answer = httpx.post(f"{gateway.url}/sessions/{yours.facts['session']}/{path}", json=body, headers=foreign)
        unknown = httpx.post(f"{gateway.url}/sessions/none.0/{path}", json=body, headers=foreign)
        assert (answer.status_code, answer.json()) == (401, unknown.json())
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=gateway.url + yours.facts["path"], api_key=mine.facts["key"]).models.list()
    assert [each.id for each in mine.client.models.list()] == ["tiny"]
    for session in (mine, yours):
        assert session.end(error="a test").status_code == 200


def test_who_opens_where_nothing_is_waits_and_is_told(gateway: Gateway) -> None:
    gateway.fabric.new_run("empty", "gateway")
    answers = [gateway.http.post("/sessions", json={"run": name, "wait_s": 0.2}) for name in ("empty", "nowhere")]
    assert [each.status_code for each in answers] == [429, 404]
    assert "no trajectory of run empty" in answers[0].json()["error"]["message"]
    assert answers[0].headers["retry-after"]
