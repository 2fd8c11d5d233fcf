"""The gateway's small rules: settings, counts of wrong keys, room for calls, and how a text is cut for a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rollfab.api.access.problems import Refused
from rollfab.api.gateway.app import make_gateway
from rollfab.api.gateway.config import GatewayConfig, check_gateway
from rollfab.api.gateway.dialect import PART_COUNT, parts
from rollfab.api.gateway.door import ADDRESS_COUNT_MAX, CallGate, Failures
from rollfab.api.gateway.problems import ClientGone, anthropic_shape, openai_shape, problem_answer, problem_of
from rollfab.api.inference.app import make_inference
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import BrokerError, BrokerFull, ConfigError
from tests.support.fake_inference import FakeInference
from tests.support.fake_sessions import KEY, FakeSessions

CREATOR_KEY = "a-key-that-opens-sessions"


@dataclass
class SetClock(SystemClock):
    """A clock that stands until it is set."""

    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GatewayConfig(), "creator key"),
        (GatewayConfig(may_open=False, port=70_000), "gateway port 70000"),
        (GatewayConfig(may_open=False, host="0.0.0.0"), "without TLS"),
        (GatewayConfig(may_open=False, host=""), "every address"),
        (GatewayConfig(may_open=False, call_count_max=0), "call_count_max"),
        (GatewayConfig(may_open=False, failed_key_count_max=0), "failed_key_count_max"),
        (GatewayConfig(may_open=False, tls_key="x.pem"), "without a certificate"),
    ],
)
def test_settings_that_are_unsafe_or_impossible_are_refused(config: GatewayConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_gateway(config)


def test_settings_that_are_safe_pass() -> None:
    check_gateway(GatewayConfig(may_open=False))
    check_gateway(GatewayConfig(may_open=False, host="0.0.0.0", tls_certificate="x.pem"))
    check_gateway(GatewayConfig(may_open=False, host="0.0.0.0", may_be_plain=True))


def test_creators_keys_are_held_as_hashes() -> None:
    config = GatewayConfig(creator_keys=(CREATOR_KEY,))
    assert all(key.startswith("sha256:") for key in config.creator_keys)
    assert CREATOR_KEY not in repr(config)
    with pytest.raises(ConfigError):
        GatewayConfig(creator_keys=("short",))


def test_wrong_keys_are_counted_for_each_address_and_forgotten_after_a_minute() -> None:
    clock = SetClock()
    failures = Failures(2, clock)
    assert [failures.count("a") for _ in range(3)] == [0, 0, 61]
    clock.at_s = 50.0
    assert (failures.count("a"), failures.count("b")) == (11, 0)
    clock.at_s = 60.0
    assert failures.count("a") == 0


def test_addresses_beyond_their_number_are_forgotten() -> None:
    failures = Failures(1, SetClock())
    failures.count("first")
    for number in range(ADDRESS_COUNT_MAX):
        failures.count(str(number))
    assert failures.count("first") == 0


@pytest.mark.parametrize("error", [BrokerError("it is away"), BrokerFull("it is full")], ids=["away", "full"])
def test_who_meets_a_broker_that_cannot_answer_is_told_to_come_again(error: BrokerError) -> None:
    answer = problem_answer(problem_of(error, "/x"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_calls_beyond_their_number_are_told_to_come_again() -> None:
    gate = CallGate(FakeSessions(), GatewayConfig(may_open=False, call_count_max=1), SystemClock())
    with gate.room():
        with pytest.raises(Refused) as caught, gate.room():
            raise AssertionError("there is no room")
        problem = problem_of(caught.value, "/x")
        assert (problem.status, problem.code, problem.retry_s) == (429, "rate_limit_exceeded", 1)
    with gate.room():
        pass


ONE = GatewayConfig(creator_keys=(CREATOR_KEY,), call_count_max=1)


@pytest.mark.parametrize(
    ("app", "path", "key"),
    [
        (make_gateway(FakeSessions(), ONE), "/v1/chat/completions", KEY),
        (make_gateway(FakeSessions(), ONE), "/v1/messages/count_tokens", KEY),
        (make_gateway(FakeSessions(), ONE), "/sessions", CREATOR_KEY),
        (make_inference(FakeInference(), ONE), "/inference/v1/generate", CREATOR_KEY),
        (make_inference(FakeInference(), ONE), "/v1/completions", CREATOR_KEY),
        (make_inference(FakeInference(), ONE), "/generate", CREATOR_KEY),
        (make_inference(FakeInference(), ONE), "/detokenize", CREATOR_KEY),
    ],
)
async def test_a_request_whose_body_is_not_there_yet_takes_no_room_from_another(app: Any, path: str, key: str) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()
        await goes_on.wait()
        yield b"}"

    headers = {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        posting = asyncio.create_task(client.post(path, content=slow()))
        await asyncio.wait_for(begun.wait(), 10.0)
        other = await client.post(path, content=b"{}")
        goes_on.set()
        assert other.status_code == (await posting).status_code == 400  # what it asks for is missing: it had room


@given(st.text())
def test_parts_of_a_text_make_up_the_text(text: str) -> None:
    cut = list(parts(text))
    assert "".join(cut) == text
    assert len(cut) <= PART_COUNT and all(cut)
    assert all(part[-1].isspace() or after[0].isspace() for part, after in pairwise(cut))


def test_problems_that_no_client_reads_or_that_http_has_still_have_a_shape(caplog: pytest.LogCaptureFixture) -> None:
    for error in (ClientGone(), ClientDisconnect(), HTTPException(405), HTTPException(418, "a teapot")):
        problem = problem_of(error, "/x")
        assert openai_shape(problem)["error"]["type"] == "invalid_request_error"
        assert anthropic_shape(problem)["error"]["type"] == "invalid_request_error"
    assert not caplog.records, "a client that leaves while it sends is no fault of the gateway"
