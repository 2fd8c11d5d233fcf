"""What the transformers engine records beside tokens, against a plain forward pass of the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EngineUnsupported
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.contract.sides import dense, rows
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from tests.support.weights.reference import plain_logits, shaped_logprobs

pytest.importorskip("torch")
PROMPT = np.arange(5, 45, dtype=np.int32)
CLOSE = {"rtol": 0, "atol": 1e-4}


async def started(**options: Any) -> TransformersEngine:
    engine = TransformersEngine(TransformersConfig(slot_count=4, **options))
    await engine.start()
    dice = np.random.default_rng(1)
    tensors = {}
    for spec in engine.layout.tensors:
        values = dice.normal(0, 0.25, spec.element_count).astype(np.float32) + ("norm" in spec.name)
        tensors[spec.name] = (None, values.astype(np.float32).view(np.uint32))
    await engine.apply(Staged(0, tensors))
    return engine


async def run(engine: TransformersEngine, *requests: GenerationRequest) -> list[Generation]:
    for request in requests:
        engine.generate(request)
    ended: dict[str, Generation] = {}
    while len(ended) < len(requests):
        batch = await engine.finished(30.0)
        assert batch, "nothing ended in time"
        ended |= {each.request_id: each for each in batch}
    return [ended[request.request_id] for request in requests]


def ask(name: str, sampling: Sampling, **options: Any) -> GenerationRequest:
    return GenerationRequest(**({"prompt_ids": PROMPT} | options), request_id=name, sampling=sampling)


def all_of(generation: Generation, name: str, *, of_prompt: bool = False) -> Any:
    count = len(generation.completion_ids)
    lengths = [-side.start for side in generation.sides if side.start < 0]
    return dense(generation.sides, name, *((-max(lengths), 0) if of_prompt else (0, count)))


async def test_likeliest_and_kept_tokens_are_those_of_the_distribution_drawn_from() -> None:
    engine = await started()
    cut = Sampling(max_tokens=24, temperature=0.8, top_p=0.7, top_k=9, logprobs=12, kept_tokens=True, seed=3)
    plain = Sampling(max_tokens=24, logprobs=3, kept_tokens=True)
    wide = Sampling(max_tokens=24, logprobs=3, top_k=10**6, kept_tokens=True)
    greedy = Sampling(max_tokens=24, temperature=0, top_p=0.5, logprobs=3, kept_tokens=True)

    made = await run(engine, *(ask(str(index), each) for index, each in enumerate((cut, plain, greedy, wide))))

    for generation, sampling in zip(made, (cut, plain, greedy, wide), strict=True):
        logits = plain_logits("tiny", engine.weight_bits(), PROMPT, generation.completion_ids)
        truth = shaped_logprobs(logits, PROMPT, generation.completion_ids, sampling)
        top = -np.sort(-truth, axis=-1)[:, : sampling.logprobs]
        np.testing.assert_allclose(all_of(generation, "top_logprobs"), top, **CLOSE)
        ids = all_of(generation, "top_ids")
        assert ((ids == -1) == np.isinf(top)).all() and ids.dtype == np.int32
        told = np.take_along_axis(truth, np.maximum(ids, 0), -1)
        np.testing.assert_allclose(np.where(ids >= 0, told, -np.inf), top, **CLOSE)
        kept = rows(generation.sides, "kept_ids", 0, len(generation.completion_ids))
        if sampling is cut:
            assert [each.tolist() for each in kept if each is not None] == [
                np.flatnonzero(np.isfinite(row)).tolist() for row in truth
            ]
        elif sampling is wide:
            assert [None if each is None else each.tolist() for each in kept] == [[]] * 24, "nothing was cut off"
        else:
            assert set(map(type, kept)) == {type(None)}, "nothing is cut, so nothing is said"
    await engine.close()


@pytest.mark.parametrize("step_tokens_max", [None, 16], ids=["at once", "in pieces"])
async def test_prompts_are_told_as_the_model_reads_them(step_tokens_max: int | None) -> None:
    engine = await started(step_tokens_max=step_tokens_max)
    await run(engine, ask("warm", Sampling(max_tokens=2)))  # its prompt is in the prefix cache from here on
    sampling = Sampling(max_tokens=3, temperature=0.5, prompt_logprobs=4, logprobs=2)

    prior = np.array([7, 8, 9], dtype=np.int32)
    first, bare, resumed, other = await run(
        engine,
        ask("first", sampling),
        ask("bare", Sampling(max_tokens=1, prompt_logprobs=0)),
        ask("resumed", Sampling(max_tokens=5, prompt_logprobs=4), prior_ids=prior),
        ask("other", Sampling(max_tokens=5)),
    )

    logits = plain_logits("tiny", engine.weight_bits(), PROMPT[:1], np.concatenate((PROMPT[1:], prior)))
    truth = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for generation, context in ((first, PROMPT), (bare, PROMPT), (resumed, np.concatenate((PROMPT, prior)))):
        own = all_of(generation, "prompt_logprobs", of_prompt=True)
        assert len(own) == len(context) and np.isnan(own[0])
        expected = np.take_along_axis(truth[: len(context) - 1], context[1:, None].astype(int), -1)[:, 0]
        np.testing.assert_allclose(own[1:], expected, **CLOSE)
    top = all_of(first, "prompt_top_logprobs", of_prompt=True)
    np.testing.assert_allclose(top[1:], -np.sort(-truth[: len(PROMPT) - 1], axis=-1)[:, :4], **CLOSE)
    assert all_of(first, "prompt_top_ids", of_prompt=True)[0].tolist() == [-1] * 4
    assert all_of(bare, "prompt_top_ids", of_prompt=True) is None and other.sides == ()
    assert all_of(first, "top_ids").shape == (3, 2)
    await engine.close()


async def test_a_request_under_way_tells_what_it_has_and_a_new_version_begins_it_anew() -> None:
    engine = await started()
    engine.generate(ask("long", Sampling(max_tokens=200, logprobs=2, prompt_logprobs=1)))
    while not (so_far := engine.progress(["long"])) or not len(so_far[0].completion_ids):
        await engine.finished(0.001)
    assert all_of(so_far[0], "top_ids").shape == (len(so_far[0].completion_ids), 2)
    (made,) = await engine.abort(["long"])
    assert all_of(made, "top_ids").shape == (len(made.completion_ids), 2)
    assert len(all_of(made, "prompt_logprobs", of_prompt=True)) == len(PROMPT)
    await engine.close()


async def test_what_grows_too_large_or_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await started()
    with pytest.raises(EngineUnsupported, match=r"routed_experts, which .* its model has none"):
        engine.generate(ask("experts", Sampling(routed_experts=True)))
    with pytest.raises(EngineUnsupported, match="token ids from 5 to 104, the model knows 0 to 103"):
        engine.generate(ask("beyond", Sampling(), prompt_ids=np.array([5, 104], np.int32)))
    monkeypatch.setattr("rollfab.workers.engines.admission.TURN_SIDES_BYTES_MAX", 4 * 41 * 39)
    with pytest.raises(EngineUnsupported, match="at most 39 tokens of prompt, and this one has 40"):
        engine.generate(ask("long", Sampling(prompt_logprobs=20)))
    monkeypatch.setattr("rollfab.workers.engines.request.KEPT_ID_COUNT_MAX", 1000)
    wide = Sampling(max_tokens=200, top_k=103, kept_tokens=True)
    refused, fine = await run(engine, ask("wide", wide), ask("fine", Sampling(max_tokens=20)))
    assert refused.finish_reason == "refused" and "cut more" in (refused.error or "")
    assert fine.finish_reason == "length"
    engine._thread.engine_loop.check_integrity()
    await engine.close()


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
    engine = TransformersEngine(TransformersConfig(model=str(tmp_path), slot_count=4, step_tokens_max=16))
    await engine.start()

    # When requests ask for them side by side with others, one after the other, and with tokens of an earlier claim
    wanted, plain = Sampling(max_tokens=9, routed_experts=True), Sampling(max_tokens=9)
    await run(engine, ask("warm", plain))
    prior = np.array([7, 8, 9], dtype=np.int32)
    made = await run(
        engine,
        ask("one", wanted),
        ask("plain", plain),
        ask("short", wanted, prompt_ids=PROMPT[:7]),
        ask("resumed", wanted, prior_ids=prior),
    )

    # Then each token but the last has what a forward pass chooses
    assert made[1].sides == ()
    for generation, context in ((made[0], PROMPT), (made[2], PROMPT[:7]), (made[3], np.concatenate((PROMPT, prior)))):
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
    await engine.close()
