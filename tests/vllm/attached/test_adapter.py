"""Weights as a LoRA adapter, on real vLLM."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EngineError
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.vllm.adapter import adapter_layout
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config

RANK, ALPHA = 8, 16
PROMPT = np.arange(5, 45, dtype=np.int32)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[VllmEngine]:
    write_config(tmp_path / "base")
    write_checkpoint(tmp_path / "base", random_tensors(tmp_path / "base", 1))
    config = VllmConfig(
        model=str(tmp_path / "base"),
        slot_count=4,
        context_tokens_max=128,
        arguments={"skip_tokenizer_init": True},
        adapter_rank=RANK,
        adapter_alpha=ALPHA,
    )
    engine = VllmEngine(config)
    await engine.start()
    yield engine
    await engine.close()


async def greedy(engine: VllmEngine) -> Generation:
    sampling = Sampling(temperature=0.0, max_tokens=30)
    engine.generate(GenerationRequest(request_id="greedy", prompt_ids=PROMPT, sampling=sampling))
    (generation,) = await engine.finished(30.0)
    return generation


def random_adapter(layout: Layout, seed: int) -> dict[str, Any]:
    dice = np.random.default_rng(seed)
    return {spec.name: dice.normal(0, 0.1, spec.shape).astype(np.float32) for spec in layout.tensors}


async def test_an_adapter_answers_like_the_model_that_it_is_merged_into(engine: VllmEngine, tmp_path: Path) -> None:
    # Given an adapter that was published whole, and then changed in a few elements
    adapter = random_adapter(engine.layout, 2)
    before = await greedy(engine)
    await engine.apply(Staged(1, {name: (None, each.reshape(-1).view(np.uint32)) for name, each in adapter.items()}))
    first = await greedy(engine)
    name = engine.layout.tensors[0].name
    adapter[name].reshape(-1)[[3, 7]] = [0.5, -0.5]
    changed = np.array([0.5, -0.5], dtype=np.float32).view(np.uint32)
    await engine.apply(Staged(2, {name: (np.array([3, 7]), changed)}))
    # When both it and a model with the same adapter merged answer
    found = await greedy(engine)
    merged = random_tensors(tmp_path / "base", 1)
    for target in merged:
        module = "base_model.model." + target.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapter:
            low, high = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
            merged[target] = merged[target] + ALPHA / RANK * high @ low
    write_checkpoint(tmp_path / "merged", merged)
    other = VllmEngine(
        VllmConfig(
            model=str(tmp_path / "merged"),
            slot_count=4,
            context_tokens_max=128,
            arguments={"skip_tokenizer_init": True},
            probes_writes=False,
        )
    )
    await other.start()
    expected = await greedy(other)
    await other.close()
    # Then they say the same, and each version says something else
    assert (found.completion_ids == expected.completion_ids).all()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-3, atol=1e-4)
    assert len({each.logprobs.tobytes() for each in (before, first, found)}) == 3
    assert (before.versions, first.versions, found.versions) == (((0, 30, -1),), ((0, 30, 1),), ((0, 30, 2),))
    assert (engine.weight_bits()[name][[3, 7]] == changed).all()


def test_the_layout_has_two_matrices_for_each_adapted_module() -> None:
    base = Layout(
        (
            TensorSpec("model.layers.0.self_attn.q_proj.weight", "bfloat16", (64, 32)),
            TensorSpec("model.layers.0.self_attn.q_proj.bias", "bfloat16", (64,)),
            TensorSpec("model.norm.weight", "bfloat16", (32,)),
        )
    )
    rows = adapter_layout(base, ["q_proj"], 8).rows()
    assert rows == [
        ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "bfloat16", [8, 32]],
        ["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", "bfloat16", [64, 8]],
    ]
    with pytest.raises(EngineError, match="no_such"):
        adapter_layout(base, ["no_such"], 8)
