"""The unmodified anthropic client: messages whole and streamed, tools, thinking, errors in its own shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from rollfab.fabric.chat.choice import FREE, ToolChoice
from rollfab.fabric.contract.errors import BrokerError, EngineError, PayloadTooLarge, QueueFull
from tests.support.fake_sessions import KEY, FakeSessions, completion, tool_call
from tests.support.until import until

ASK: list[Any] = [{"role": "user", "content": "?"}]
TOOL: Any = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": TOOL["input_schema"]},
}


@pytest.fixture
async def client(base: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=base, api_key=KEY, max_retries=0) as made:
        yield made


async def test_an_answer_has_its_text_and_what_it_cost(
    sessions: FakeSessions, client: anthropic.AsyncAnthropic
) -> None:
    answer = await client.messages.create(
        model="whatever",
        max_tokens=9,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=ASK,
        stop_sequences=["\n"],
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.5, "top_k": 4},
    )
    (call,) = sessions.session.calls
    assert call.messages == [{"role": "system", "content": "be brief"}, *ASK]
    assert call.sampling == {"max_tokens": 9, "stop": ["\n"], "temperature": 0.5, "top_k": 4}
    assert [each.type for each in answer.content] == ["text"]
    assert (answer.stop_reason, answer.model, answer.id) == ("end_turn", "org/model", "msg_group.0.1")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (11, 9)


@pytest.mark.parametrize(
    ("made", "reason", "sequence"),
    [
        (completion("two", finish="length"), "max_tokens", None),
        (completion("two\n"), "stop_sequence", "\n"),
        (completion("two"), "end_turn", None),
    ],
)
async def test_an_answer_says_why_it_ended(
    sessions: FakeSessions, client: anthropic.AsyncAnthropic, made: Any, reason: str, sequence: str | None
) -> None:
    sessions.session.script.append([made])
    answer = await client.messages.create(model="m", max_tokens=9, messages=ASK, stop_sequences=["x", "\n"])
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_blocks_of_an_answer_come_back_as_the_message_that_they_were(
    sessions: FakeSessions, client: anthropic.AsyncAnthropic, is_stream: bool
) -> None:
    # Given an answer that thinks, speaks, and calls two tools
    calls = [tool_call("look", "{}", "call_1"), tool_call("look", '{"at": 2, "for": "é it"}', "call_2")]
    made = completion("I look here,\n and there.", finish="tool_calls", reasoning_content="hm hm", tool_calls=calls)
    sessions.session.script.append([made])
    fields: Any = {"model": "m", "max_tokens": 9, "messages": ASK, "tools": [TOOL], "tool_choice": {"type": "auto"}}
    if is_stream:
        async with client.messages.stream(**fields) as stream:
            events = [event async for event in stream]
            answer = await stream.get_final_message()
        assert sum(event.type == "text" for event in events) > 2
    else:
        answer = await client.messages.create(**fields)
    assert [each.type for each in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens == len(made.text)

    # When its blocks come back, with results and a word of the user's
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": "seen"},
        {"type": "tool_result", "tool_use_id": "call_2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
        {"type": "text", "text": "Go", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "on."},
    ]
    mine = [each.model_dump() for each in answer.content]
    history: Any = [*ASK, {"role": "assistant", "content": mine}, {"role": "user", "content": results}]
    await client.messages.create(model="m", max_tokens=9, messages=history, tools=[TOOL], tool_choice={"type": "none"})

    # Then they are that message: calls have the same values as arguments
    sent = list(sessions.session.calls[1].messages or ())
    assert sent == [
        *ASK,
        dict(made.message),
        {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
        {"role": "tool", "tool_call_id": "call_2", "content": "no"},
        {"role": "user", "content": "Go\non."},
    ]
    assert sessions.session.calls[0].tools == [CHAT_TOOL]
    assert not sessions.session.calls[1].tools


@pytest.mark.parametrize(
    ("error", "kind", "status", "word"),
    [
        (PayloadTooLarge("big"), anthropic.APIStatusError, 413, "request_too_large"),
        (QueueFull("busy"), anthropic.RateLimitError, 429, "rate_limit_error"),
        (QueueFull("spent", is_final=True), anthropic.BadRequestError, 400, "invalid_request_error"),
        (BrokerError("redis://box"), anthropic.InternalServerError, 503, "overloaded_error"),
        (EngineError("worker-7"), anthropic.InternalServerError, 502, "api_error"),
    ],
)
async def test_errors_have_anthropics_shape(
    sessions: FakeSessions,
    client: anthropic.AsyncAnthropic,
    error: Exception,
    kind: type[anthropic.APIStatusError],
    status: int,
    word: str,
) -> None:
    sessions.session.script.append(error)
    with pytest.raises(kind) as caught:
        await client.messages.create(model="m", max_tokens=9, messages=ASK)
    body: Any = caught.value.body
    assert (caught.value.status_code, body["type"], body["error"]["type"]) == (status, "error", word)


async def test_a_wrong_key_is_refused_in_anthropics_shape(base: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="m", max_tokens=9, messages=ASK)
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"


async def test_a_client_that_leaves_cancels_its_call(sessions: FakeSessions, client: anthropic.AsyncAnthropic) -> None:
    sessions.session.script.append(asyncio.Event())
    with pytest.raises(anthropic.APITimeoutError):
        await client.messages.create(model="m", max_tokens=9, messages=ASK, timeout=0.2)
    await until(lambda: sessions.session.cancelled_count == 1)


async def test_how_tools_are_to_be_used_is_told_to_the_session(
    sessions: FakeSessions, client: anthropic.AsyncAnthropic
) -> None:
    asked: list[dict[str, Any]] = [
        {"type": "any"},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": TOOL["name"]},
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "none"},
    ]
    for choice in asked:
        fields: Any = {"tools": [TOOL], "tool_choice": choice}
        await client.messages.create(model="m", max_tokens=9, messages=ASK, **fields)
    assert [each.choice for each in sessions.session.calls] == [
        ToolChoice(is_forced=True),
        ToolChoice(is_forced=True, is_single=True),
        ToolChoice(is_forced=True, name=TOOL["name"]),
        ToolChoice(is_single=True),
        FREE,
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),  # and no tools
        ({"tool_choice": {"type": "tool", "name": "run"}, "tools": [TOOL]}, "run"),
        ({"tool_choice": {"type": "required"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "any", "name": "look"}, "tools": [TOOL]}, "name"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": ""}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    sessions: FakeSessions, client: anthropic.AsyncAnthropic, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(model="m", max_tokens=9, messages=ASK, extra_body=fields)
    assert words in str(caught.value.body) and not sessions.session.calls


async def test_tokens_are_counted_ahead_and_nothing_is_asked_for(
    sessions: FakeSessions, client: anthropic.AsyncAnthropic
) -> None:
    counted = await client.messages.count_tokens(model="m", system="be brief", messages=ASK, tools=[TOOL])
    (call,) = sessions.session.calls
    assert counted.input_tokens == 2
    assert (call.messages, call.tools) == ([{"role": "system", "content": "be brief"}, *ASK], [CHAT_TOOL])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await client.messages.count_tokens(model="m", messages=ASK, extra_body={"max_tokens": 9})
