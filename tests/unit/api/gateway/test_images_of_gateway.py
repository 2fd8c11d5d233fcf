"""Images in requests of the gateway's three protocols come to the same messages."""

from __future__ import annotations

from typing import Any

import pytest

from rollfab.api.gateway.app import _weight
from rollfab.api.gateway.body import Body
from rollfab.api.gateway.chat import CHAT
from rollfab.api.gateway.dialect import Dialect
from rollfab.api.gateway.messages import MESSAGES
from rollfab.api.gateway.responses import RESPONSES
from rollfab.fabric.contract.errors import InputError

DATA = "aGVsbG8="
URL = f"data:image/png;base64,{DATA}"
PART = {"type": "image_url", "image_url": {"url": URL}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
EXPECTED = [
    {"role": "user", "content": [{"type": "text", "text": "what?"}, PART]},
    CALLING,
    {"role": "tool", "tool_call_id": "c1", "content": [PART]},
]


def of_chat(image: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}, *EXPECTED[1:]]}


def of_messages(image: dict[str, Any]) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": SOURCE}]}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "what?"}, image]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    return {"max_tokens": 5, "messages": said}


def of_responses(image: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "what?"}, image]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": URL}]},
        ]
    }


@pytest.mark.parametrize(
    ("dialect", "request_of", "image"),
    [
        (CHAT, of_chat, {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}),
        (MESSAGES, of_messages, {"type": "image", "source": SOURCE}),
        (RESPONSES, of_responses, {"type": "input_image", "image_url": URL, "detail": "auto"}),
    ],
)
def test_images_of_users_and_of_tools_are_read(dialect: Dialect, request_of: Any, image: dict[str, Any]) -> None:
    body = Body(request_of(image))
    asked = dialect.read(body)
    body.close()

    assert list(asked.call.messages or ()) == EXPECTED
    assert _weight(asked.call, b"x" * 1000) < 1000 - len(URL)


@pytest.mark.parametrize(
    ("dialect", "request_of", "image", "why"),
    [
        (CHAT, of_chat, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "nothing is fetched"),
        (MESSAGES, of_messages, {"type": "image", "source": {"type": "url", "url": "http://x"}}, "nothing is fetched"),
        (MESSAGES, of_messages, {"type": "document", "source": SOURCE}, "expected text, image or tool_result"),
        (RESPONSES, of_responses, {"type": "input_image", "image_url": "http://x/y.png"}, "nothing is fetched"),
        (RESPONSES, of_responses, {"type": "input_image", "file_id": "f1"}, "send the image itself in image_url"),
        (RESPONSES, of_responses, {"type": "input_file", "file_id": "f1"}, "expected input_text, .*input_image"),
    ],
)
def test_what_is_no_image_here_is_refused_by_name(
    dialect: Dialect, request_of: Any, image: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        dialect.read(Body(request_of(image)))
