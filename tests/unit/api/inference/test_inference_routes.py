"""The routes of an engine's HTTP, over completions from a script: what is taken, told, and refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rollfab.api.gateway.config import GatewayConfig
from rollfab.api.inference.app import make_inference
from rollfab.fabric.contract.errors import BrokerError, ConfigError, EngineError, EngineUnsupported, VersionUnmet
from rollfab.fabric.ports.inference import Pin
from tests.support.fake_inference import FakeInference, made
from tests.support.until import until

KEY = "a-key-for-the-trainer"
GENERATE, COMPLETIONS, SGLANG = "/inference/v1/generate", "/v1/completions", "/generate"
PLAIN: dict[str, dict[str, Any]] = {
    GENERATE: {"token_ids": [1, 2], "sampling_params": {}},
    COMPLETIONS: {"prompt": [1, 2]},
    SGLANG: {"input_ids": [1, 2]},
}


@pytest.fixture
def inference() -> FakeInference:
    return FakeInference()


@pytest.fixture
async def http(inference: FakeInference) -> AsyncIterator[httpx.AsyncClient]:
    app = make_inference(inference, GatewayConfig(creator_keys=(KEY,)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers={"authorization": f"Bearer {KEY}"}
    ) as client:
        yield client


async def test_vllms_generate_takes_tokens_and_tells_tokens(inference: FakeInference, http: httpx.AsyncClient) -> None:
    # Given answers of which one was made by two versions, with the likeliest tokens beside the first
    tops = [[(8, -0.5), (4, -1.0)], [(9, -0.5)]]
    inference.script.append([made(8, 9, tops=tops), made(7, finish="length", version=4)])
    sampling = {
        "n": 2,
        "temperature": 0.5,
        "top_k": -1,
        "max_tokens": 9,
        "stop": "x",
        "stop_token_ids": [9],
        "seed": 1,
        "logprobs": 1,
        "skip_special_tokens": False,
        "min_tokens": 0,
    }
    body = {
        "model": "any",
        "token_ids": [1, 2],
        "sampling_params": sampling,
        "request_id": "r1",
        "cache_salt": "3",
        "priority": 0,
        "return_token_ids": True,
        "weight_version": {"min_version": 3, "exact_version": None},
    }
    answer = (await http.post(GENERATE, json=body, headers={"X-Session-ID": "s1"})).json()

    # Then the fleet was asked for just this
    (prompt,) = inference.prompts
    assert prompt.token_ids.tolist() == [1, 2]
    assert prompt.sampling == {
        "temperature": 0.5,
        "top_k": 0,
        "max_tokens": 9,
        "stop": ["x"],
        "stop_ids": [9],
        "seed": 1,
        "logprobs": 1,
    }
    assert (prompt.count, prompt.session, prompt.request_id, prompt.ends_at_eos) == (2, "s1", "r1", True)
    assert prompt.pin == Pin(min_version=3)

    # And the answer has it as vLLM says it, with the words of the version contract beside it
    first, second = answer["choices"]
    assert (answer["request_id"], answer["prompt_token_ids"]) == ("r1", [1, 2])
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (3, 4)
    assert (first["token_ids"], first["finish_reason"], first["stop_reason"]) == ([8, 9], "stop", 9)
    assert (second["token_ids"], second["finish_reason"], second["stop_reason"]) == ([7], "length", None)
    assert first["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
    told = first["logprobs"]["content"]
    assert [(each["token"], each["token_id"], each["logprob"]) for each in told] == [
        ("token_id:8", 8, -0.5),
        ("token_id:9", 9, -0.5),
    ]
    assert [each["token_id"] for each in told[0]["top_logprobs"]] == [8, 4], "the one that was drawn first"


async def test_completions_take_tokens_as_trls_client_sends_them(
    inference: FakeInference, http: httpx.AsyncClient
) -> None:
    body = {
        "model": "trl-policy-v3",
        "prompt": [1, 2],
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": 2**63 - 1,
    }
    (choice,) = (await http.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"]) == ([8, 9], [-0.5, -0.5], "8 9")
    assert choice["prompt_token_ids"] == [1, 2]
    assert inference.prompts[0].sampling["seed"] == 2**63 - 1
    # And without a length it has OpenAI's sixteen
    await http.post(COMPLETIONS, json={"prompt": [1]})
    assert inference.prompts[1].sampling == {"max_tokens": 16}


async def test_generate_takes_what_skyrl_sends(inference: FakeInference, http: httpx.AsyncClient) -> None:
    # Given its requests, as remote_inference_client.py and engine_utils.py of SkyRL 0.3.0 build them
    trained = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": 1024,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 1,
        "stop": None,
    }
    body = {"sampling_params": trained, "model": "m", "token_ids": [1, 2], "cache_salt": "v3"}
    (choice,) = (await http.post(GENERATE, json=body, headers={"X-Session-ID": "7"})).json()["choices"]
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-0.5, -0.5]
    sampled = {"n": 2, "logprobs": 0, "output_kind": 2, "prompt_logprobs": None, "temperature": 0.7, "max_tokens": 4}
    answer = (await http.post(GENERATE, json={"sampling_params": sampled, "model": "m", "token_ids": [1]})).json()
    assert [each["token_ids"] for each in answer["choices"]] == [[8, 9], [8, 9]]
    assert [each.session for each in inference.prompts] == ["7", ""]
    # And text of tokens, where there are any
    for tokens, text in (([8, 9], "8 9"), ([], "")):
        answer = await http.post("/detokenize", json={"model": "m", "tokens": tokens})
        assert (answer.status_code, answer.json()) == (200, {"prompt": text})
    for wrong in ([-1], ["a"], "8", None, [True]):
        answer = await http.post("/detokenize", json={"model": "m", "tokens": wrong})
        assert answer.status_code == 400 and "tokens is" in answer.json()["error"]["message"]
    answer = await http.post("/detokenize", json={"tokens": [99, 100, 101]})
    message = "the request: tokens[1] is 100, expected an id below 100, the size of the vocabulary"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    # And its control calls, but those of a collective
    assert (await http.post("/finish_session", params={"session_id": "7"})).status_code == 200
    assert (await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})).status_code == 200
    assert (await http.post("/reset_prefix_cache", json={"reset_running_requests": False})).status_code == 200
    assert (await http.post("/resume")).status_code == 200
    assert (await http.post("/collective_rpc", json={"method": "skyrl_start_weight_update"})).status_code == 400


async def test_sglangs_generate_takes_tokens_as_slime_sends_them(
    inference: FakeInference, http: httpx.AsyncClient
) -> None:
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 7,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 5,
    }
    body = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
    answer = (await http.post(SGLANG, json=body, headers={"X-SMG-Routing-Key": "s2"})).json()
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("8 9", [8, 9])
    assert meta["output_token_logprobs"] == [[-0.5, 8, None], [-0.5, 9, None]]
    assert meta["finish_reason"] == {"type": "stop", "matched": 9}
    assert (meta["weight_version"], meta["weight_version_start"], meta["weight_version_end"]) == ("3", 3, 3)
    assert (inference.prompts[0].session, inference.prompts[0].sampling["seed"]) == ("s2", 5)

    # And several inputs at once are answered in their order
    inference.script += [[made(1, finish="length")], [made(finish="abort")]]
    both = (await http.post(SGLANG, json={"input_ids": [[1], [2]], "rid": ["a", "b"]})).json()
    assert [each["meta_info"]["id"] for each in both] == ["a", "b"]
    assert [each["meta_info"]["finish_reason"]["type"] for each in both] == ["length", "abort"]


@pytest.mark.parametrize("path", PLAIN)
async def test_what_cannot_be_had_is_refused_by_name(
    path: str, inference: FakeInference, http: httpx.AsyncClient
) -> None:
    inner = "sampling_params" if path != COMPLETIONS else ""
    ids = {GENERATE: "token_ids", COMPLETIONS: "prompt", SGLANG: "input_ids"}[path]

    async def refused(**more: Any) -> str:
        response = await http.post(path, json={**PLAIN[path], **more})
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    def within(**more: Any) -> dict[str, Any]:
        return {inner: more} if inner else more

    assert "'nonsense'" in await refused(nonsense=1)
    assert "stream" in await refused(stream=True)
    assert "temperature" in await refused(**within(temperature=-1))
    for bad in ("text", [], [-1], [0.5], [[1], "a"], ["a"], [2**31], None, [True]):
        assert ids in await refused(**{ids: bad})
    for bad in (3, {"min_version": -1}, {"exact_version": "a"}, {"minimum": 3}, {"min_version": 4, "exact_version": 3}):
        assert "version" in await refused(weight_version=bad)
    assert not inference.prompts


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (VersionUnmet("version 4 is not published yet"), 409, "version_unmet"),
        (EngineUnsupported("too long", is_over_context=True), 400, "context_length_exceeded"),
        (EngineError("it died"), 502, "engine_failed"),
        (BrokerError("gone"), 503, "unavailable"),
        (RuntimeError("a prompt"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("path", PLAIN)
async def test_errors_say_whether_to_try_again(
    path: str, error: Exception, status: int, code: str, inference: FakeInference, http: httpx.AsyncClient
) -> None:
    inference.script.append(error)
    response = await http.post(path, json=PLAIN[path])
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status in (409, 503))
    assert "a prompt" not in response.text


async def test_where_the_weights_give_no_numbers_nobody_is_told_to_try_again(
    inference: FakeInference, http: httpx.AsyncClient
) -> None:
    inference.script.append(EngineError("its logits are not numbers", of_weights=True))
    told = (await http.post(COMPLETIONS, json=PLAIN[COMPLETIONS])).json()["error"]["message"]
    assert "publish others" in told and "try again" not in told


async def test_a_body_that_is_no_json_is_told_by_line_and_column(http: httpx.AsyncClient) -> None:
    for body, why in (
        (b'{"prompt":\n [1, 2], }', "line 2, column 8: trailing comma is not allowed"),
        ('{"model": "\u00e4",\n "\u00f6" }'.encode(), "line 2, column 6: unexpected character, expected ':' after key"),
        (b'{"model":\n "a\xff"}', "line 2, column 4: this is no UTF-8"),
    ):
        refused = await http.post(COMPLETIONS, content=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == f"the body is not JSON: {why}"


async def test_every_route_but_health_wants_the_key_in_a_header_or_in_the_path(
    inference: FakeInference, http: httpx.AsyncClient
) -> None:
    for path in PLAIN:
        assert (await http.post(path, json=PLAIN[path], headers={"authorization": "Bearer EMPTY"})).status_code == 401
        in_path = await http.post(f"/k/{KEY}{path}", json=PLAIN[path], headers={"authorization": "Bearer EMPTY"})
        assert in_path.status_code == 200
    for path in ("/server_info", "/v1/models", "/is_paused"):
        assert (await http.get(path, headers={"authorization": ""})).status_code == 401
    for path in ("/pause", "/update_weights", "/sleep"):
        assert (await http.post(path, headers={"authorization": ""})).status_code == 401
    assert (await http.get("/health", headers={"authorization": ""})).status_code == 200
    assert not inference.paused
    # And a path that is unknown is told without the key in it
    unknown = await http.post(f"/k/{KEY}/nowhere")
    assert (unknown.status_code, KEY in unknown.text) == (404, False)


async def test_pause_and_resume_in_the_words_of_both(inference: FakeInference, http: httpx.AsyncClient) -> None:
    assert (await http.post("/pause")).json() == {"status": "paused"}
    await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    await http.post("/pause", params={"mode": "wait"})
    await http.post("/pause_generation", json={"mode": "in_place"})
    assert inference.paused == ["abort", "keep", "wait", "keep"]
    assert (await http.get("/is_paused")).json() == {"is_paused": True}
    assert (await http.post("/pause", params={"mode": "now"})).status_code == 400
    mistyped = (await http.post("/pause?mod=keep")).json()["error"]
    assert mistyped["message"] == "the query: 'mod' is not offered: leave it out; did you mean mode?"
    twice = (await http.post("/pause?mode=keep&mode=wait")).json()["error"]
    assert twice["message"] == "the query has 'mode' 2 times: give it once"
    assert inference.paused == ["abort", "keep", "wait", "keep"], "neither gave anything up"
    await http.post("/continue_generation", json={})
    assert (await http.get("/is_paused")).json() == {"is_paused": False}
    await http.post("/abort_requests", json={"request_ids": ["a"]})
    await http.post("/abort_request", json={"abort_all": True})
    assert inference.aborted == [["a"], None]


async def test_weights_come_by_path_and_by_no_collective(inference: FakeInference, http: httpx.AsyncClient) -> None:
    body = {"model_path": "/w/7", "weight_version": "weight_v000007", "flush_cache": False, "load_format": None}
    told = (await http.post("/update_weights_from_disk", json=body)).json()
    assert (told["success"], told["weight_version"]) == (True, "7")
    await http.post("/update_weights", json={"weight_dir": "/w/8"})
    assert inference.published == [("/w/7", 7), ("/w/8", None)] and inference.allowed == [False, False]
    bad = await http.post("/update_weights_from_disk", json={"model_path": "/w/7", "weight_version": "today"})
    assert bad.status_code == 400
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/update_weights", {"update_info": {"names": []}}),
        ("/update_weights_from_distributed", {}),
    ):
        refused = await http.post(path, json=body)
        assert refused.status_code == 400 and "update_weights_from_disk" in refused.json()["error"]["message"]
    assert len(inference.published) == 2


async def test_prime_rls_update_of_weights_goes_through(inference: FakeInference, http: httpx.AsyncClient) -> None:
    # Given what update_weights of its utils/client.py posts, one after the other
    assert (await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})).status_code == 200
    assert (await http.post("/update_weights", json={"weight_dir": "/outputs/step_4"})).status_code == 200
    assert (await http.post("/resume")).status_code == 200
    assert (inference.published, inference.paused) == ([("/outputs/step_4", None)], [])
    # And what it posts for a collective, or an adapter, is refused: it gives up at once, as at every 4xx
    for path, body in (
        ("/update_weights", {"weight_dir": None}),
        ("/init_broadcaster", {"host": "h", "port": 1}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
    ):
        assert (await http.post(path, json=body)).status_code == 400


async def test_what_servers_say_of_themselves(http: httpx.AsyncClient) -> None:
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("org/model", 4096)
    info = (await http.get("/server_info", params={"config_format": "json"})).json()
    assert info["vllm_config"]["model_config"]["dtype"] == "torch.bfloat16"
    assert (info["applied"], info["ready"], info["weight_version"]) == ("policy/weight_v000003", True, "3")
    assert (await http.get("/get_world_size")).json() == {"world_size": 1}
    assert (await http.get("/weight_info")).json() == {"weight_version": "3"}


async def test_a_client_that_leaves_gives_its_request_up(inference: FakeInference, http: httpx.AsyncClient) -> None:
    inference.script.append(asyncio.Event())
    asking = asyncio.create_task(http.post(GENERATE, json=PLAIN[GENERATE]))
    await until(lambda: inference.prompts)
    asking.cancel()
    await until(lambda: inference.cancelled_count == 1)


def test_a_gateway_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="key"):
        make_inference(FakeInference(), GatewayConfig())
