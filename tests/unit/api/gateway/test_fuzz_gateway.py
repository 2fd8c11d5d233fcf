"""Whatever is sent to the gateway, it answers in the protocol's own words: never with a 500."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfab.api.gateway.app import make_gateway
from rollfab.api.gateway.body import DEPTH_MAX
from rollfab.api.gateway.config import GatewayConfig
from tests.fuzz import damage
from tests.fuzz.damage import damaged, json_values, spots
from tests.support.fake_sessions import KEY, FakeSessions

CREATOR_KEY = "a-key-that-opens-sessions"
few = settings(suppress_health_check=[HealthCheck.too_slow])
PARTS = [{"type": "text", "text": "?"}, {"type": "input_text", "text": "?"}, {"type": "thinking", "thinking": "?"}]
MESSAGE = {"role": "user", "content": PARTS[:1]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE: dict[str, dict[str, Any]] = {  # requests that are fine, with a value of every field that is taken
    "chat/completions": {
        "messages": [MESSAGE, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "auto"},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"a": 1},
        "logprobs": True,
        "n": 2,
        "stop": ["x"],
        "logit_bias": {"1": 1},
        "top_k": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "completions": {"prompt": "p", "logprobs": 0, "max_tokens": 4, "seed": 3, "stop": "x", "best_of": 1},
    "responses": {
        "input": [
            {"role": "user", "content": PARTS[1:2]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "?"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "instructions": "i",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"summary": "auto"},
        "include": [],
        "stream": True,
    },
    "messages": {
        "max_tokens": 4,
        "system": PARTS[:1],
        "messages": [
            MESSAGE,
            {"role": "assistant", "content": [PARTS[2], {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": PARTS[:1]}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "disabled"},
        "stream": True,
    },
}


@cache  # to make one takes longer than most answers
def gateway() -> Any:
    return make_gateway(FakeSessions(), GatewayConfig(creator_keys=(CREATOR_KEY,)))


def post(path: str, content: bytes) -> httpx.Response:
    return damage.post(gateway(), path, content, KEY)


def check(path: str, answer: httpx.Response) -> None:
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code == 200:
        return
    error = answer.json()["error"]
    if path == "messages":
        assert set(answer.json()) == {"type", "error"} and set(error) == {"type", "message"}
    else:
        assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "Traceback" not in error["message"]


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_request_is_answered(path: str) -> None:
    assert post(f"v1/{path}", json.dumps(WHOLE[path]).encode()).status_code == 200


@pytest.mark.parametrize("path", WHOLE)
def test_a_request_with_anything_in_any_place_is_answered_or_refused(path: str) -> None:
    @few
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        body = json.loads(json.dumps(WHOLE[path]))
        for _ in range(data.draw(st.integers(1, 2))):
            holder, key = data.draw(st.sampled_from(spots(body)), label="place")
            if isinstance(holder, dict) and data.draw(st.booleans(), label="rename"):
                holder[data.draw(st.text(max_size=8), label="name")] = data.draw(json_values, label="value")
            else:
                holder[key] = data.draw(json_values, label="value")
        content = json.dumps(body).encode("utf-8", "surrogatepass")
        check(path, post(f"v1/{path}", content))

    attack()


@pytest.mark.parametrize("path", WHOLE)
def test_any_bytes_are_answered_or_refused(path: str) -> None:
    bodies = (json.dumps(WHOLE[path]).encode(), b"[" * 5000, b'{"messages": ' + b'{"a":' * 1000, b"null", b'"\xff"')

    @few
    @given(damaged(bodies))
    def attack(body: bytes) -> None:
        check(path, post(f"v1/{path}", body))

    attack()


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("depth", [240, 300, 900])
def test_a_deep_value_is_answered_or_refused(path: str, depth: int) -> None:
    deep = json.loads("[" * depth + "]" * depth)
    for holder, key in spots(body := json.loads(json.dumps(WHOLE[path]))):
        kept, holder[key] = holder[key], deep
        check(path, post(f"v1/{path}", json.dumps(body).encode()))
        holder[key] = {"a": deep}
        answer = post(f"v1/{path}", json.dumps(body).encode())
        check(path, answer)
        assert depth < DEPTH_MAX or (answer.status_code == 400 and "nested" in answer.text)
        holder[key] = kept
