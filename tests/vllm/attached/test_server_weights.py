"""Attaching to a vLLM server that takes weights: development mode, our backend, log-probabilities after temperature."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EngineError, EngineUnsupported
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.contract.sampling import GUIDED
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Engine, Generation, GenerationRequest
from rollfab.workers.engines.vllm.attached.backend import ServerDoor
from rollfab.workers.engines.vllm.attached.client import Client
from rollfab.workers.engines.vllm.attached.model import ServedModel
from rollfab.workers.engines.vllm.attached.weights import ReloadedWeights
from rollfab.workers.engines.vllm.common.arena import Mirror
from rollfab.workers.engines.vllm.common.backend import Ask
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from tests.support.weights import engine_sides
from tests.support.weights.reference import plain_logits_elsewhere
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config
from tests.vllm.attached.server_process import Server, served
from tests.vllm.torch_reference import TorchReference, torch_reference

pytestmark = pytest.mark.timeout(300)  # a server takes 10 s to start, and many times that on a busy machine

PROMPT = list(range(5, 75))  # two blocks of KV cache that could be shared, and a bit
COUNT = 40
ARGUMENTS = (
    *("--weight-transfer-config", '{"backend":"rollfab"}'),
    *("--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--enable-prompt-tokens-details"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One model with three sets of weights; the server starts with the first."""
    directories = [write_config(tmp_path_factory.mktemp(f"model{seed}")) for seed in range(3)]
    return [write_checkpoint(each, random_tensors(each, seed)) for seed, each in enumerate(directories)]


@pytest.fixture(scope="module")
def torch_model() -> Iterator[TorchReference]:
    with torch_reference() as reference:
        yield reference


@pytest.fixture(scope="module")
def server(
    models: list[Path], torch_model: TorchReference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with served(models[0], tmp_path_factory.mktemp("server"), *ARGUMENTS, VLLM_SERVER_DEV_MODE="1") as server:
        yield server


@pytest.fixture
async def door(server: Server) -> AsyncIterator[ServerDoor]:
    door = ServerDoor(server.url, slot_count=8, context_tokens_max=None)
    await door.open()
    yield door
    await door.close()


def writes_of(model: Path, seed: int) -> dict[str, Any]:
    return {name: (None, values.reshape(-1).view(np.uint32)) for name, values in random_tensors(model, seed).items()}


async def tell(
    door: ServerDoor, request_id: str, *, salt: str = "", **sampling: Any
) -> tuple[list[int], list[float], int]:
    """Tokens, log-probabilities, and how many of the prompt's tokens were found in the prefix cache."""
    options = {"temperature": 0.0, **sampling}
    ask = Ask(
        request_id=request_id,
        input_ids=PROMPT,
        token_count_max=COUNT,
        sampling=Sampling(**options),
        cache_salt=salt,
    )
    token_ids, logprobs = [], []
    async for chunk in door.stream(ask):
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
    assert len(token_ids) == COUNT
    return token_ids, logprobs, chunk.cached_token_count


Told = tuple[list[int], list[float], int]


def assert_made_by(torch_model: TorchReference, model: Path, told: Told, temperature: float = 0.0) -> None:
    token_ids, told_logprobs, _ = told
    logprobs = torch_model.logprobs(model, PROMPT, token_ids, temperature or 1.0)
    np.testing.assert_allclose(told_logprobs, logprobs[np.arange(COUNT), token_ids], rtol=1e-5, atol=1e-5)
    if temperature == 0.0:
        assert (logprobs.argmax(axis=1) == token_ids).all()


async def bring(door: ServerDoor, writes: dict[str, Any], version: int) -> None:
    await door.write(writes, version)
    await door.forget_prefixes("recompute")


async def test_deltas_are_written_in_place_and_old_prefixes_are_forgotten(
    door: ServerDoor, models: list[Path], torch_model: TorchReference
) -> None:
    assert door.abilities.weights == "deltas"
    assert not any("--weight-transfer-config" in note for note in door.abilities.notes)
    for version in (1, 2):
        await bring(door, writes_of(models[version], version), version)
        told = await tell(door, f"v{version}")
        assert told[2] == 0
        assert_made_by(torch_model, models[version], told)
    assert (await tell(door, "again"))[2] == 64
    assert [(await tell(door, f"salted{index}", salt=salt))[2] for index, salt in enumerate("aba")] == [0, 0, 64]
    mirror = Mirror.create(door.facts.layout)
    await door.read(mirror)
    for name, (_, bits) in writes_of(models[2], 2).items():
        assert (mirror.bits[name] == bits).all()
    name = "model.layers.0.self_attn.k_proj.weight"
    places = np.arange(0, 4096, 7, dtype=np.int64)
    await bring(door, {name: (places, np.zeros(len(places), np.uint32))}, 3)
    await door.read(mirror)
    assert (np.flatnonzero(mirror.bits[name] == 0) == places).all()
    mirror.close()


@pytest.mark.parametrize("temperature", [0.6, 1.3])
async def test_logprobs_after_temperature_are_those_sampled_from(
    door: ServerDoor, models: list[Path], torch_model: TorchReference, temperature: float
) -> None:
    await bring(door, writes_of(models[1], 1), 1)
    told = await tell(door, "warm", temperature=temperature, seed=3)
    assert_made_by(torch_model, models[1], told, temperature)
    assert (await tell(door, "again", temperature=temperature, seed=3))[0] == told[0]


async def test_what_is_asked_for_of_the_distribution_reaches_the_server(
    door: ServerDoor, models: list[Path], torch_model: TorchReference
) -> None:
    await bring(door, writes_of(models[1], 1), 1)
    untold = {"prompt_logprobs", "kept_tokens", "routed_experts", "images"}
    assert door.abilities.cannot.keys() == {"presence_penalty", "frequency_penalty"} | GUIDED | untold
    plain = await tell(door, "plain")
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        ids, logprobs, _ = await tell(door, f"{cut}", temperature=1.5, **cut)
        assert ids == plain[0]
        np.testing.assert_allclose(logprobs, 0, atol=1e-6)
    assert set((await tell(door, "biased", logit_bias={77: 100.0}))[0]) == {77}
    assert (await tell(door, "penalised", repetition_penalty=50.0))[0] != plain[0]


async def test_likeliest_tokens_are_those_drawn_from_whatever_route_the_server_has(server: Server) -> None:
    engine = VllmEngine(
        VllmConfig(model="", server=server.url, slot_count=8, context_tokens_max=200, probes_writes=False)
    )

    @asynccontextmanager
    async def make() -> AsyncIterator[Engine]:
        yield engine

    await engine.start()
    try:
        await engine_sides.check_likeliest_tokens(make, plain_logits_elsewhere)
        await engine_sides.check_a_turn_of_two_claims(make)
    finally:
        await engine.close()


async def test_a_commit_in_the_middle_of_a_turn_is_marked_where_it_happened(
    server: Server, models: list[Path], torch_model: TorchReference
) -> None:
    engine = VllmEngine(
        VllmConfig(model="", server=server.url, slot_count=4, context_tokens_max=200, probes_writes=False)
    )
    await engine.start()
    assert engine.ranks is not None  # it stages while the server generates
    try:
        versions: tuple[tuple[int, int, int], ...] = ()
        while len(versions) < 2:  # on a busy machine the turn may have ended before we come to commit
            await engine.apply(Staged(1, writes_of(models[1], 1)), turns="recompute")
            made = await committed_in_the_middle(engine, Staged(2, writes_of(models[2], 2)))
            ids, versions = made.completion_ids.tolist(), made.versions
    finally:
        await engine.close()
    middle = versions[0][1]
    assert versions == ((0, middle, 1), (middle, 120, 2)) and 0 < middle < 120
    old = torch_model.logprobs(models[1], PROMPT, ids[:middle])
    new = torch_model.logprobs(models[2], PROMPT + ids[:middle], ids[middle:])
    assert [*old.argmax(axis=1), *new.argmax(axis=1)] == ids


async def committed_in_the_middle(engine: VllmEngine, staged: Staged) -> Generation:
    sampling = Sampling(temperature=0.0, max_tokens=120)
    prompt = np.array(PROMPT, dtype=np.int32)
    engine.generate(GenerationRequest(request_id="a", prompt_ids=prompt, sampling=sampling))
    while not any(len(each.completion_ids) for each in engine.progress(["a"])):
        if ended := await engine.finished(0.001):
            return ended[0]
    await engine.apply(staged, turns="recompute")
    (made,) = await engine.finished(100.0)
    assert made.error is None
    return made


async def test_whole_checkpoints_are_loaded_where_there_is_no_backend_of_ours(
    door: ServerDoor, models: list[Path], server: Server, torch_model: TorchReference
) -> None:
    client = Client(server.url, None)
    model = await ServedModel.find(client, "")
    weights = ReloadedWeights(client, model, ())
    await weights.open()
    try:
        name = "model.layers.1.mlp.gate_proj.weight"  # a part of a fused parameter: half of it alone would be wrong
        await weights.write(writes_of(models[1], 1), 1)
        told = await tell(door, "whole")
        assert_made_by(torch_model, models[1], told)
        bits = writes_of(models[1], 1)
        places = np.arange(0, 16384, 3, dtype=np.int64)
        await weights.write({name: (places, bits[name][1][places] ^ 0x80000000)}, 2)
        changed = await tell(door, "changed")
        assert changed[0] != told[0] and changed[2] == 0
        mirror = Mirror.create(door.facts.layout)
        await weights.read(mirror)
        live = Mirror.create(door.facts.layout)
        await door.read(live)
        assert all((live.bits[each] == mirror.bits[each]).all() for each in bits)
        assert (mirror.bits[name][places] == bits[name][1][places] ^ 0x80000000).all()
    finally:
        await weights.close()
        await client.close()


class FromAnotherRoot(Client):
    """To a server that has its own file system, as in a container: it finds the model, and nothing of ours."""

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        if path == "/collective_rpc" and "rollfab-weights-" in body["kwargs"]["weights_path"]:
            body = {**body, "kwargs": {"weights_path": "/another-root" + body["kwargs"]["weights_path"]}}
        return await super().ask(method, path, body, **options)


async def test_a_server_that_cannot_see_our_directory_is_left_as_it_was(
    door: ServerDoor, models: list[Path], server: Server, torch_model: TorchReference
) -> None:
    client = FromAnotherRoot(server.url, None)
    weights = ReloadedWeights(client, await ServedModel.find(client, ""), ())
    with pytest.raises(EngineError, match="does not load checkpoints from"):
        await weights.open()
    await weights.close()
    await client.close()
    assert_made_by(torch_model, models[0], await tell(door, "mended"))


async def test_sleep_on_a_cpu_is_not_pretended(door: ServerDoor) -> None:
    assert not door.abilities.sleeps
    with pytest.raises(EngineUnsupported, match="GPU"):
        await door.sleep()
