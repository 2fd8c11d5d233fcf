"""Whatever is sent to an engine's routes, they answer with a status of the protocol's: never with a 500."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollfab.api.gateway.config import GatewayConfig
from rollfab.api.inference.app import make_inference
from tests.fuzz import damage
from tests.fuzz.damage import damaged, json_values, spots
from tests.support.fake_inference import FakeInference

KEY = "a-key-for-the-trainer"
few = settings(suppress_health_check=[HealthCheck.too_slow])
PIN = {"min_version": 1, "exact_version": 3}
VLLM = {
    "n": 2,
    "temperature": 0.5,
    "max_tokens": 4,
    "stop": ["x"],
    "stop_token_ids": [3],
    "logprobs": 2,
    "ignore_eos": True,
    "logit_bias": {"1": 1},
    "structured_outputs": {"json": {"type": "object"}},
    "min_tokens": 1,
}
SGLANG = {"n": 2, "max_new_tokens": 4, "stop": "x", "stop_token_ids": [3], "sampling_seed": 1, "regex": "a"}
WHOLE: dict[str, dict[str, Any]] = {  # requests that are fine, with a value of most fields that are taken
    "inference/v1/generate": {"token_ids": [1, 2], "sampling_params": VLLM, "request_id": "r", "weight_version": PIN},
    "v1/completions": {"prompt": [1, 2], **VLLM, "return_token_ids": True, "weight_version": PIN},
    "generate": {
        "input_ids": [[1], [2]],
        "rid": ["a", "b"],
        "sampling_params": SGLANG,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "weight_version": PIN,
    },
    "api/v1/asample": {
        "sampling_session_id": "session-1:0:3",
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "temperature": 0.5, "seed": 1, "stop": ["x"], "top_k": -1, "top_p": 0.5},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
    },
    "api/v1/create_sampling_session": {
        "session_id": "session-1",
        "sampling_session_seq_id": 1,
        "model_path": "tinker://policy/3",
    },
    "api/v1/cancel_future": {"request_id": "session-1:0:3:1"},
    "pause_generation": {"mode": "abort"},
    "abort_requests": {"request_ids": ["a"]},
    "abort_request": {"rid": "a", "abort_all": False},
    "update_weights": {"weight_dir": "/w", "weight_version": 3},
    "update_weights_from_disk": {"model_path": "/w", "weight_version": "weight_v000003", "flush_cache": True},
}


def post(path: str, content: bytes) -> httpx.Response:
    return damage.post(make_inference(FakeInference(), GatewayConfig(creator_keys=(KEY,))), path, content, KEY)


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_request_is_answered(path: str) -> None:
    answer = post(path, json.dumps(WHOLE[path]).encode())
    assert answer.status_code == 200, answer.text


@few
@given(data=st.data(), path=st.sampled_from(sorted(WHOLE)))
def test_a_request_with_anything_in_one_place_is_answered(data: st.DataObject, path: str) -> None:
    body = copy.deepcopy(WHOLE[path])
    holder, key = data.draw(st.sampled_from(spots(body)))
    holder[key] = data.draw(json_values)
    check(post(path, json.dumps(body).encode("utf-8", "surrogatepass")))


@few
@given(data=st.data(), path=st.sampled_from(sorted(WHOLE)))
def test_a_damaged_request_is_answered(data: st.DataObject, path: str) -> None:
    bodies = (json.dumps(WHOLE[path]).encode(), b"[" * 5000, b'{"token_ids": ' + b'{"a":' * 1000, b"null", b'"\xff"')
    check(post(path, data.draw(damaged(bodies))))
