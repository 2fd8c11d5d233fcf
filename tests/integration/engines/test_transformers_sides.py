"""What the transformers engine records beside tokens, against a plain forward pass of the same weights."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EngineUnsupported
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.contract.sides import rows
from rollfab.workers.engines.base import Generation
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from tests.support.weights import engine_sides
from tests.support.weights.engine_sides import PRIOR, PROMPT, ask, random_weights, run
from tests.support.weights.reference import plain_logits, shaped_logprobs

pytest.importorskip("torch")


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(TransformersConfig(slot_count=4, **options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_likeliest_tokens_are_those_of_the_distribution_drawn_from() -> None:
    await engine_sides.check_likeliest_tokens(started, plain_logits)


@pytest.mark.parametrize("step_tokens_max", [None, 16], ids=["at once", "in pieces"])
async def test_prompts_are_told_as_the_model_reads_them(step_tokens_max: int | None) -> None:
    await engine_sides.check_prompts(partial(started, step_tokens_max=step_tokens_max), plain_logits)


async def test_a_turn_of_two_claims_has_what_one_claim_would_have_recorded() -> None:
    await engine_sides.check_a_turn_of_two_claims(started)


async def test_a_request_that_starts_over_tells_what_the_new_weights_say() -> None:
    await engine_sides.check_a_request_that_starts_over(started, plain_logits)


async def test_kept_tokens_are_told_where_some_are_cut_off() -> None:
    cut = Sampling(max_tokens=24, temperature=0.8, top_p=0.7, top_k=9, kept_tokens=True, seed=3)
    wide = Sampling(max_tokens=24, top_k=10**6, kept_tokens=True)
    plain = Sampling(max_tokens=24, kept_tokens=True)
    greedy = Sampling(max_tokens=24, temperature=0, top_p=0.5, kept_tokens=True)
    async with started() as engine:
        await engine.apply(random_weights(engine, 1))
        made = await run(engine, *(ask(str(index), each) for index, each in enumerate((cut, wide, plain, greedy))))
        logits = plain_logits("tiny", engine.weight_bits(), PROMPT, made[0].completion_ids)
    truth = shaped_logprobs(logits, PROMPT, made[0].completion_ids, cut)
    kept = [rows(each.sides, "kept_ids", 0, 24) for each in made]
    assert [each.tolist() for each in kept[0] if each is not None] == [
        np.flatnonzero(np.isfinite(row)).tolist() for row in truth
    ]
    assert [None if each is None else each.tolist() for each in kept[1]] == [[]] * 24, "nothing was cut off"
    for each in kept[2:]:
        assert set(map(type, each)) == {type(None)}, "nothing is cut, so nothing is said"


async def test_what_grows_too_large_or_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as engine:
        with pytest.raises(EngineUnsupported, match=r"routed_experts, which .* its model has none"):
            engine.generate(ask("experts", Sampling(routed_experts=True)))
        with pytest.raises(EngineUnsupported, match="token ids from 5 to 104, the model knows 0 to 103"):
            engine.generate(ask("beyond", Sampling(), np.array([5, 104], np.int32)))
        monkeypatch.setattr("rollfab.workers.engines.admission.TURN_SIDES_BYTES_MAX", 4 * 41 * 39)
        with pytest.raises(EngineUnsupported, match="at most 39 tokens of prompt, and this one has 40"):
            engine.generate(ask("long", Sampling(prompt_logprobs=20)))
        monkeypatch.setattr("rollfab.workers.engines.request.KEPT_ID_COUNT_MAX", 1000)
        engine.generate(ask("wide", Sampling(max_tokens=200, top_k=103, kept_tokens=True)))
        engine.generate(ask("fine", Sampling(max_tokens=20)))
        ended: dict[str, Generation] = {}
        while len(ended) < 2:
            ended |= {each.request_id: each for each in await engine.finished(30.0)}
        assert ended["wide"].finish_reason == "refused" and "cut more" in (ended["wide"].error or "")
        assert ended["fine"].finish_reason == "length"
        engine._thread.engine_loop.check_integrity()


async def test_experts_are_those_that_the_layers_were_called_with(tmp_path: Path) -> None:
    import torch
    import transformers

    # Given a model of two layers with experts, as a directory
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 104}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "max_position_embeddings": 512}
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)

    # When requests ask for them side by side with others, one after the other, and with tokens of an earlier claim
    wanted, plain = Sampling(max_tokens=9, routed_experts=True), Sampling(max_tokens=9)
    async with started(model=str(tmp_path), step_tokens_max=16) as engine:
        await run(engine, ask("warm", plain))
        made = await run(
            engine,
            ask("one", wanted),
            ask("plain", plain),
            ask("short", wanted, PROMPT[:7]),
            ask("resumed", wanted, prior_ids=PRIOR),
        )

    # Then each token but the last has what a forward pass chooses
    assert made[1].sides == ()
    for generation, context in ((made[0], PROMPT), (made[2], PROMPT[:7]), (made[3], np.concatenate((PROMPT, PRIOR)))):
        ids = np.concatenate((context, generation.completion_ids)).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None], output_router_logits=True).router_logits
        truth = np.stack([each.topk(2).indices.numpy() for each in logits], axis=1)
        (side,) = generation.sides
        assert (side.name, side.start, side.end) == (
            "routed_experts",
            -len(context),
            len(generation.completion_ids) - 1,
        )
        assert side.array.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(side.array, -1), np.sort(truth[:-1], -1))
