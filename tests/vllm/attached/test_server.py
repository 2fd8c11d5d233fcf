"""Attaching to an unmodified vLLM server: as it starts by default, its weights fixed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rollfab.fabric.contract.errors import ConfigError, EngineError, EngineUnsupported, WeightError
from rollfab.fabric.contract.records import Sampling, Side
from rollfab.fabric.contract.sides import joined, parts
from rollfab.fabric.model.presets import model_config
from rollfab.workers.engines.base import EngineLimits, GenerationRequest
from rollfab.workers.engines.vllm.attached.backend import ServerDoor
from rollfab.workers.engines.vllm.common import pieces
from rollfab.workers.engines.vllm.common.arena import Mirror
from rollfab.workers.engines.vllm.common.backend import Ask
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from tests.support.until import until
from tests.support.weights.engine_sides import agree
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config
from tests.vllm.attached.server_process import Server, served
from tests.vllm.torch_reference import TorchReference, torch_reference

pytestmark = pytest.mark.timeout(300)  # a server takes 10 s to start, and many times that on a busy machine

PROMPT = list(range(5, 45))
SLOT_COUNT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_config(tmp_path_factory.mktemp("model"))
    # What a served model's own sampling settings would change, were they not all overridden.
    (directory / "generation_config.json").write_text('{"top_k": 3, "repetition_penalty": 1.7, "temperature": 0.2}')
    return write_checkpoint(directory, random_tensors(directory, 1))


@pytest.fixture(scope="module")
def torch_model() -> Iterator[TorchReference]:
    with torch_reference() as reference:
        yield reference


@pytest.fixture(scope="module")
def server(model: Path, torch_model: TorchReference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    with served(model, directory, "--enable-log-requests", "--max-logprobs", "9", VLLM_LOGGING_LEVEL="INFO") as server:
        yield server


@pytest.fixture
async def door(server: Server) -> AsyncIterator[ServerDoor]:
    async with opened(server.url + "/v1/") as door:
        yield door


@dataclass
class Told:
    """What a stream has told so far. It is read no further than `stops_at` tokens until `go_on`."""

    stops_at: int = 1000
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    finish_reason: str = ""
    has_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, door: ServerDoor, ask: Ask) -> "Told":
        async for chunk in door.stream(ask):
            self.sides += parts(chunk.sides, 0, len(chunk.token_ids), len(self.token_ids))
            self.token_ids += chunk.token_ids
            self.logprobs += chunk.logprobs
            self.finish_reason = chunk.finish_reason
            if len(self.token_ids) >= self.stops_at:
                self.has_stopped.set()
                await self.goes_on.wait()
        self.has_stopped.set()
        return self

    def go_on(self, stops_at: int = 1000) -> None:
        self.stops_at = stops_at
        self.has_stopped.clear()
        self.goes_on.set()
        self.goes_on = asyncio.Event()


def new_ask(request_id: str, count: int, prompt: list[int] = PROMPT, **sampling: Any) -> Ask:
    options = {"temperature": 0.0, **sampling}
    stop_ids = options.get("stop_ids", ())
    return Ask(
        request_id=request_id,
        input_ids=prompt,
        token_count_max=count,
        sampling=Sampling(**options),
        stop_ids=stop_ids,
    )


async def tell(door: ServerDoor, ask: Ask) -> Told:
    return await Told().follow(door, ask)


async def test_what_the_server_cannot_do_is_told_with_what_to_start_it_with(door: ServerDoor, model: Path) -> None:
    assert door.facts.name == str(model) and door.facts.context_tokens_max == 256
    assert door.facts.vocabulary_size == model_config("tiny")["vocab_size"]
    assert door.abilities.name == "vllm server 0.32.0" and door.abilities.weights == "fixed"
    notes = " ".join(door.abilities.notes)
    for option in ("processed_logprobs", "--weight-transfer-config", "VLLM_SERVER_DEV_MODE=1", "--enable-scale-out"):
        assert option in notes
    with pytest.raises(EngineUnsupported, match="--enable-sleep-mode"):
        await door.sleep()


async def test_tokens_and_logprobs_are_those_of_vllm_and_of_torch(
    door: ServerDoor, model: Path, server: Server, torch_model: TorchReference
) -> None:
    asks = [new_ask("greedy", 60), new_ask("seeded", 60, temperature=1.0, seed=7)]
    told = [await tell(door, ask) for ask in asks]
    expected = [torch_model.logprobs(model, PROMPT, each.token_ids) for each in told]
    for ask, each, logprobs in zip(asks, told, expected, strict=True):
        direct = await asked_directly(server, str(model), ask)
        assert (each.token_ids, each.logprobs) == direct
        assert np.float32(each.logprobs).tolist() == each.logprobs  # nothing was rounded on the way
        of_tokens = logprobs[np.arange(60), each.token_ids]
        np.testing.assert_allclose(each.logprobs, of_tokens, rtol=1e-5, atol=1e-5)
        assert each.finish_reason == "length"
    assert (expected[0].argmax(axis=1) == told[0].token_ids).all()
    assert told[0].token_ids != told[1].token_ids


async def test_tokens_come_in_pieces_and_are_the_same(
    door: ServerDoor, model: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server whose pace is known, and is quick enough whatever else this machine does
    monkeypatch.setattr(pieces, "PIECE_S", 60.0)
    await tell(door, new_ask("pace", 60))
    count = door.life_signs().step_count
    # When 60 tokens are asked for
    ask = new_ask("pieces", 60, temperature=1.0, seed=7)
    told = await tell(door, ask)
    # Then they are those that come of it asked directly, in no more pieces than 1 + 16 + 16 + 16 + 11
    assert (told.token_ids, told.logprobs) == await asked_directly(server, str(model), ask)
    assert len(told.token_ids) == 60 and door.life_signs().step_count - count <= 5


async def asked_directly(server: Server, model: str, ask: Ask) -> tuple[list[int], list[float]]:
    body = {
        "model": model,
        "prompt": ask.input_ids,
        "max_tokens": ask.token_count_max,
        "logprobs": 0,
        "temperature": ask.sampling.temperature,
        "seed": ask.sampling.seed,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v1/completions", json=body) as answer:
        choice = (await answer.json())["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def test_a_temperature_whose_logprobs_would_be_wrong_is_refused(door: ServerDoor) -> None:
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        door.stream(new_ask("warm", 3, temperature=0.7))
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"):
        assert "--logprobs-mode processed_logprobs" in door.abilities.cannot[name]


async def test_prompts_find_what_the_cache_has_under_their_own_salt_alone(door: ServerDoor, server: Server) -> None:
    prompt = list(range(50, 90))  # of this test alone
    hits = []
    for index, salt in enumerate(("a", "b", "", "a")):
        before = server.metric("vllm:prefix_cache_hits_total")
        told = await tell(door, replace(new_ask(f"salted{index}", 2, prompt), cache_salt=salt))
        assert len(told.token_ids) == 2
        hits.append(server.metric("vllm:prefix_cache_hits_total") - before)
    assert hits == [0, 0, 0, 32]


async def test_a_bias_reaches_the_server(door: ServerDoor) -> None:
    assert set((await tell(door, new_ask("biased", 5, logit_bias={77: 100.0}))).token_ids) == {77}


async def test_a_stop_token_is_part_of_the_completion(door: ServerDoor) -> None:
    full = await tell(door, new_ask("full", 40))
    stop_id = full.token_ids[20]
    stopped = await tell(door, new_ask("stopped", 40, stop_ids=(stop_id,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == full.token_ids[: full.token_ids.index(stop_id) + 1]


async def begun(door: ServerDoor, *asks: Ask, stops_at: int) -> tuple[list[Told], list[asyncio.Task[Told]]]:
    """Streams that are all in the middle. On a busy machine vLLM may tell all of one at once: then again."""
    while True:
        told = [Told(stops_at=stops_at) for _ in asks]
        tasks = [asyncio.create_task(each.follow(door, ask)) for each, ask in zip(told, asks, strict=True)]
        for each in told:
            await each.has_stopped.wait()
        if all(len(each.token_ids) < ask.token_count_max for each, ask in zip(told, asks, strict=True)):
            return told, tasks
        for each in told:
            each.go_on()
        await asyncio.gather(*tasks)


async def test_an_abort_keeps_the_tokens_and_ends_the_request_at_the_server(door: ServerDoor, server: Server) -> None:
    full = await tell(door, new_ask("full", 200))
    while "aborted" not in server.log_path.read_text():  # on a busy machine it may have ended before we come to abort
        (cut,), tasks = await begun(door, new_ask("cut", 200), stops_at=10)
        count = len(cut.token_ids)
        await door.abort(["cut", "never-started"])
        cut.go_on()
        await asyncio.gather(*tasks)
        assert cut.finish_reason == "abort" and len(cut.token_ids) == count
        assert cut.token_ids == full.token_ids[:count]
        await is_idle(server)
    again = await tell(door, new_ask("cut", 200))  # the same id may run again
    assert again.token_ids == full.token_ids


async def is_idle(server: Server) -> None:
    await until(lambda: server.metric("vllm:num_requests_running") == 0)


async def test_nothing_is_streamed_while_held_and_the_rest_is_as_never_held(door: ServerDoor, server: Server) -> None:
    full = await tell(door, new_ask("full", 120))
    held, tasks = await begun(door, *(new_ask(f"h{i}", 120) for i in range(3)), stops_at=10)
    for stops_next in (60, 1000):
        for each in held:
            await each.has_stopped.wait()
        await door.hold()
        counts = [len(each.token_ids) for each in held]
        for each in held:
            each.go_on(stops_next)
        late = asyncio.create_task(tell(door, new_ask(f"late{stops_next}", 3)))
        await is_idle(server)
        await asyncio.sleep(0.05)
        assert counts == [len(each.token_ids) for each in held] and not late.done()
        assert door.life_signs().running_count == 0
        await door.release()
        assert (await late).token_ids == full.token_ids[:3]
    for each in await asyncio.gather(*tasks):
        assert each.token_ids == full.token_ids and each.finish_reason == "length"
        np.testing.assert_allclose(each.logprobs, full.logprobs, rtol=1e-4, atol=1e-5)


async def test_likeliest_tokens_are_told_up_to_the_servers_own_limit_and_over_a_hold(
    door: ServerDoor, model: Path, torch_model: TorchReference
) -> None:
    # Given a server that tells nine at most, and a request for as many, held in the middle
    assert door.facts.logprob_count_max == 9
    (told,), tasks = await begun(door, new_ask("told", 60, temperature=1.0, seed=7, logprobs=9), stops_at=10)
    await door.hold()
    told.go_on()
    await door.release()
    await asyncio.gather(*tasks)
    # Then every token has nine beside it, as torch has them
    sides = joined(told.sides)
    assert [(side.name, side.start, side.end) for side in sides] == [("top_ids", 0, 60), ("top_logprobs", 0, 60)]
    ids, logprobs = (side.array for side in sides)
    assert ids.shape == (60, 9)
    agree(ids, logprobs, torch_model.logprobs(model, PROMPT, told.token_ids))
    # And what it does not tell, it says
    assert door.abilities.cannot.keys() >= {"prompt_logprobs", "kept_tokens", "routed_experts"}


async def test_limits_keep_the_oldest_running_and_the_others_go_on_later(door: ServerDoor) -> None:
    prompt = list(range(5, 75))
    full = await tell(door, new_ask("full", 60, prompt))
    told, tasks = await begun(door, *(new_ask(f"{i}", 60, prompt) for i in range(3)), stops_at=5)
    assert door.life_signs().running_count == 3
    counts = [len(each.token_ids) for each in told]
    door.set_limits(EngineLimits(running_count=1))
    for each in told:
        each.go_on(stops_at=50)
    await told[0].has_stopped.wait()
    assert door.life_signs().running_count == 1
    assert [len(each.token_ids) for each in told[1:]] == counts[1:]
    door.set_limits(EngineLimits(step_tokens=0))
    assert door.life_signs().running_count == 0
    door.set_limits(EngineLimits(kv_tokens=len(prompt) + 60))  # room for one
    told[0].go_on()
    await told[1].has_stopped.wait()
    assert tasks[0].done() and len(told[2].token_ids) == counts[2]
    told[1].go_on()
    told[2].go_on()
    await asyncio.gather(*tasks)
    assert all(each.token_ids == full.token_ids for each in told)


async def test_fixed_weights_take_what_they_are_and_refuse_everything_else(door: ServerDoor, model: Path) -> None:
    own = {name: values.reshape(-1).view(np.uint32) for name, values in random_tensors(model, 1).items()}
    mirror = Mirror.create(door.facts.layout)
    await door.read(mirror)
    assert all((mirror.bits[name] == bits).all() for name, bits in own.items())
    mirror.close()
    await door.write({name: (None, bits) for name, bits in own.items()}, 0)
    name = "model.layers.1.mlp.up_proj.weight"
    places = np.array([3, 70], dtype=np.int64)
    await door.write({name: (places, own[name][places])}, 1)
    with pytest.raises(WeightError, match=rf"version 2 .*{name}.*--weight-transfer-config"):
        await door.write({name: (places, own[name][places] + 1)}, 2)


async def test_the_engine_runs_over_an_existing_server(server: Server) -> None:
    engine = VllmEngine(VllmConfig(model="", server=server.url, slot_count=SLOT_COUNT, context_tokens_max=128))
    await engine.start()
    try:
        whole = await made_by(engine, "whole", stops_at=1000)
        assert len(whole) == 80
        made = whole
        while len(made) == 80:  # on a busy machine it may have ended before we come to pause
            made = await made_by(engine, "cut", stops_at=5)
        prior = np.array(made, dtype=np.int32)
        assert made + await made_by(engine, "rest", stops_at=1000, prior_ids=prior) == whole
    finally:
        await engine.close()


async def made_by(engine: VllmEngine, request_id: str, *, stops_at: int, **options: Any) -> list[int]:
    """Tokens of a greedy request that is paused and then aborted once it has `stops_at`."""
    sampling = Sampling(temperature=0.0, max_tokens=80)
    prompt = np.array(PROMPT, dtype=np.int32)
    engine.generate(GenerationRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling, **options))
    while True:
        if ended := await engine.finished(0.001):
            return ended[0].completion_ids.tolist()
        if any(len(each.completion_ids) >= stops_at for each in engine.progress([request_id])):
            break
    await engine.pause("test")
    before = engine.progress([request_id])
    await asyncio.sleep(0.05)
    (cut,) = await engine.abort([request_id])
    await engine.resume("test")
    assert not before or before[0].completion_ids.tolist() == cut.completion_ids.tolist()
    return cut.completion_ids.tolist()


async def test_a_killed_server_ends_every_stream_with_an_error(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, "--api-key", "secret-key", VLLM_SERVER_DEV_MODE="1") as server:
        with pytest.raises(EngineError, match=r"401.*ROLLFAB_SERVER_KEY"):
            async with opened(server.url):
                pass
        async with opened(server.url, "secret-key") as door, opened(server.url, "secret-key") as held:
            await check_reloads(door, model)
            await check_a_forgotten_output_layer_is_noticed(server.url)
            await held.hold()
            waiting = asyncio.create_task(tell(held, new_ask("waiting", 200)))
            running = await in_the_middle(door, server)
            server.kill()
            for task in (running, waiting):
                with pytest.raises(EngineError, match=server.url) as caught:
                    await asyncio.wait_for(task, 60)
                assert "secret-key" not in str(caught.value)
            for each in (door, held):
                with pytest.raises(EngineError, match=server.url):
                    each.check()
                await each.abort(["running"])


async def check_a_forgotten_output_layer_is_noticed(url: str) -> None:
    # On a CPU vLLM's reload forgets its packed copy of an output layer that is tied to the embedding.
    engine = VllmEngine(VllmConfig(model="", server=url, api_key="secret-key", slot_count=SLOT_COUNT))
    with pytest.raises(EngineError, match=r"copies of model\.embed_tokens\.weight, .* --weight-transfer-config"):
        await engine.start()


@asynccontextmanager
async def opened(url: str, api_key: str | None = None) -> AsyncIterator[ServerDoor]:
    door = ServerDoor(url, slot_count=SLOT_COUNT, context_tokens_max=None, api_key=api_key)
    try:
        await door.open()
        yield door
    finally:
        await door.close()


async def in_the_middle(door: ServerDoor, server: Server) -> asyncio.Task[Told]:
    """A request that the server has stopped in, some of its tokens here and some not made."""
    while True:
        told = Told(stops_at=5)
        running = asyncio.create_task(told.follow(door, new_ask("running", 200)))
        await told.has_stopped.wait()
        server.stop()
        told.go_on()
        await asyncio.sleep(0.3)  # what was on its way arrives
        if not running.done():
            return running
        server.stop(goes_on=True)


async def check_reloads(door: ServerDoor, model: Path) -> None:
    """In development mode, without our backend: whole checkpoints."""
    assert door.abilities.weights == "reload"
    before = await tell(door, new_ask("before", 20))
    other = {name: values.reshape(-1).view(np.uint32) for name, values in random_tensors(model, 2).items()}
    await door.write({name: (None, bits) for name, bits in other.items()}, 1)
    assert (await tell(door, new_ask("after", 20))).token_ids != before.token_ids
    own = {name: values.reshape(-1).view(np.uint32) for name, values in random_tensors(model, 1).items()}
    await door.write({name: (None, bits) for name, bits in own.items()}, 2)
    again = await tell(door, new_ask("again", 20))
    assert (again.token_ids, again.logprobs) == (before.token_ids, before.logprobs)


async def test_where_no_server_is_the_url_and_the_next_step_are_told() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 cannot be reached.*running"):
        async with opened("http://127.0.0.1:9"):
            pass
    with pytest.raises(ConfigError, match="http://host:8000"):
        ServerDoor("127.0.0.1:9", slot_count=1, context_tokens_max=None)
