"""What the vLLM engine does by itself, over a door that is played: no vLLM here."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollfab.fabric.chat.vision import Vision
from rollfab.fabric.contract.errors import EngineError, EngineUnsupported, LayoutMismatch, WeightError
from rollfab.fabric.contract.images import Image, digest_of
from rollfab.fabric.contract.records import Sampling, Side
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.inspect.safetensors import save_bits
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import EngineLimits, Generation, GenerationRequest, TurnsAtCommit, Writes
from rollfab.workers.engines.vllm.attached.backend import CANNOT as SERVER_CANNOT
from rollfab.workers.engines.vllm.attached.model import ServedModel
from rollfab.workers.engines.vllm.attached.weights import ReloadedWeights, find_weights
from rollfab.workers.engines.vllm.common.arena import Mirror
from rollfab.workers.engines.vllm.common.backend import Abilities, Ask, Chunk, LifeSigns, ModelFacts
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.images import Eyes
from rollfab.workers.engines.vllm.write_probe import DRAWN_COUNT, lively
from rollfab.workers.serving.guarding.guard import GuardOrders
from tests.support.until import until
from tests.unit.fabric.chat.world import png

LAYOUT = Layout((TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "float32", (4,))))


class PlayedDoor:
    """Fake vLLM: makes token 7 again and again, one a turn of the event loop, and fails as told."""

    def __init__(self) -> None:
        self.facts = ModelFacts(name="played", layout=LAYOUT, context_tokens_max=100, vocabulary_size=50)
        self.abilities = Abilities(name="played vllm", weights="deltas", sleeps=True)
        self.calls: list[str] = []
        self.errors: dict[str, EngineError] = {}
        self.is_held = False
        self.registers_after = 0  # turns of the loop until a request is known
        self.known: set[str] = set()
        self.begun: list[str] = []
        self.aborted: set[str] = set()

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.errors:
            raise self.errors.pop(call)

    async def open(self) -> None:
        self.note("open")

    async def close(self) -> None:
        self.note("close")

    def check(self) -> None:
        pass

    async def stream(self, ask: Ask) -> AsyncIterator[Chunk]:
        for _ in range(self.registers_after):
            await asyncio.sleep(0)
        self.known.add(ask.request_id)
        self.begun.append(ask.request_id)
        for index in range(ask.token_count_max):
            while self.is_held and ask.request_id not in self.aborted:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if ask.request_id in self.aborted:
                self.aborted.discard(ask.request_id)
                yield Chunk(finish_reason="abort")
                return
            is_last = index + 1 == ask.token_count_max
            yield Chunk(token_ids=[7], logprobs=[-1.0], finish_reason="length" if is_last else "")
            await asyncio.sleep(0)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted |= set(request_ids) & self.known

    async def hold(self) -> None:
        self.note("hold")
        self.is_held = True

    async def release(self) -> None:
        self.note("release")
        self.is_held = False

    def set_limits(self, limits: EngineLimits) -> None:
        pass

    def life_signs(self) -> LifeSigns:
        return LifeSigns(step_count=0, running_count=1, kv_used_fraction=0.0)

    def guard_from_now(self) -> None:
        pass

    def order(self, orders: GuardOrders) -> None:
        pass

    def guard_said(self) -> bytes | None:
        return None

    async def release_kv(self) -> None:
        self.note("release kv")

    async def take_kv(self) -> None:
        self.note("take kv")

    def check_turns(self, turns: TurnsAtCommit) -> None:
        if turns in self.errors:
            raise self.errors.pop(turns)

    async def write(self, writes: Writes, version: int) -> None:
        self.note("write")
        assert self.is_held or "release kv" in self.calls

    async def forget_prefixes(self, turns: TurnsAtCommit) -> None:
        self.note(f"forget {turns}")
        assert self.is_held or "release kv" in self.calls

    async def read(self, into: Mirror) -> None:
        self.note("read")

    async def sleep(self) -> None:
        self.note("sleep")

    async def wake(self) -> None:
        self.note("wake")


B_ONES = {"b": (None, np.full(4, 1, dtype=np.uint32))}


@pytest.fixture
def door() -> PlayedDoor:
    return PlayedDoor()


@pytest.fixture
async def engine(door: PlayedDoor) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(VllmConfig(probes_writes=False), door=door)
    await engine.start()
    door.calls.clear()
    yield engine
    await engine.close()


def ask(engine: VllmEngine, request_id: str, max_tokens: int = 60) -> None:
    prompt = np.arange(5, dtype=np.int32)
    engine.generate(
        GenerationRequest(request_id=request_id, prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens))
    )


async def test_the_mirror_is_written_once_the_engine_goes_on(engine: VllmEngine, door: PlayedDoor) -> None:
    held: list[bool] = []
    mirror = engine._mirror
    assert mirror is not None
    take = mirror.take
    mirror.take = lambda writes: held.append(door.is_held) or take(writes)  # type: ignore[func-returns-value, method-assign]
    await engine.apply(Staged(1, B_ONES))
    assert held == [False] and engine.weight_bits()["b"].tolist() == [1, 1, 1, 1]


def test_a_large_model_is_made_lively_by_repeating_what_was_drawn_once() -> None:
    layout = Layout((TensorSpec("big", "bfloat16", (3, DRAWN_COUNT)), TensorSpec("norm", "float32", (7,))))
    made = lively(layout)
    rows = made["big"].reshape(3, DRAWN_COUNT)
    assert (rows[0] == rows[1]).all() and len(np.unique(rows[0])) > 1000
    assert made["norm"].view(np.float32).mean() > 0.5


async def test_one_pause_serves_all_reasons_and_a_commit_is_one_of_them(engine: VllmEngine, door: PlayedDoor) -> None:
    await engine.pause("slo")
    await engine.pause("operator")
    await engine.apply(Staged(1, B_ONES))
    await engine.resume("slo")
    assert door.calls == ["hold", "write", "forget keep"] and engine.stats().paused_by == ("operator",)
    await engine.resume("operator")
    assert door.calls == ["hold", "write", "forget keep", "release"] and not door.is_held


def with_image(request_id: str, **sampling: Any) -> GenerationRequest:
    """Of a model whose token 9 stands for images."""
    data = png(1, 56, 56)
    image = Image(start=1, end=5, digest=digest_of(data), data=data)
    prompt = np.array([3, 9, 9, 9, 9, 4], dtype=np.int32)
    return GenerationRequest(request_id=request_id, prompt_ids=prompt, sampling=Sampling(**sampling), images=(image,))


async def test_images_for_a_server_by_url_are_refused_with_the_reason(door: PlayedDoor) -> None:
    door.abilities = dataclasses.replace(door.abilities, cannot=SERVER_CANNOT)
    engine = VllmEngine(VllmConfig(probes_writes=False), door=door)
    await engine.start()
    with pytest.raises(EngineUnsupported, match=r"'r' has images, which played vllm cannot take: what a server's own"):
        engine.generate(with_image("r"))
    await engine.close()


async def test_a_commit_waits_for_nobodys_images_and_the_turn_begins_with_the_new_weights(
    engine: VllmEngine, door: PlayedDoor
) -> None:
    # Given a turn whose images are being read
    may_go_on = threading.Event()

    class SlowVision(Vision):
        def arrays(self, images: Sequence[bytes]) -> Any:
            may_go_on.wait(30.0)
            return super().arrays(images)

    engine._eyes, engine._cannot = Eyes(SlowVision(Qwen2VLImageProcessorPil(), 9)), {}
    engine.generate(with_image("r", max_tokens=3))
    await asyncio.sleep(0)
    # When weights come
    await engine.apply(Staged(1, B_ONES))
    # Then they are in before it has begun
    assert door.begun == []
    may_go_on.set()
    (made,) = await engine.finished(30.0)
    assert made.versions == ((0, 3, 1),) and door.begun == ["r"]


async def test_prefixes_are_kept_only_where_that_was_asked_for_and_never_when_turns_are_recomputed(
    engine: VllmEngine, door: PlayedDoor
) -> None:
    await engine.apply(Staged(1, B_ONES), may_reuse_prefix=True)
    await engine.apply(Staged(2, B_ONES), turns="recompute", may_reuse_prefix=True)
    assert door.calls == ["hold", "write", "release", "hold", "write", "forget recompute", "release"]


async def test_a_door_that_cannot_keep_says_so_before_anything_is_held_or_written(
    engine: VllmEngine, door: PlayedDoor
) -> None:
    door.errors["keep"] = EngineUnsupported("it is far away")
    with pytest.raises(EngineUnsupported, match="far away"):
        await engine.apply(Staged(1, B_ONES))
    assert door.calls == [] and engine.stats().active_version == -1


async def test_a_request_aborted_while_it_starts_over_ends_and_one_that_the_door_did_not_know_begins(
    engine: VllmEngine, door: PlayedDoor
) -> None:
    # Given two requests that the door does not know yet, in a commit that has them start over
    door.registers_after = 20
    await engine.pause("test")
    ask(engine, "unwanted")
    ask(engine, "wanted", max_tokens=5)
    commit = asyncio.create_task(engine.apply(Staged(1, B_ONES)))
    await asyncio.sleep(0)
    (ended,) = await asyncio.wait_for(engine.abort(["unwanted"]), 5.0)
    await commit
    assert ended.finish_reason == "abort"
    await engine.resume("test")
    (wanted,) = await engine.finished(5.0)
    assert wanted.finish_reason == "length" and wanted.versions == ((0, 5, 1),)
    assert door.begun == ["unwanted", "wanted", "wanted"]


async def test_a_request_that_is_aborted_as_it_begins_ends_all_the_same(engine: VllmEngine, door: PlayedDoor) -> None:
    door.registers_after = 20
    await engine.pause("test")  # nothing would end by itself
    ask(engine, "early")
    (ended,) = await asyncio.wait_for(engine.abort(["early"]), 5.0)
    assert ended.finish_reason == "abort" and ended.completion_ids.size == 0
    assert await engine.finished(0.01) == []


async def test_a_request_that_runs_through_a_commit_says_which_weights_made_what(
    engine: VllmEngine, door: PlayedDoor
) -> None:
    ask(engine, "through")
    await until(lambda: len(engine.progress(["through"])[0].completion_ids), every_s=0.0)
    await engine.apply(Staged(3, B_ONES))
    (ended,) = await engine.finished(5.0)
    (start, middle, old), (again, end, new) = ended.versions
    assert (start, end, old, new) == (0, 60, -1, 3) and middle == again > 0


async def test_a_sleep_that_fails_is_undone_by_waking(engine: VllmEngine, door: PlayedDoor) -> None:
    door.errors["sleep"] = EngineError("half asleep")
    with pytest.raises(EngineError, match="half asleep"):
        await engine.sleep()
    await engine.wake()
    await engine.wake()  # awake: nothing to do
    assert door.calls == ["sleep", "wake"]


async def test_without_its_kv_cache_it_sleeps_and_pauses_hold_once_that_is_back(
    engine: VllmEngine, door: PlayedDoor
) -> None:
    await engine.release_kv()
    await engine.pause("lease")
    assert door.calls[-1] == "release kv"

    await engine.take_kv()

    assert door.calls[-2:] == ["take kv", "hold"]


async def test_while_it_sleeps_nothing_is_written_into_memory_that_is_gone(
    engine: VllmEngine, door: PlayedDoor
) -> None:
    await engine.sleep()
    with pytest.raises(WeightError, match=r"version 1 was not applied: the engine sleeps"):
        await engine.apply(Staged(1, B_ONES))
    with pytest.raises(EngineError, match="sleeps"):
        await engine.read_weights()
    await engine.wake()
    assert door.calls == ["sleep", "wake"]
    await engine.release_kv()  # the weights stay
    await engine.apply(Staged(1, B_ONES))
    assert "write" in door.calls


async def test_what_cannot_sleep_is_awake(engine: VllmEngine, door: PlayedDoor) -> None:
    door.errors["sleep"] = EngineUnsupported("no memory to give back")
    with pytest.raises(EngineUnsupported):
        await engine.sleep()
    await engine.pause("test")
    assert door.calls == ["sleep", "hold"]


async def test_a_pause_while_it_sleeps_holds_when_it_wakes(engine: VllmEngine, door: PlayedDoor) -> None:
    await engine.sleep()
    await engine.pause("lease")
    assert door.calls == ["sleep"]
    await engine.wake()
    assert door.calls == ["sleep", "wake", "hold"]


async def test_a_commit_that_cannot_hold_the_engine_leaves_it_as_it_was(engine: VllmEngine, door: PlayedDoor) -> None:
    door.errors["hold"] = EngineError("no answer")
    with pytest.raises(WeightError, match="no answer"):
        await engine.apply(Staged(1, B_ONES))
    assert engine.stats().paused_by == () and engine.stats().active_version == -1
    await engine.apply(Staged(1, B_ONES))
    assert engine.stats().active_version == 1 and engine.weight_bits()["b"].tolist() == [1, 1, 1, 1]


def beside(first: int, count: int) -> tuple[Side, ...]:
    """A chunk's likeliest tokens: numbers, counted from the turn's first."""
    ids = np.arange(first, first + count, dtype=np.int32)[:, None]
    return (Side(name="top_ids", start=0, end=count, array=ids),)


def prompt_side(count: int) -> Side:
    return Side(name="prompt_logprobs", start=-count, end=0, array=np.full(count, -9, dtype=np.float32))


class TellingDoor(PlayedDoor):
    """Tells something beside the tokens of its one request, in two chunks of three tokens; then waits."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = dataclasses.replace(self.facts, tokenizer="tiny", logprob_count_max=3)
        self.goes_on = asyncio.Event()

    async def stream(self, ask: Ask) -> AsyncIterator[Chunk]:
        for first, text in ((0, "abc"), (3, "xyz")):
            ids = CharTokenizer().encode(text).tolist()
            told = beside(first, 3) if first else (*beside(first, 3), prompt_side(len(ask.input_ids)))
            yield Chunk(token_ids=ids, logprobs=[-1.0] * 3, sides=told)
            await self.goes_on.wait()


async def test_what_is_told_beside_tokens_is_cut_with_them_and_known_while_they_come() -> None:
    # Given a vLLM that tells something beside each token, and a request with a stop text
    door = TellingDoor()
    engine = VllmEngine(VllmConfig(probes_writes=False), door=door)  # type: ignore[arg-type]
    await engine.start()
    prompt = np.arange(5, dtype=np.int32)
    sampling = Sampling(max_tokens=9, stop=("xy",), logprobs=3, prompt_logprobs=0)
    engine.generate(GenerationRequest(request_id="a", prompt_ids=prompt, sampling=sampling))
    # When half of it is there, and when it has ended two thirds into a chunk
    await until(lambda: len(engine.progress(["a"])[0].completion_ids) == 3)
    (half,) = engine.progress(["a"])
    (again,) = engine.progress(["a"])
    door.goes_on.set()
    (whole,) = await engine.finished(5.0)
    # Then each token that is kept has its row, and no other
    assert (whole.finish_reason, len(whole.completion_ids)) == ("stop", 5)
    for made, count in ((half, 3), (again, 3), (whole, 5)):
        told = {(side.name, side.start, side.end): side.array.tolist() for side in made.sides}
        assert told == {("prompt_logprobs", -5, 0): [-9.0] * 5, ("top_ids", 0, count): [[i] for i in range(count)]}
    # And more than it tells is refused as what no other attempt mends
    for name in ("logprobs", "prompt_logprobs"):
        more = Sampling(**{name: 4})
        with pytest.raises(EngineUnsupported, match=rf"{name} 4.*at most 3.*--max-logprobs 20"):
            engine.generate(GenerationRequest(request_id="b", prompt_ids=prompt, sampling=more))
    await engine.close()


class NumblessDoor(PlayedDoor):
    """Its weights cannot continue one prompt: the third token's logits are no numbers, and so are all after it."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    async def stream(self, ask: Ask) -> AsyncIterator[Chunk]:
        if ask.request_id != "broken":
            async for chunk in super().stream(ask):
                yield chunk
            return
        try:
            yield Chunk(token_ids=[7], logprobs=[-1.0], sides=(*beside(0, 1), prompt_side(3)))
            yield Chunk(token_ids=[7, 0, 0], logprobs=[-1.0, float("nan"), float("nan")], sides=beside(1, 3))
            await asyncio.Event().wait()
        finally:
            self.ended.append(ask.request_id)


async def test_a_request_whose_logits_are_no_numbers_fails_alone_with_the_tokens_before() -> None:
    door = NumblessDoor()
    engine = VllmEngine(VllmConfig(probes_writes=False), door=door)  # type: ignore[arg-type]
    await engine.start()
    prompt = np.arange(3, dtype=np.int32)
    for name in ("broken", "beside"):
        engine.generate(
            GenerationRequest(request_id=name, prompt_ids=prompt, sampling=Sampling(temperature=0.0, max_tokens=9))
        )
    ended: dict[str, Generation] = {}
    while len(ended) < 2:
        ended |= {generation.request_id: generation for generation in await engine.finished(5.0)}

    assert ended["broken"].finish_reason == "error" and "not numbers" in str(ended["broken"].error)
    assert ended["broken"].completion_ids.tolist() == [7, 7] and np.isfinite(ended["broken"].logprobs).all()
    told = {(side.name, side.start, side.end): side.array.tolist() for side in ended["broken"].sides}
    assert told == {("prompt_logprobs", -3, 0): [-9.0] * 3, ("top_ids", 0, 2): [[0], [1]]}
    assert door.ended == ["broken"], "the vLLM computes nothing more of it"
    assert ended["beside"].completion_ids.tolist() == [7] * 9
    await engine.close()


async def test_a_write_that_fails_half_way_ends_the_engine(engine: VllmEngine, door: PlayedDoor) -> None:
    door.errors["write"] = EngineError("lost in the middle")
    with pytest.raises(WeightError, match="lost in the middle"):
        await engine.apply(Staged(1, B_ONES))
    with pytest.raises(EngineError, match="in part"):
        engine.stats()


async def test_a_commit_that_was_refused_whole_changes_nothing(engine: VllmEngine, door: PlayedDoor) -> None:
    door.errors["write"] = WeightError("it keeps what it has")
    with pytest.raises(WeightError, match="keeps"):
        await engine.apply(Staged(1, B_ONES))
    with pytest.raises(LayoutMismatch, match="twice"):
        await engine.apply(Staged(1, {"b": (np.array([2, 2]), np.zeros(2, dtype=np.uint32))}))
    assert engine.stats().active_version == -1 and engine.weight_bits()["b"].tolist() == [0, 0, 0, 0]


class PlayedServer:
    """Fake vLLM server on this machine: looks at the checkpoints that it is told to load."""

    url = "http://localhost:1"

    def __init__(self) -> None:
        self.seen: list[tuple[Path, int, int]] = []  # a checkpoint's directory, its mode, the mode of what holds it

    async def ask(self, method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        if path == "/collective_rpc":
            self._look(Path(body["kwargs"]["weights_path"]))
        return {"success": True}

    def _look(self, directory: Path) -> None:
        self.seen.append((directory, directory.stat().st_mode & 0o777, directory.parent.stat().st_mode & 0o777))
        assert (directory / "model.safetensors").stat().st_size > 0


async def test_checkpoints_for_a_server_cannot_be_found_by_other_users(tmp_path: Path) -> None:
    bits = {spec.name: np.zeros(spec.element_count, np.uint32) for spec in LAYOUT.tensors}
    save_bits(tmp_path / "model.safetensors", LAYOUT, bits)
    model = SimpleNamespace(
        layout=LAYOUT, root=str(tmp_path), checkpoint_files=lambda: [tmp_path / "model.safetensors"]
    )
    server = PlayedServer()
    weights = ReloadedWeights(server, model, ())  # type: ignore[arg-type]

    await weights.open()
    await weights.write({"a": (None, np.ones(6, np.uint32))}, 3)

    assert len(server.seen) == 2
    for directory, mode, outer_mode in server.seen:
        assert (mode, outer_mode) == (0o755, 0o711), "the server, maybe another user, reads what it was told of"
        assert re.search(r"-[0-9a-f]{32}$", directory.name), "and nobody guesses the name"
        assert not directory.exists(), "it is gone once it is loaded"
    assert server.seen[0][0].name[-32:] != server.seen[1][0].name[-32:]
    await weights.close()


# ---------------------------------------------------------------- what a server is


def served(**info: Any) -> ServedModel:
    said: dict[str, Any] = {"model_config": {"dtype": "torch.bfloat16"}, "device_config": "cuda", **info}
    return ServedModel(
        name="org/name",
        root="org/name",
        context_tokens_max=100,
        vocabulary_size=50,
        layout=LAYOUT,
        server_version="0.32.0",
        info=said,
    )


async def test_a_server_with_quantised_weights_is_refused_with_what_to_start_it_with() -> None:
    client: Any = SimpleNamespace(url="http://here")
    model = dataclasses.replace(served(), quantization="fp8")
    with pytest.raises(EngineUnsupported, match=r"quantised weights \(fp8\).*without --quantization"):
        await find_weights(client, model)


async def test_the_weights_of_a_server_that_moves_its_experts_stay_as_they_are() -> None:
    client: Any = SimpleNamespace(url="http://here")
    found = await find_weights(client, served(parallel_config={"enable_eplb": True}))
    assert found.kind == "fixed" and "start the server without --enable-eplb" in found.notes[0]
