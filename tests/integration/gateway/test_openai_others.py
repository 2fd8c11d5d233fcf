"""The unmodified openai client's other ways to a model: completions, models and responses."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from rollfab.fabric.chat.choice import FREE, ToolChoice
from tests.support.fake_sessions import FakeSessions, completion, tool_call

TOOL = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
CHAT_TOOL = {"type": "function", "function": {name: each for name, each in TOOL.items() if name != "type"}}


# ---------------------------------------------------------------- completions


async def test_a_text_is_continued(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="m", prompt="one, ", max_tokens=4, logprobs=0, n=2, echo=False)
    (call,) = sessions.session.calls
    assert (call.messages, call.text, call.sampling, call.count) == (None, "one, ", {"max_tokens": 4}, 2)
    assert [each.text for each in answer.choices] == ["two words", "two words"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "two words" and logprobs.text_offset == list(range(9))


async def test_a_streamed_text_is_the_same(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="m", prompt="one, ", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "two words"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 20


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
async def test_what_is_not_offered_to_texts_is_refused_by_name(
    sessions: FakeSessions, client: openai.AsyncOpenAI, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="m", prompt="p", extra_body=fields)
    assert caught.value.param == name and not sessions.session.calls


# ---------------------------------------------------------------- models


async def test_a_session_has_one_model(client: openai.AsyncOpenAI) -> None:
    assert [each.id async for each in client.models.list()] == ["org/model"]
    assert (await client.models.retrieve("org/model")).id == "org/model"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


# ---------------------------------------------------------------- responses


async def test_a_response_has_its_text_and_what_it_cost(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(
        model="m",
        input="?",
        instructions="be brief",
        max_output_tokens=9,
        temperature=0,
        store=True,
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}},
    )
    (call,) = sessions.session.calls
    assert call.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "?"}]
    assert call.sampling == {"max_tokens": 9, "temperature": 0}
    assert (answer.output_text, answer.status, answer.id) == ("two words", "completed", "resp_group.0.1")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (11, 9, 20)


async def test_a_response_that_was_cut_says_so(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    sessions.session.script.append([completion("two", finish="length")])
    answer = await client.responses.create(model="m", input="?")
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


async def test_items_of_an_answer_come_back_as_the_message_that_they_were(
    sessions: FakeSessions, client: openai.AsyncOpenAI
) -> None:
    # Given an answer that thinks, speaks, and calls two tools
    calls = [tool_call("look", "{}", "call_1"), tool_call("look", '{"at": 2}', "call_2")]
    made = completion("I look.", finish="tool_calls", reasoning_content="hm", tool_calls=calls)
    sessions.session.script.append([made])
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "?"}]}]
    answer = await client.responses.create(model="m", input=asked, tools=[TOOL], tool_choice="auto")
    assert [each.type for each in answer.output] == ["reasoning", "message", "function_call", "function_call"]

    # When its items come back, with results, and another answer after them
    results = [
        {"type": "function_call_output", "call_id": "call_1", "output": "seen"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "more"}]},
    ]
    asked += [*(each.model_dump() for each in answer.output), *results]
    asked += [{"role": "assistant", "content": "So."}, {"role": "assistant", "content": "And so."}]
    await client.responses.create(model="m", input=asked, tools=[TOOL], tool_choice="none")

    # Then they are that message
    assert list(sessions.session.calls[1].messages or ()) == [
        {"role": "user", "content": "?"},
        dict(made.message),
        {"role": "tool", "tool_call_id": "call_1", "content": "seen"},
        {"role": "tool", "tool_call_id": "call_2", "content": "more"},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "And so."},
    ]
    assert sessions.session.calls[0].tools == [CHAT_TOOL]
    assert not sessions.session.calls[1].tools


async def test_a_streamed_response_is_the_same(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    # Given an answer of every kind of item
    text = "I look here, and there, and\n everywhere."
    calls = [tool_call("look", '{"at": 2, "for": "it"}')]
    sessions.session.script.append([completion(text, finish="tool_calls", reasoning_content="hm hm", tool_calls=calls)])

    # When the client puts its stream together
    async with client.responses.stream(model="m", input="?") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    # Then its parts are the whole
    assert final.output_text == text
    assert [each.type for each in final.output] == ["reasoning", "message", "function_call"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2 and "".join(deltas) == text
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "hm hm"
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert snapshots[-1] == '{"at": 2, "for": "it"}'
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_streamed_response_that_was_cut_ends_as_incomplete(
    sessions: FakeSessions, client: openai.AsyncOpenAI
) -> None:
    sessions.session.script.append([completion("two", finish="length")])
    events = [event async for event in await client.responses.create(model="m", input="?", stream=True)]
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")


async def test_a_schema_guides_a_response(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    class Found(BaseModel):
        at: int

    sessions.session.script.append([completion('{"at": 4}')])
    answer = await client.responses.parse(model="m", input="?", text_format=Found)
    assert answer.output_parsed == Found(at=4)
    assert '"at"' in sessions.session.calls[0].sampling["guided_json"]


async def test_responses_tell_how_tools_are_to_be_called(sessions: FakeSessions, client: openai.AsyncOpenAI) -> None:
    named = {"type": "function", "name": TOOL["name"]}
    told = []
    for fields in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": named}, {}):
        answer = await client.responses.create(model="m", input="?", tools=[TOOL], extra_body=fields)
        told.append((answer.to_dict()["tool_choice"], answer.parallel_tool_calls))
    assert told == [("required", False), (named, True), ("auto", True)]
    assert [each.choice for each in sessions.session.calls] == [
        ToolChoice(is_forced=True, is_single=True),
        ToolChoice(is_forced=True, name=TOOL["name"]),
        FREE,
    ]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),  # and no tools
        ({"tool_choice": {"type": "function", "name": "run"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "effort"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_is_not_offered_to_responses_is_refused_by_name(
    sessions: FakeSessions, client: openai.AsyncOpenAI, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input="?", extra_body=fields)
    assert caught.value.param == name and not sessions.session.calls
