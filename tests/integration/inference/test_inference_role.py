"""`rollfab gateway --inference` from outside: requests of trainers, made by workers that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from rollfab.deploy.weights.export import export_delta
from rollfab.fabric.inspect.disk_delta import Form
from tests.bench.lively import lively_weights
from tests.support.processes.fabric_processes import Processes, processes
from tests.support.processes.inference_process import RUN, InferenceProcess, running_fleet, running_inference
from tests.support.tokenizer_files import byte_level, save
from tests.support.until import until

pytest.importorskip("torch")
pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 7]
ROOT = Path(__file__).parents[3]
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
TRAIN_CLIENT = ROOT / "tests" / "support" / "clients" / "train_client.py"
SKYRL_CLIENT = ROOT / "tests" / "support" / "clients" / "skyrl_client.py"
VERSIONS = 6  # published while requests are pinned
REQUESTS = 300


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceProcess]:
    with running_fleet(tmp_path_factory.mktemp("inference")) as fleet:
        yield fleet


def ask(*prompt: int, length: int = 12, **more: Any) -> dict[str, Any]:
    return {"token_ids": list(prompt), "sampling_params": {"temperature": 0.0, "max_tokens": length}, **more}


def ask_long(*prompt: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_tokens": 450, "ignore_eos": True}
    return {"token_ids": list(prompt), "sampling_params": sampling}


def test_the_routes_of_all_dialects_make_the_same_tokens(fleet: InferenceProcess) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 12, "logprobs": 1}
    generated = fleet.post(GENERATE, {"token_ids": PROMPT, "sampling_params": sampling})["choices"][0]
    body = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
    completed = fleet.post("/v1/completions", body)["choices"][0]
    greedy = {"temperature": 0, "max_new_tokens": 12}
    entry = fleet.post("/generate", {"input_ids": PROMPT, "sampling_params": greedy, "return_logprob": True})

    ids = generated["token_ids"]
    assert len(ids) > 5
    assert ids == completed["token_ids"] == entry["output_ids"]
    logprobs = [each["logprob"] for each in generated["logprobs"]["content"]]
    told = [each[0] for each in entry["meta_info"]["output_token_logprobs"]]
    assert np.allclose(logprobs, completed["logprobs"]["token_logprobs"], atol=1e-5)
    assert np.allclose(logprobs, told, atol=1e-5)
    assert completed["text"] == entry["text"] != ""
    assert fleet.post("/detokenize", {"tokens": ids})["prompt"] == completed["text"]
    # And a seed makes the same again, and others beside it
    drawn = {"temperature": 1.0, "max_tokens": 8, "seed": 11, "n": 3}
    first, again = (fleet.post(GENERATE, {"token_ids": PROMPT, "sampling_params": drawn}) for _ in range(2))
    answers = [tuple(choice["token_ids"]) for choice in first["choices"]]
    assert answers == [tuple(choice["token_ids"]) for choice in again["choices"]]
    assert len(set(answers)) == 3


@pytest.mark.slow
def test_the_unmodified_train_client_of_verifiers_gets_its_tokens(fleet: InferenceProcess, tmp_path: Path) -> None:
    # Given verifiers in an environment of its own: `make .venv-clients/.done`
    assert CLIENTS_PYTHON.exists(), "make .venv-clients/.done"
    save(byte_level(), tmp_path)
    words = [str(CLIENTS_PYTHON), str(TRAIN_CLIENT), f"{fleet.url}/v1", str(tmp_path)]
    place = {"TRAINER_KEY": fleet.key, "PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = subprocess.run(words, env=place, capture_output=True, text=True, timeout=150, check=False)
    assert said.returncode == 0, said.stderr
    # Then both turns of its conversation have what the same prompts get here, log-probabilities among it
    turns = json.loads(said.stdout.splitlines()[-1])
    for prompt, completion, logprobs, _, _ in turns:
        sampling = {"temperature": 0.0, "max_tokens": 20, "logprobs": 0}
        choice = fleet.post(GENERATE, {"token_ids": prompt, "sampling_params": sampling})["choices"][0]
        assert completion == choice["token_ids"] != []
        assert np.allclose(logprobs, [each["logprob"] for each in choice["logprobs"]["content"]], atol=1e-5)
    assert len(turns[1][0]) > len(turns[0][0])


@pytest.mark.slow
def test_the_unmodified_client_of_skyrl_generates_pauses_and_is_refused_a_collective(fleet: InferenceProcess) -> None:
    # Given SkyRL's package in an environment of its own: `make .venv-clients/.done`
    assert CLIENTS_PYTHON.exists(), "make .venv-clients/.done"
    words = [str(CLIENTS_PYTHON), str(SKYRL_CLIENT), f"{fleet.url}/k/{fleet.key}"]
    place = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    said = subprocess.run(words, env=place, capture_output=True, text=True, timeout=150, check=False)
    assert said.returncode == 0, said.stderr
    told = json.loads(said.stdout.splitlines()[-1])
    # Then it has what the same prompts get here, its text too, before and after a pause
    sampling = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0}
    for index, prompt in enumerate([[5, 6, 7], [8, 9, 10, 11]]):
        choice = fleet.post(GENERATE, {"token_ids": prompt, "sampling_params": sampling})["choices"][0]
        completed = fleet.post("/v1/completions", {"prompt": prompt, "temperature": 0.0, "max_tokens": 12})["choices"][
            0
        ]
        for made in (told["made"], told["again"]):
            assert made["response_ids"][index] == choice["token_ids"] != []
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            assert np.allclose(made["response_logprobs"][index], logprobs, atol=1e-5)
            assert made["responses"][index] == completed["text"] != ""
    assert told["waits"] and told["world"] == [1, 1]
    ends = list(zip(told["aborted"]["stop_reasons"], told["aborted"]["response_ids"], strict=True))
    assert ends[-1] == ("abort", []) and all(
        ids == [] if reason == "abort" else len(ids) == 400 for reason, ids in ends
    )
    # And a collective, sleep, adapters and texts are refused by name, with what to do
    assert [status for status, _ in told["refused"]] == [400] * 5
    collective, update, sleep, adapter, tokenize = [text for _, text in told["refused"]]
    assert "/collective_rpc is not offered" in collective and "/update_weights_from_disk" in collective
    assert "/update_weights without a weight_dir" in update and "/sleep is not offered" in sleep
    assert "/skyrl/v1/load_lora_adapter is not offered: there are no adapters" in adapter
    assert "/tokenize is not offered: make tokens of texts with the model's own tokenizer" in tokenize


@pytest.mark.fault
def test_requests_survive_the_loss_of_their_worker_while_another_joins(fleet: InferenceProcess) -> None:
    # Given what greedy requests get undisturbed
    fabric, bodies = fleet.fabric, [ask(5, 6, 7 + index, length=300, model="any") for index in range(8)]

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=fleet.url, headers=fleet.http.headers, timeout=120.0) as http:
            return await asyncio.gather(*(http.post(GENERATE, json=body) for body in bodies))

    calm = asyncio.run(all_at_once())

    # When their worker is killed in the middle, twice, and another one is added meanwhile
    async def killing() -> list[httpx.Response]:
        asking = asyncio.create_task(all_at_once())
        for _ in range(2):
            await asyncio.to_thread(fabric.until, lambda: asking.done() or _held(fabric), 60.0, "it has a turn in hand")
            fabric.kill("dedicated")
            if "second" not in fabric.supervisor.children:
                fabric.start("second", "worker")
        await asyncio.to_thread(fabric.until, asking.done, 120.0, "all requests are answered")
        return await asking

    # Then no request has failed, and each has the same tokens
    killed = asyncio.run(killing())
    assert [each.status_code for each in killed] == [200] * len(bodies)
    assert _tokens(killed) == _tokens(calm)
    counters = fabric.ask(lambda ports: ports.board.run_status(RUN)).counters
    assert counters.get("turns_resumed", 0) > 0, "some went on with the tokens that they had"


def _claimed(fabric: Processes) -> int:
    return fabric.ask(lambda ports: ports.board.run_status(RUN)).turns.get("claimed", 0)


def _held(fabric: Processes) -> int:
    return fabric.claimed_by(fabric.fabric.run(RUN), "dedicated")


def _tokens(responses: list[httpx.Response]) -> list[list[int]]:
    return [each.json()["choices"][0]["token_ids"] for each in responses]


def test_no_answer_is_of_a_version_that_its_pin_does_not_admit(fleet: InferenceProcess) -> None:
    # Given versions whose greedy answers differ, and requests with every sort of pin while these are published
    fleet.fabric.wait_for_role("dedicated")
    dice = random.Random(7)
    weights = lively_weights()
    first = int(fleet.get("/weight_info")["weight_version"])
    versions = range(first + 1, first + 1 + VERSIONS)
    for version in versions:
        noise = np.random.default_rng(version)
        made = {name: each + noise.normal(0, 0.5, each.shape).astype(np.float32) for name, each in weights.items()}
        fleet.save(str(version), made)

    answers: list[tuple[dict[str, int], httpx.Response]] = []
    heads = [first]

    async def ask_pinned(http: httpx.AsyncClient) -> None:
        while len(answers) < REQUESTS:
            head = heads[-1]
            pin = dice.choice([{}, {"min_version": head}, {"exact_version": head}, {"min_version": head + 1}])
            answers.append((pin, await http.post(GENERATE, json=ask(*PROMPT, length=6, weight_version=pin))))
            await asyncio.sleep(0.01)

    async def publish(http: httpx.AsyncClient) -> None:
        for place, version in enumerate(versions, 1):
            await until(lambda place=place: len(answers) >= place * REQUESTS / (VERSIONS + 1))
            body = {"model_path": str(version), "weight_version": str(version)}
            response = await http.post("/update_weights_from_disk", json=body)
            assert response.json()["weight_version"] == str(version), response.text
            heads.append(version)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=fleet.url, headers=fleet.http.headers, timeout=120.0) as http:
            await asyncio.gather(publish(http), *(ask_pinned(http) for _ in range(10)))

    asyncio.run(main())

    # Then each is answered within its pin, or told to ask again
    by_version: dict[int, set[tuple[int, ...]]] = {}
    for pin, response in answers:
        if response.status_code == 409:
            assert pin and response.headers["retry-after"] == "1"
            continue
        assert response.status_code == 200, response.text
        answer = response.json()
        (choice,) = answer["choices"]
        spans = [int(each["version"]) for each in choice["weight_versions"]]
        assert (answer["weight_version_start"], answer["weight_version_end"]) == (min(spans), max(spans))
        assert min(spans) >= pin.get("min_version", 0)
        assert set(spans) <= {pin.get("exact_version", version) for version in spans}
        if len(set(spans)) == 1:
            by_version.setdefault(spans[0], set()).add(tuple(choice["token_ids"]))
    # And what says that it is of a version has the tokens of that version, which no other has
    assert len(by_version) >= 3
    assert all(len(tokens) == 1 for tokens in by_version.values()), by_version
    assert len({tokens for each in by_version.values() for tokens in each}) == len(by_version)
    assert sum(response.status_code == 200 for _, response in answers) > REQUESTS / 3
    # And the head never goes back
    old = fleet.http.post("/update_weights_from_disk", json={"model_path": str(first), "weight_version": str(first)})
    assert old.status_code == 400 and "not newer" in old.text


def test_a_client_that_leaves_frees_its_slot(fleet: InferenceProcess) -> None:
    # Given a long request under way
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{fleet.url}{GENERATE}", json=ask_long(9), headers=fleet.http.headers, timeout=0.5)
    # When its client has gone: then nobody makes it any more
    fleet.fabric.until(lambda: _claimed(fleet.fabric) == 0, 20.0, "the turn was cancelled")
    fleet.fabric.until(lambda: fleet.get("/server_info")["active_requests"] == 0, 5.0, "it is forgotten here, too")


def test_a_pause_holds_requests_back_and_gives_up_those_under_way_if_asked_to(fleet: InferenceProcess) -> None:
    async def main() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(base_url=fleet.url, headers=fleet.http.headers, timeout=60.0) as http:
            long = asyncio.create_task(http.post(GENERATE, json=ask_long(8)))
            await until(lambda: _is_asked(http))
            assert (await http.post("/pause", params={"mode": "abort"})).status_code == 200
            assert (await http.get("/is_paused")).json() == {"is_paused": True}
            held = asyncio.create_task(http.post(GENERATE, json=ask(*PROMPT)))
            done, _ = await asyncio.wait((held,), timeout=0.5)
            assert not done
            await http.post("/resume")
            return await long, await held

    long, held = asyncio.run(main())
    (given_up,) = long.json()["choices"]
    assert (given_up["finish_reason"], given_up["token_ids"]) == ("abort", [])
    assert held.json()["choices"][0]["finish_reason"] in ("stop", "length")


async def _is_asked(http: httpx.AsyncClient) -> bool:
    return bool((await http.get("/server_info")).json()["active_requests"])


def test_weights_from_elsewhere_are_refused(fleet: InferenceProcess) -> None:
    (fleet.weights / "torn.safetensors").write_bytes(b"torn")
    for path, why in (
        ("/etc", "nothing else is read"),
        ("../x", "nothing else is read"),
        ("none", "is not there"),
        ("torn.safetensors", "torn.safetensors cannot be read as safetensors"),
    ):
        response = fleet.http.post("/update_weights_from_disk", json={"model_path": path})
        assert response.status_code == 400 and why in response.json()["error"]["message"], response.text
        assert str(fleet.weights) not in response.text, "where the directory is concerns nobody"


def test_an_update_gives_requests_up_only_where_it_is_not_refused(fleet: InferenceProcess) -> None:
    head = int(fleet.get("/weight_info")["weight_version"])
    fleet.save("instead", {name: each + 1 for name, each in lively_weights().items()})
    update = {"abort_all_requests": True, "weight_version": str(head + 1)}

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(base_url=fleet.url, headers=fleet.http.headers, timeout=60.0) as http:
            long = asyncio.create_task(http.post(GENERATE, json=ask_long(8, 9)))
            await until(lambda: _is_asked(http))
            # When updates are refused: for what they name, and for their version
            for path, version in (("none", head + 1), ("instead", head)):
                said = {**update, "model_path": path, "weight_version": str(version)}
                assert (await http.post("/update_weights_from_disk", json=said)).status_code == 400
            # Then the request is under way, until one is taken
            assert await _is_asked(http) and not long.done()
            taken = await http.post("/update_weights_from_disk", json={**update, "model_path": "instead"})
            assert taken.status_code == 200, taken.text
            return await long

    (choice,) = asyncio.run(main()).json()["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])


def test_weights_that_are_no_numbers_are_refused_unless_they_are_allowed(fleet: InferenceProcess) -> None:
    # Given weights of which one is NaN, and such that are right
    head = int(fleet.get("/weight_info")["weight_version"])
    run = fleet.fabric.fabric.run(RUN)
    good = {name: array.copy() for name, array in run.weights().items()}
    bad = {**good, "model.norm.weight": np.full_like(good["model.norm.weight"], np.nan)}
    for name, weights in (("good", good), ("bad", bad)):
        save_file(weights, fleet.weights / f"{name}.safetensors")
    # When they are posted: then both routes refuse them by name, with the field that lets them in, and nothing is live
    for path, field in (("/update_weights_from_disk", "model_path"), ("/update_weights", "weight_dir")):
        refused = fleet.http.post(path, json={field: "bad.safetensors"})
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400 and "'model.norm.weight' (" in message and "NaN or infinite" in message
        assert message.endswith('publish with "allow_nonfinite": true')
        assert int(fleet.get("/weight_info")["weight_version"]) == head
        # And with the field they are published
        fleet.post(path, {field: "bad.safetensors", "allow_nonfinite": True})
        assert np.isnan(run.weights(head + 1)["model.norm.weight"]).all()
        fleet.post(path, {field: "good.safetensors"})
        head += 2


def test_a_delta_that_slime_or_miles_would_write_is_published(fleet: InferenceProcess) -> None:
    # Given the change to a version that another run has, as such a directory
    fabric, head = fleet.fabric, int(fleet.get("/weight_info")["weight_version"])
    run, other = fabric.fabric.run(RUN), fabric.fabric.run("other", model="tiny", environment="frozenlake")
    changed = {name: array.copy() for name, array in run.weights().items()}
    changed["model.norm.weight"][:3] += 1
    other.publish(run.weights(), version=head)
    other.publish(changed, version=head + 1)
    form = Form(version=head + 1, base_version=head)
    written = Path(fabric.ask(lambda ports: export_delta(ports.weights, "other", form, fleet.weights)).path)
    # When it is named by SGLang's route; then the run has that version, bit by bit
    fleet.post("/update_weights_from_disk", {"model_path": str(written), "weight_version": written.name})
    held = run.weights(head + 1)
    assert all(held[name].tobytes() == array.tobytes() for name, array in changed.items())


def test_carriers_are_used_up_replaced_and_seen_by_no_consumer(fleet: InferenceProcess) -> None:
    fabric, run = fleet.fabric, fleet.fabric.fabric.run(RUN)
    # When sessions and the rest ask, and the gateway is killed in between
    for session in ("a", "b", "a", ""):
        fleet.post(GENERATE, ask(*PROMPT), headers={"x-session-id": session} if session else {})
    held = fabric.ask(lambda ports: ports.board.run_status(RUN)).depth
    assert held >= 3
    fabric.kill("inference")
    fabric.until(lambda: not fleet.answers(), 10.0, "it is gone")
    fabric.until(fleet.answers, 60.0, "it is back")

    # Then the next one takes no carrier that was used, but cleans it up, and nothing has come to the run's consumers
    def has_cleaned_up() -> bool:
        fleet.post(GENERATE, ask(*PROMPT), headers={"x-session-id": os.urandom(4).hex()})
        run_status = fabric.ask(lambda ports: ports.board.run_status(RUN))
        return int(run_status.counters.get("groups_cancelled", 0)) >= held

    fabric.until(has_cleaned_up, 30.0, "what the killed one left is cancelled")
    assert list(run.groups(timeout=0.3)) == []


def test_a_gateway_whose_run_is_deleted_ends_with_a_sentence(tmp_path: Path) -> None:
    with processes(tmp_path) as fabric, running_inference(fabric, tmp_path):
        fabric.ask(lambda ports: ports.board.delete_run(RUN))

        child = fabric.supervisor.children["inference"]
        assert child.process is not None and child.process.wait(timeout=60) == 2
        said = child.tail(1000)
        assert "error: run 'policy' was deleted or made anew" in said.splitlines()[-1]
        assert "Traceback" not in said
