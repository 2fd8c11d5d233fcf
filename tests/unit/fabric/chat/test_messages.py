"""Which messages and tools are taken, and when two copies say the same?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollfab.fabric.chat import messages as module
from rollfab.fabric.chat.messages import check_messages, check_options, check_tools, same
from rollfab.fabric.contract.errors import InputError, PayloadTooLarge

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"place": "Rome", "days": 2}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def deep() -> str:
    return '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hi", "message 0 is str, expected a dict"),
        ({"role": "robot", "content": "x"}, "role is 'robot', expected system, developer, user"),
        ({"role": ["user"], "content": "x"}, "role is"),
        ({"role": "user", "content": "x", "mood": 1}, "'mood' is no key of role user: role, content, name are"),
        ({"role": "user", "content": "x", 1: 2}, "1 is no key of role user"),
        ({"role": "user", "content": "x", "\x1b": 2}, r"'\x1b' is no key of role user"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "'tool_calls' is no key of role user"),
        ({"role": "user"}, "content is missing"),
        ({"role": "user", "content": 3}, "content is int, expected a text or a list of parts"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "part 0: url is None, expected",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "expected the keys type and text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "content part 0 is int"),
        ({"role": "user", "content": "\ud800"}, "content holds half a character"),
        ({"role": "user", "content": "x", "name": 5}, "name is int, expected a text"),
        ({"role": "assistant", "tool_calls": "look()"}, "tool_calls is str, expected a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool call 0: expected"),
        ({"role": "assistant", "tool_calls": [CALL | {"kind": 1}]}, "expected the keys id, type"),
        ({"role": "assistant", "tool_calls": [CALL | {"function": {"name": "x"}}]}, "keys name and arguments"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "x", "arguments": "[1]"}}]},
            "arguments is no text of a JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "x", "arguments": deep()}}]},
            "arguments is no text of a JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "x", "arguments": '{"a": 1, "a": 2}'}}]},
            "arguments is no text of a JSON object",
        ),
        ({"role": "assistant", "reasoning_content": 1}, "reasoning_content is int"),
    ],
)
def test_a_message_of_another_form_is_refused_by_name(message: Any, words: str) -> None:
    with pytest.raises(InputError, match="message 0") as refused:
        check_messages([message])

    assert words in str(refused.value)


@pytest.mark.parametrize("value", [None, [], {}, "hi"])
def test_no_messages_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="at least one message"):
        check_messages(value)


def test_keys_that_say_nothing_count_as_absent_and_parts_become_one_text() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": "", "refusal": None, "annotations": [], "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]},
        {"role": "tool", "content": "", "tool_call_id": "a"},
    ]

    assert check_messages(sent) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "a"},
    ]


@pytest.mark.parametrize("limit", ["MESSAGE_COUNT_MAX", "MESSAGES_BYTES_MAX"])
def test_messages_are_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [{"role": "user", "content": "x"}] * 3
    check_messages(sent)

    monkeypatch.setattr(module, limit, 2)

    with pytest.raises(PayloadTooLarge):
        check_messages(sent)


def test_a_text_that_is_too_long_is_named() -> None:
    with pytest.raises(PayloadTooLarge, match="message 1: name has 2,000 bytes, the limit is 1,024"):
        check_messages([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "n" * 2000}])


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"look": 1}, "expected a list, not dict"),
        (["look"], "tool 0: expected"),
        ([TOOL | {"type": "retrieval"}], "tool 0: expected"),
        ([{"type": "function", "function": "look"}], "function is str"),
        ([{"type": "function", "function": {"name": "look", "code": 1}}], "'code' is no key of a function"),
        ([{"type": "function", "function": {"description": "x"}}], "name is NoneType"),
        ([{"type": "function", "function": {"name": "look", "parameters": []}}], "parameters is no JSON schema"),
        (
            [{"type": "function", "function": {"name": "look", "parameters": {"properties": ["place"]}}}],
            "tool 0: properties of its parameters is list, expected a dict",
        ),
        ([TOOL, TOOL], "two are named 'look'"),
        ([{"type": "function", "function": {"name": "x", "parameters": {"a": float("nan")}}}], "this is no JSON"),
        ([{"type": "function", "function": {"name": "x", "parameters": {"a": b"bytes"}}}], "this is no JSON"),
        ([{"type": "function", "function": {"name": "x", "description": "\ud800"}}], "this is no JSON"),
    ],
)
def test_a_tool_of_another_form_is_refused_by_name(tools: Any, words: str) -> None:
    with pytest.raises(InputError, match="tool") as refused:
        check_tools(tools)

    assert words in str(refused.value)


def test_tools_are_copied_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_tools([TOOL]) == [TOOL]
    assert check_tools([TOOL])[0]["function"] is not TOOL["function"]
    assert check_tools(None) == check_tools([]) == []
    for limit in ("TOOL_COUNT_MAX", "TOOLS_BYTES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 0)
            with pytest.raises(PayloadTooLarge):
                check_tools([TOOL])
            if limit == "TOOLS_BYTES_MAX":
                with pytest.raises(PayloadTooLarge, match="options of the chat template"):
                    check_options({"enable_thinking": False})


@pytest.mark.parametrize("value", [[1], {"a b": 1}, {1: 2}, {"when": float("inf")}, {"it": {1, 2}}])
def test_options_are_a_dict_of_json_values(value: Any) -> None:
    with pytest.raises(InputError, match="options of the chat template"):
        check_options(value)

    assert check_options({"enable_thinking": False}) == {"enable_thinking": False}


SAID = {"role": "assistant", "content": "yes", "reasoning_content": "hmm", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"reasoning_content": None},
        {"content": [{"type": "text", "text": "yes"}]},
        {"tool_calls": [CALL | {"id": None}]},
        {"tool_calls": [CALL | {"function": {"name": "look", "arguments": '{"days":2,"place":"Rome"}'}}]},
    ],
)
def test_another_way_to_say_it_is_the_same(change: dict[str, Any]) -> None:
    recorded, sent = check_messages([SAID, SAID | change])

    assert same(recorded, sent)


@pytest.mark.parametrize(
    "change",
    [
        {"role": "user", "tool_calls": None, "reasoning_content": None},
        {"content": "yes "},
        {"content": None},
        {"name": "Ann"},
        {"reasoning_content": "oh"},
        {"tool_calls": None},
        {"tool_calls": [CALL, CALL]},
        {"tool_calls": [CALL | {"id": "b"}]},
        {"tool_calls": [CALL | {"function": {"name": "walk", "arguments": CALL["function"]["arguments"]}}]},
        {"tool_calls": [CALL | {"function": {"name": "look", "arguments": '{"place": "Rome", "days": true}'}}]},
        {"tool_calls": [CALL | {"function": {"name": "look", "arguments": '{"place": "Rome", "days": 1}'}}]},
    ],
)
def test_what_says_something_else_is_not(change: dict[str, Any]) -> None:
    recorded, sent = check_messages([SAID, SAID | change])

    assert not same(recorded, sent)


def test_a_result_is_known_by_the_call_that_it_answers() -> None:
    result = {"role": "tool", "content": "hot", "tool_call_id": "a"}

    assert same(result, result | {"tool_call_id": "a"})
    assert not same(result, result | {"tool_call_id": "b"})
    assert same(result, {"role": "tool", "content": "hot"})


def test_absent_content_is_an_empty_text() -> None:
    recorded, sent = check_messages([{"role": "assistant", "tool_calls": [CALL]}] * 2)

    assert same(recorded, sent | {"content": ""})
    assert json.loads(json.dumps(recorded)) == sent
