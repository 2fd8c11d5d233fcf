"""What is vLLM's own about the vLLM engine; what it shares with others is in the engine contract."""

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EngineError, EngineUnsupported
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Generation, GenerationRequest, Writes
from rollfab.workers.engines.vllm import local
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.inplace import packing
from rollfab.workers.engines.vllm.local import LocalDoor
from rollfab.workers.engines.vllm.step.scheduler_page import SchedulerPage
from tests.support.weights.engine_sides import catch
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config

PROMPT = np.arange(5, 85, dtype=np.int32)  # two and a half blocks of KV cache


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return write_checkpoint(tmp_path, random_tensors(tmp_path, 1))


def config(model: Path | str, **options: Any) -> VllmConfig:
    arguments = {"skip_tokenizer_init": True, **options.pop("arguments", {})}
    return VllmConfig(model=str(model), slot_count=4, context_tokens_max=256, arguments=arguments, **options)


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(config(checkpoint))
    await engine.start()
    yield engine
    await engine.close()


def asked(request_id: str, max_tokens: int = 40) -> GenerationRequest:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    return GenerationRequest(request_id=request_id, prompt_ids=PROMPT, sampling=sampling)


async def answer(engine: VllmEngine, request_id: str = "answer", max_tokens: int = 40) -> Generation:
    engine.generate(asked(request_id, max_tokens))
    (generation,) = await engine.finished(30.0)
    assert generation.error is None
    return generation


async def test_at_start_the_mirror_holds_what_the_checkpoint_holds(engine: VllmEngine, checkpoint: Path) -> None:
    # The write probe has changed every kind of tensor meanwhile, and has put it back.
    for name, values in random_tensors(checkpoint, 1).items():
        assert (engine.weight_bits()[name] == values.reshape(-1).view(np.uint32)).all(), name
    live = await engine.read_weights()
    assert all((live[name] == bits).all() for name, bits in engine.weight_bits().items())


async def test_a_prompt_that_was_read_before_is_found_in_the_prefix_cache(engine: VllmEngine) -> None:
    first = await answer(engine)
    before = engine.stats()
    second = await answer(engine)
    after = engine.stats()
    assert (first.completion_ids == second.completion_ids).all()
    assert (before.prompt_token_count, before.cached_token_count) == (80, 0)
    assert (after.prompt_token_count, after.cached_token_count) == (160, 64)  # whole blocks of 32


async def test_an_engine_core_that_dies_ends_its_requests_with_an_error_and_never_hangs(checkpoint: Path) -> None:
    engine = VllmEngine(config(checkpoint, probes_writes=False))
    await engine.start()
    children = set(children_of(os.getpid()))
    await catch(engine, asked("running", 170))
    core = next(pid for pid in children if "VLLM" in name_of(pid))
    os.kill(core, signal.SIGKILL)
    ended: list[Generation] = []
    while not ended:
        ended = await engine.finished(10.0)
    assert ended[0].finish_reason == "error" and ended[0].error
    with pytest.raises(EngineError):
        engine.stats()
    with pytest.raises(EngineError):
        engine.generate(asked("late"))
    await engine.close()


async def test_an_engine_whose_writes_do_nothing_is_refused_by_name(checkpoint: Path) -> None:
    class DeafDoor(LocalDoor):
        """Fake fault: takes every commit, and writes nothing."""

        async def update(self, information: dict[str, Any], what: str, version: int | None = None) -> None:
            if "commit" in information:
                await self._llm.update_weight_version(str(version))
            else:
                await super().update(information, what, version)

    with pytest.raises(EngineError, match=r"change nothing.*layers\.0\.mlp\.down_proj\.weight"):
        await VllmEngine(config(checkpoint), door=DeafDoor(config(checkpoint))).start()


async def test_a_write_that_reaches_the_input_but_not_the_output_is_noticed(checkpoint: Path) -> None:
    class HalfDeafDoor(LocalDoor):
        """Fake fault: the output layer computes with a copy of the embedding that it is tied to; no ranks to ask."""

        rank_count = 0

        async def write(self, writes: Writes, version: int) -> None:
            others = {
                name: (indices, values)
                for name, (indices, values) in writes.items()
                if not (name == "model.embed_tokens.weight" and indices is not None and indices[0] > 0)
            }
            await super().write(others, version)

    with pytest.raises(EngineError, match=r"copies of model\.embed_tokens\.weight,"):
        await VllmEngine(config(checkpoint), door=HalfDeafDoor(config(checkpoint))).start()


async def test_packed_weights_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM packs linear layers on a CPU unless it is kept from it; writes to them would be lost.
    monkeypatch.setattr(packing, "BACKEND", "another")
    with pytest.raises(EngineError, match="packed"):
        await VllmEngine(config(checkpoint)).start()


async def test_a_cpu_says_that_it_cannot_sleep(engine: VllmEngine) -> None:
    with pytest.raises(EngineUnsupported, match="CPU"):
        await engine.sleep()
    assert (await answer(engine)).finish_reason == "length"


async def test_a_quantised_checkpoint_is_refused_before_anything_starts(checkpoint: Path) -> None:
    text = json.loads((checkpoint / "config.json").read_text())
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (checkpoint / "config.json").write_text(json.dumps({**text, "quantization_config": quantised}))
    before = children_of(os.getpid())
    with pytest.raises(EngineUnsupported, match=r"quantised weights \(fp8\).*Give the unquantised model"):
        await VllmEngine(config(checkpoint)).start()
    assert children_of(os.getpid()) == before


async def test_an_engine_core_that_is_spawned_is_as_one_that_is_forked(
    engine: VllmEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where CUDA is used none is forked; here only the word is changed on which that hangs.
    monkeypatch.setattr(local, "START", {True: "spawn"})
    before = children_of(os.getpid())
    spawned = VllmEngine(config(checkpoint))
    await spawned.start()
    try:
        assert multiprocessing_method() == "spawn"
        forked_one, spawned_one = await answer(engine), await answer(spawned)
        (core,) = (pid for pid in children_of(os.getpid()) if pid not in before and "VLLM" in name_of(pid))
    finally:
        await spawned.close()
    assert (forked_one.completion_ids == spawned_one.completion_ids).all()
    assert np.allclose(forked_one.logprobs, spawned_one.logprobs, atol=1e-5)
    assert core not in children_of(os.getpid())


def multiprocessing_method() -> str:
    from vllm.utils.system_utils import get_mp_context

    return str(get_mp_context().get_start_method())


async def test_two_tensor_parallel_ranks_answer_as_one_does(checkpoint: Path) -> None:
    # Given the same deltas on one rank and on two
    dice = np.random.default_rng(3)
    answers = []
    for ranks in (1, 2):
        dice = np.random.default_rng(3)
        engine = VllmEngine(config(checkpoint, arguments={"tensor_parallel_size": ranks}, probes_writes=ranks == 2))
        await engine.start()
        for version in (1, 2):
            await engine.apply(Staged(version, sparse(engine, dice)))
        answers.append(await answer(engine))
        live = await engine.read_weights()
        assert all((live[name] == bits).all() for name, bits in engine.weight_bits().items())
        await engine.close()
    one, two = answers
    assert (one.completion_ids == two.completion_ids).all()
    np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=1e-3, atol=1e-4)


def sparse(engine: VllmEngine, dice: np.random.Generator) -> dict[str, Any]:
    """A twentieth of every tensor, other values."""
    writes = {}
    for spec in engine.layout.tensors:
        indices = np.flatnonzero(dice.random(spec.element_count) < 0.05)
        values = dice.normal(0, 0.25, len(indices)).astype(np.float32)
        writes[spec.name] = (indices, values.view(np.uint32))
    return writes


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_the_page_carries_limits_one_way_and_signs_of_life_the_other() -> None:
    from rollfab.workers.engines.base import EngineLimits

    mine = SchedulerPage.create()
    theirs = SchedulerPage(mine.path)
    assert theirs.limits() == EngineLimits()
    mine.set_limits(EngineLimits(running_count=0, step_tokens=7))
    assert theirs.limits() == EngineLimits(running_count=0, step_tokens=7)
    mine.hold(True)
    assert theirs.words[3] == 1
    theirs.words[[8, 9, 10]] = [5, 2, 250_000]
    signs = mine.life_signs()
    assert (signs.step_count, signs.running_count, signs.kv_used_fraction) == (5, 2, 0.25)
    mine.close()
