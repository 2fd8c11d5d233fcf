"""The unmodified openai client's chat completions, whole and streamed, and what it does about errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rollfab.fabric.chat.choice import FREE, ToolChoice
from rollfab.fabric.contract.errors import (
    BrokerError,
    ClaimLost,
    EngineError,
    EngineUnsupported,
    InputError,
    PayloadTooLarge,
    QueueFull,
)
from rollfab.fabric.ports.sessions import Completion, Token
from tests.support.fake_sessions import KEY, FakeSessions, completion, tool_call
from tests.support.until import until

ASK = [{"role": "user", "content": "?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


async def test_an_answer_has_its_text_its_tokens_and_what_it_cost(
    sessions: FakeSessions, client: openai.AsyncOpenAI
) -> None:
    # When a chat is asked for, with much of what can be said about sampling
    sessions.session.script.append([completion("é�", reasoning_content="hm"), completion("", finish="length")])
    answer = await client.chat.completions.create(
        model="whatever",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, *ASK],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": 1},
        stop="\n",
        seed=3,
        n=2,
        logprobs=True,
        user="me",
        store=False,
        metadata={"a": "b"},
        parallel_tool_calls=True,
        extra_body={"top_k": -1, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}},
    )

    # Then the session was asked for just this
    (call,) = sessions.session.calls
    assert call.messages == [{"role": "developer", "content": "be brief"}, *ASK]
    assert call.sampling == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"5": 1},
        "stop": ["\n"],
        "seed": 3,
    }
    assert (call.count, call.options, call.key, call.is_repeated) == (2, {"enable_thinking": False}, "", False)

    # And its answers came through
    first, second = answer.choices
    assert (first.message.content, first.finish_reason) == ("é�", "stop")
    assert first.message.model_extra == {"reasoning_content": "hm"}
    assert (second.message.content, second.finish_reason) == (None, "length")
    assert first.logprobs is not None and first.logprobs.content is not None
    assert [(each.token, each.bytes, each.logprob) for each in first.logprobs.content] == [
        ("é", [0xC3, 0xA9], -0.5),
        ("�", None, -0.5),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (11, 3, 14)
    assert (answer.model, answer.id, answer.system_fingerprint) == ("org/model", "chatcmpl-group.0.1", "policy-3")


async def test_likeliest_tokens_are_told_as_many_as_were_asked_for(
    sessions: FakeSessions, client: openai.AsyncOpenAI
) -> None:
    # Given an answer of one token, in a run that records more than is asked for
    top = [Token(text=text, logprob=-index) for index, text in enumerate("abc", 1)]
    answer = Completion(
        message={"content": "b"}, text="b", finish="stop", tokens=[Token(text="b", logprob=-2, top=top)]
    )
    sessions.session.script += [[answer]] * 3

    chat = await client.chat.completions.create(model="m", messages=ASK, logprobs=True, top_logprobs=2)
    bare = await client.chat.completions.create(model="m", messages=ASK, logprobs=True)
    text = await client.completions.create(model="m", prompt="p", logprobs=1)

    (told,) = chat.choices[0].logprobs.content  # type: ignore[union-attr, misc]
    assert [(each.token, each.logprob, each.bytes) for each in told.top_logprobs] == [("a", -1, [97]), ("b", -2, [98])]
    assert bare.choices[0].logprobs.content[0].top_logprobs == []  # type: ignore[union-attr, index]
    assert text.choices[0].logprobs.top_logprobs == [{"a": -1, "b": -2}], "the one that was chosen, too"  # type: ignore[union-attr]
    assert [call.sampling for call in sessions.session.calls] == [{"logprobs": 2}, {}, {"logprobs": 1}]


async def test_tools_are_called_and_their_results_come_back(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    # Given an answer with calls
    called = completion("", finish="tool_calls", tool_calls=[tool_call("look", '{"at": 1}')])
    sessions.session.script.append([called])
    answer = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, tool_choice="auto")
    message = answer.choices[0].message
    assert message.tool_calls and message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.arguments == '{"at": 1}'

    # When the client's own copy of it goes back, with all the keys that the client writes out
    result = {"role": "tool", "tool_call_id": "call_1", "content": "seen"}
    await client.chat.completions.create(
        model="m", messages=[*ASK, message.model_dump(), result], tools=TOOLS, tool_choice="none"
    )

    # Then the session sees the message as it was made
    assert list(sessions.session.calls[1].messages or ()) == [*ASK, dict(called.message), result]
    assert sessions.session.calls[0].tools == TOOLS
    assert not sessions.session.calls[1].tools


async def test_how_tools_are_to_be_called_is_told_to_the_session(
    sessions: FakeSessions, client: openai.AsyncOpenAI
) -> None:
    named = {"type": "function", "function": {"name": "look"}}
    asked: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": named, "parallel_tool_calls": True},
        {"tool_choice": {"type": "auto"}, "parallel_tool_calls": False},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "none", "parallel_tool_calls": False},
    ]
    for fields in asked:
        await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, extra_body=fields)
    await client.chat.completions.create(model="m", messages=ASK, parallel_tool_calls=False)  # nothing to call
    assert [each.choice for each in sessions.session.calls] == [
        ToolChoice(is_forced=True),
        ToolChoice(is_forced=True, name="look"),
        ToolChoice(is_single=True),
        ToolChoice(is_forced=True, is_single=True),
        FREE,
        FREE,
    ]
    assert [bool(each.tools) for each in sessions.session.calls] == [True] * 4 + [False] * 2


async def test_a_stream_says_what_the_whole_says(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    # Given an answer of many words with reasoning, and one that calls two tools
    text = " It is said: one,\n two – three … and so on, and on, and on.\n"
    calls = [tool_call("look", "{}", "call_1"), tool_call("look", '{"at": 2}', "call_2")]
    sessions.session.script.append(
        [completion(text, reasoning_content="hm hm"), completion("", finish="tool_calls", tool_calls=calls)]
    )

    # When it is streamed
    async with client.chat.completions.stream(
        model="m", messages=ASK, n=2, tools=TOOLS, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()

    # Then its parts make up the same answers
    assert final.choices[0].message.content == text
    assert 4 <= sum(event.type == "content.delta" and bool(event.delta) for event in events) <= 8
    assert final.choices[0].logprobs is not None and final.choices[0].logprobs.content is not None
    assert "".join(each.token for each in final.choices[0].logprobs.content) == text
    assert final.choices[1].finish_reason == "tool_calls"
    made = final.choices[1].message.tool_calls or []
    assert [(each.id, each.function.arguments) for each in made] == [("call_1", "{}"), ("call_2", '{"at": 2}')]
    assert final.usage is not None and final.usage.completion_tokens == len(text) + 1


async def test_a_schema_guides_the_answer(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    class Found(BaseModel):
        at: int

    sessions.session.script.append([completion('{"at": 4}')])
    answer = await client.chat.completions.parse(model="m", messages=ASK, response_format=Found)
    assert answer.choices[0].message.parsed == Found(at=4)
    assert '"at"' in sessions.session.calls[0].sampling["guided_json"]
    await client.chat.completions.create(model="m", messages=ASK, response_format={"type": "json_object"})
    assert sessions.session.calls[1].sampling == {"guided_json": '{"type": "object"}'}


async def test_the_synchronous_client_is_answered(sessions: FakeSessions, base: str) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=f"{base}v1", api_key=KEY) as client:
            return client.chat.completions.create(model="m", messages=ASK).choices[0].message.content

    assert await asyncio.to_thread(ask) == "two words"


@pytest.mark.parametrize(
    ("error", "kind", "status", "code", "words"),
    [
        (InputError("top_p is 3", name="top_p"), openai.BadRequestError, 400, "invalid_request", "top_p is 3"),
        (InputError("long", is_over_context=True), openai.BadRequestError, 400, "context_length_exceeded", "long"),
        (EngineUnsupported("http://box:1 cannot"), openai.BadRequestError, 400, "invalid_request", "(address) cannot"),
        (PayloadTooLarge("big"), openai.APIStatusError, 413, "payload_too_large", "big"),
        (QueueFull("busy"), openai.RateLimitError, 429, "rate_limit_exceeded", "busy"),
        (QueueFull("spent", is_final=True), openai.BadRequestError, 400, "budget_exhausted", "spent"),
        (ClaimLost("worker-7 has it"), openai.APIStatusError, 410, "session_over", "over"),
        (BrokerError("redis://box:6379 is gone"), openai.InternalServerError, 503, "unavailable", "try again"),
        (EngineError("worker-7 fell over"), openai.InternalServerError, 502, "engine_failed", "try again"),
        (ZeroDivisionError("secret prompt"), openai.InternalServerError, 500, "internal_error", "log"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_error_has_its_status_and_says_nothing_of_the_inside(
    sessions: FakeSessions,
    client: openai.AsyncOpenAI,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
    words: str,
    is_stream: bool,
) -> None:
    sessions.session.script.append(error)
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(model="m", messages=ASK, stream=is_stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    told = str(caught.value.body)
    assert words in told
    for secret in ("redis", "worker-7", "secret", "Traceback", "box"):
        assert secret not in told
    assert "secret prompt" not in caplog.text and KEY not in caplog.text


async def test_a_client_tries_again_and_says_so(sessions: FakeSessions, base: str) -> None:
    sessions.session.script.append(BrokerError("away"))
    async with openai.AsyncOpenAI(base_url=f"{base}v1", api_key=KEY, max_retries=1) as client:
        await client.chat.completions.create(model="m", messages=ASK, extra_headers={"Idempotency-Key": "k1"})
    assert [(each.key, each.is_repeated) for each in sessions.session.calls] == [("k1", False), ("k1", True)]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_cancels_its_call(
    sessions: FakeSessions, client: openai.AsyncOpenAI, is_stream: bool
) -> None:
    # Given a call that takes long
    sessions.session.script.append(asyncio.Event())

    # When its client's patience ends
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="m", messages=ASK, stream=is_stream, timeout=0.2)

    # Then it is cancelled
    await until(lambda: sessions.session.cancelled_count == 1)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),  # and no tools
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": TOOLS}, "allowed_tools"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "function", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": ""}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": ["required"]}, "tools": TOOLS}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"parallel_tool_calls": "no", "tools": TOOLS}, "parallel_tool_calls"),
        ({"store": True}, "store"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"n": True}, "n"),
        ({"temperature": 1e-40}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"x": 1}}, "x"),
        ({"messages": []}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    sessions: FakeSessions, client: openai.AsyncOpenAI, fields: dict[str, object], name: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=ASK, extra_body=fields)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == name
    assert not sessions.session.calls
