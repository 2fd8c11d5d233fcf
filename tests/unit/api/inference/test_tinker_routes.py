"""Tinker's sampling routes over completions from a script: futures, what is sampled, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from rollfab.api.gateway.config import GatewayConfig
from rollfab.api.inference import futures, samplers
from rollfab.api.inference.app import make_inference
from rollfab.fabric.contract.errors import BrokerError, EngineUnsupported, VersionUnmet
from rollfab.fabric.ports.inference import ANY, Pin
from tests.support.fake_inference import FakeInference, made
from tests.support.until import until

KEY = "a-key-for-the-trainer"
BASE = "/api/v1"
SAMPLER = "session-1:0:"
SAMPLE: dict[str, Any] = {  # as the SDK writes it, with every field that it knows
    "type": "sample",
    "num_samples": 2,
    "prompt": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}, {"tokens": [7], "type": "encoded_text"}]},
    "sampling_params": {"max_tokens": 9, "temperature": 0.5, "top_k": -1, "top_p": 1.0},
    "sampling_session_id": SAMPLER,
    "seq_id": 0,
    "prompt_logprobs": False,
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
}


@pytest.fixture
def inference() -> FakeInference:
    return FakeInference()


@pytest.fixture
async def http(inference: FakeInference) -> AsyncIterator[httpx.AsyncClient]:
    app = make_inference(inference, GatewayConfig(creator_keys=(KEY,), call_count_max=2))
    transport = httpx.ASGITransport(app=app)
    # The key in the path, as the SDK takes none of ours; the one that it has is of no use here
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://gateway/k/{KEY}", headers={"x-api-key": "tml-any"}
    ) as client:
        yield client


async def ask(http: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    response = await http.post(f"{BASE}/{path}", json=body)
    assert response.status_code == status, response.text
    is_json = response.headers["content-type"] == "application/json"
    return response.json() if is_json else response.content


def fields(data: bytes) -> dict[int, list[Any]]:
    """Read a protobuf message: field → its values, numbers or bytes, in their order."""
    found: dict[int, list[Any]] = {}
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        value: Any = varint()
        if key & 7 == 2:
            value, place = data[place : place + value], place + value
        found.setdefault(key >> 3, []).append(value)
    return found


def array(data: bytes, dtype: Any) -> list[Any]:
    return np.frombuffer(data, dtype).tolist()


async def test_a_sample_is_made_once_and_is_told_as_the_sdk_reads_it(
    inference: FakeInference, http: httpx.AsyncClient
) -> None:
    # Given two answers, with the likeliest tokens beside theirs and the prompt's
    tops = [[(8, -0.5), (4, -1.0)], [(9, -0.25)]]
    told = {"prompt_logprobs": [float("nan"), -1.5, -2.5], "prompt_tops": [[], [(6, -1.5)], [(2, -0.5), (7, -2.5)]]}
    inference.script.append([made(8, 9, tops=tops, **told), made(300, finish="length", tops=[[(300, -0.125)]])])
    body = {**SAMPLE, "topk_sample_logprobs": 2, "topk_prompt_logprobs": 2, "prompt_logprobs": True}

    # When it is asked for twice, as a lost answer makes the SDK do, and its future is redeemed twice
    future = await ask(http, "asample", **body)
    assert await ask(http, "asample", **body) == future
    answers = [await ask(http, "retrieve_future", request_id=future["request_id"]) for _ in range(2)]

    # Then the fleet was asked once, for just this
    (prompt,) = inference.prompts
    assert prompt.token_ids.tolist() == [5, 6, 7]
    asked = {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "max_tokens": 9, "logprobs": 2, "prompt_logprobs": 2}
    assert (prompt.sampling, prompt.count, prompt.ends_at_eos, prompt.pin) == (asked, 2, True, ANY)
    assert future["sample_sequence_ids"] == [f"{future['request_id']}:{index}" for index in range(2)]
    # And the answer has all of it
    assert answers[0] == answers[1]
    answer = fields(answers[0])
    first, second = map(fields, answer[1])
    assert (array(first[2][0], np.int32), array(second[2][0], np.int32)) == ([8, 9], [300])
    assert (array(first[3][0], np.float32), array(second[3][0], np.float32)) == ([-0.5, -0.5], [-0.5])
    assert (first[1], second[1]) == ([0], [1]), "stop, length"
    table = fields(first[4][0])
    assert array(table[1][0], np.int32) == [8, 4, 9, 0] and table[3] + table[4] == [2, 2]
    assert array(table[2][0], np.float32) == [-0.5, -1.0, -0.25, np.float32(-99999.0)]
    np.testing.assert_array_equal(array(answer[2][0], np.float32), [np.nan, -1.5, -2.5])
    table = fields(answer[3][0])
    assert array(table[1][0], np.int32) == [0, 0, 6, 0, 2, 7] and table[3] + table[4] == [2, 3]


async def test_what_is_not_made_yet_is_asked_for_again_and_what_is_given_up_frees_its_room(
    inference: FakeInference, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "WAIT_S", 0.01)
    gates = [asyncio.Event() for _ in range(3)]
    inference.script += gates
    names = [(await ask(http, "asample", **{**SAMPLE, "seq_id": seq}))["request_id"] for seq in range(2)]
    # While it is made, the SDK is told to come again; and there is no room for more
    pending = await ask(http, "retrieve_future", 408, request_id=names[0], allow_metadata_only=True)
    assert (pending["type"], pending["queue_state"]) == ("try_again", "active")
    assert "queue_state_reason" not in pending
    # And where the run stands, it is told why
    inference.why = "no rollout worker is connected. Start one: rollfab worker"
    pending = await ask(http, "retrieve_future", 408, request_id=names[0])
    assert (pending["queue_state"], pending["queue_state_reason"]) == ("paused_capacity", inference.why)
    await ask(http, "asample", 429, **{**SAMPLE, "seq_id": 2})
    # When one is given up, its work ends, there is room again, and its future is gone
    await ask(http, "cancel_future", request_id=names[1])
    await until(lambda: inference.cancelled_count == 1)
    await ask(http, "retrieve_future", 410, request_id=names[1])
    await ask(http, "asample", **{**SAMPLE, "seq_id": 2})
    gates[0].set()
    monkeypatch.setattr(samplers, "WAIT_S", 5.0)
    assert fields(await ask(http, "retrieve_future", request_id=names[0]))[1]


async def test_what_nobody_asks_for_any_more_is_given_up(
    inference: FakeInference, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "ASKED_S", 0.05)
    inference.script.append(asyncio.Event())
    name = (await ask(http, "asample", **SAMPLE))["request_id"]
    await until(lambda: inference.cancelled_count == 1)
    await ask(http, "retrieve_future", 410, request_id=name)


@pytest.mark.parametrize(("limit", "most"), [("KEPT_MAX", 2), ("KEPT_BYTES_MAX", 100)])
async def test_the_oldest_answers_make_room(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(futures, limit, most)
    names = []
    for seq in range(4):
        names.append((await ask(http, "asample", **{**SAMPLE, "seq_id": seq}))["request_id"])
        await ask(http, "retrieve_future", request_id=names[-1])
    await ask(http, "retrieve_future", 410, request_id=names[0])
    await ask(http, "retrieve_future", request_id=names[3])


async def test_processes_that_count_alike_in_one_session_each_get_what_they_ask_for(
    inference: FakeInference, http: httpx.AsyncClient
) -> None:
    other = {**SAMPLE, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}
    for body in (SAMPLE, other, {**other, "num_samples": 3}):
        name = (await ask(http, "asample", **body))["request_id"]
        await ask(http, "retrieve_future", request_id=name)
    assert [(len(each.token_ids), each.count) for each in inference.prompts] == [(3, 2), (2, 2), (2, 3)]


@pytest.mark.parametrize(
    ("error", "category", "word"),
    [
        (EngineUnsupported("no such thing"), "user", "no such thing"),
        (VersionUnmet("version 3 is over", head_version=5), "user", "version 3 is over"),
        (BrokerError("redis://secret:6379 is gone"), "server", "does not answer"),
        (RuntimeError("a fault of ours, with a secret"), "server", "its log says more"),
    ],
)
async def test_a_failure_is_told_with_whose_it_is(
    inference: FakeInference, http: httpx.AsyncClient, error: Exception, category: str, word: str
) -> None:
    inference.script.append(error)
    name = (await ask(http, "asample", **SAMPLE))["request_id"]
    told = await ask(http, "retrieve_future", request_id=name)
    assert told["category"] == category and word in told["error"] and "secret" not in told["error"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "encoded_text"),
        ({"prompt": {"chunks": []}}, "at least one"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "token ids"),
        ({"sampling_session_id": "someone"}, "never gave"),
        ({"num_samples": 0}, "num_samples"),
        ({"topk_sample_logprobs": 1000}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"sampling_params": {"max_tokens": 3, "min_tokens": 1}}, "min_tokens"),
        ({"more": 1}, "more"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(
    inference: FakeInference, http: httpx.AsyncClient, change: dict[str, Any], word: str
) -> None:
    told = await ask(http, "asample", 400, **{**SAMPLE, **change})
    assert word in told["error"]["message"]
    assert not inference.prompts


@pytest.mark.parametrize(
    ("stop", "sampling", "ends_at_eos"),
    [
        (None, {}, True),
        ("END", {"stop": ["END"]}, True),
        (["a", "b"], {"stop": ["a", "b"]}, True),
        ([7, 8], {"stop_ids": [7, 8]}, True),
        ([], {}, False),
    ],
)
async def test_stops_mean_what_they_mean_there(
    inference: FakeInference, http: httpx.AsyncClient, stop: Any, sampling: dict[str, Any], ends_at_eos: bool
) -> None:
    await ask(http, "asample", **{**SAMPLE, "sampling_params": {"max_tokens": 3, "temperature": 0.0, "stop": stop}})
    await until(lambda: len(inference.prompts) == 1)
    (prompt,) = inference.prompts
    assert (prompt.sampling, prompt.ends_at_eos) == ({"max_tokens": 3, "temperature": 0.0, **sampling}, ends_at_eos)


async def test_a_sampling_session_is_of_this_model_or_of_a_version_of_this_run(http: httpx.AsyncClient) -> None:
    session = (await ask(http, "create_session", tags=[], sdk_version="0.38.0"))["session_id"]
    own = {"session_id": session, "sampling_session_seq_id": 1, "type": "create_sampling_session"}
    newest = await ask(http, "create_sampling_session", **own, base_model="org/model")
    pinned = await ask(http, "create_sampling_session", **own, model_path="tinker://policy/sampler_weights/3")
    assert samplers.tinker.pin_of(newest["sampling_session_id"]) == ANY
    assert samplers.tinker.pin_of(pinned["sampling_session_id"]) == Pin(exact_version=3)
    told = (await http.get(f"{BASE}/samplers/{pinned['sampling_session_id']}")).json()
    assert told["base_model"] == "org/model"
    for other in ({"base_model": "another"}, {"model_path": "tinker://other/3"}, {"model_path": "/weights"}, {}):
        assert "error" in await ask(http, "create_sampling_session", 400, **own, **other)


async def test_the_sdks_housekeeping_is_answered_and_training_is_refused_with_the_reason(
    http: httpx.AsyncClient,
) -> None:
    assert (await ask(http, "session_heartbeat", session_id="s"))["type"] == "session_heartbeat"
    assert (await ask(http, "telemetry", events=[]))["status"] == "accepted"
    assert not (await ask(http, "client/config"))["sample_use_retrieve_futures"]
    assert (await ask(http, "client/dynamic_config"))["sample_cancel_enabled"]
    models = (await http.get(f"{BASE}/get_server_capabilities")).json()["supported_models"]
    assert [(each["model_name"], each["max_context_length"]) for each in models] == [("org/model", 4096)]
    for path in ("forward", "forward_backward", "create_model"):
        told = await ask(http, path, 400)
        assert f"/api/v1/{path} is not offered: nothing is trained here" in told["error"]["message"]
    # And nobody gets in without a key
    response = await http.post("http://gateway/api/v1/asample", json=SAMPLE)
    assert response.status_code == 401
