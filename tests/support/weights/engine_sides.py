"""What every engine records beside tokens that ask for it, against a plain forward pass of the same weights.

Functions that take what makes an engine: each environment's tests call them for the engines that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from rollfab.fabric.contract.records import Int32, Sampling, TokenLog
from rollfab.fabric.contract.sides import dense
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Engine, EngineLimits, Generation, GenerationRequest
from rollfab.workers.rollout.turns import merge
from tests.support.until import until
from tests.support.weights.reference import shaped_logprobs

Make = Callable[[], AbstractAsyncContextManager[Engine]]  # of the tiny preset, started; another test may have used it
Logits = Callable[[str, Any, Int32, Int32], Any]  # tests/support/weights/reference.py: plain_logits, or elsewhere
PROMPT = np.arange(5, 45, dtype=np.int32)
PRIOR = np.array([7, 8, 9], dtype=np.int32)
CLOSE = {"rtol": 0, "atol": 1e-4}


def random_weights(engine: Engine, version: int, scale: float = 0.25) -> Staged:
    """Values for every tensor, the same for the same version; every token hangs on them."""
    dice = np.random.default_rng(version)
    tensors = {}
    for spec in engine.layout.tensors:
        values = dice.normal(0, scale, spec.element_count) + ("norm" in spec.name)
        tensors[spec.name] = (None, values.astype(np.float32).view(np.uint32))
    return Staged(version, tensors)


def ask(name: str, sampling: Sampling, prompt: Int32 = PROMPT, **options: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling, **options)


async def run(engine: Engine, *requests: GenerationRequest) -> list[Generation]:
    """All of them at once, to their ends."""
    for request in requests:
        engine.generate(request)
    ended: dict[str, Generation] = {}
    while len(ended) < len(requests):
        batch = await engine.finished(30.0)
        assert batch, "nothing ended in time"
        ended |= {each.request_id: each for each in batch}
    assert [each.error for each in ended.values()] == [None] * len(requests)
    return [ended[request.request_id] for request in requests]


async def catch(engine: Engine, request: GenerationRequest, at_least: int = 1) -> None:
    """Start the only request; return while it runs. One that ended unseen, as on a busy machine, starts again."""
    engine.generate(request)

    async def caught() -> bool:
        for ended in await engine.finished(0.001):
            assert ended.error is None, ended.error
            engine.generate(request)
        return any(len(each.completion_ids) >= at_least for each in engine.progress([request.request_id]))

    await until(caught, lambda: f"{at_least} tokens of {request.request_id}, still running", every_s=0.0)


def made(log: Generation | TokenLog, name: str) -> Any:
    """Rows for all tokens made; none may be told of what comes after."""
    count = len(log.completion_ids)
    assert all(side.end <= count for side in log.sides)
    return dense(log.sides, name, 0, count)


def read(log: Generation, name: str, count: int) -> Any:
    """Rows for all `count` tokens read; none may be told of what comes before."""
    assert all(side.start >= -count for side in log.sides)
    return dense(log.sides, name, -count, 0)


def agree(ids: Any, logprobs: Any, truth: Any) -> None:
    """Ids and log-probabilities (T, k) are the likeliest of (T, V), and -1 and -inf where there are fewer."""
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    expected = -np.sort(-truth, axis=-1)[:, : ids.shape[1]]
    np.testing.assert_allclose(logprobs, expected, **CLOSE)
    assert ((ids == -1) == np.isneginf(expected)).all()
    of_ids = np.where(ids == -1, -np.inf, np.take_along_axis(truth, np.maximum(ids, 0), axis=-1))
    np.testing.assert_allclose(of_ids, expected, **CLOSE)
    assert all(len(set(row)) == len(row) for row in (row[row >= 0].tolist() for row in ids)), "none comes twice"


async def check_likeliest_tokens(make: Make, logits_of: Logits) -> None:
    # Given requests that ask for many, few and no likeliest tokens, in one batch
    asked = {
        "cut": Sampling(max_tokens=24, temperature=0.8, top_p=0.7, top_k=9, logprobs=12),
        "top k": Sampling(max_tokens=24, top_k=3, logprobs=20),
        "hot": Sampling(max_tokens=24, temperature=1.7, logprobs=1),
        "bent": Sampling(max_tokens=24, repetition_penalty=1.3, logit_bias={7: 2.0}, logprobs=3),
        "greedy": Sampling(max_tokens=24, temperature=0.0, logprobs=3),
        "none": Sampling(max_tokens=24),
    }
    async with make() as engine:
        await engine.apply(random_weights(engine, 0), turns="recompute")
        # When they have ended
        ended = await run(engine, *(ask(name, sampling) for name, sampling in asked.items()))
        # Then each was told those of the very distribution that its tokens were drawn from, and nothing else
        for generation, (name, sampling) in zip(ended, asked.items(), strict=True):
            if name == "none":
                assert generation.sides == ()
                continue
            ids, logprobs = made(generation, "top_ids"), made(generation, "top_logprobs")
            assert ids.shape == logprobs.shape == (24, sampling.logprobs)
            assert {side.name for side in generation.sides} == {"top_ids", "top_logprobs"}
            logits = logits_of("tiny", engine.weight_bits(), PROMPT, generation.completion_ids)
            agree(ids, logprobs, shaped_logprobs(logits, PROMPT, generation.completion_ids, sampling))
            own = logprobs[ids == generation.completion_ids[:, None]]
            told = (ids == generation.completion_ids[:, None]).any(axis=1)
            np.testing.assert_array_equal(own, generation.logprobs[told])


async def check_prompts(make: Make, logits_of: Logits) -> None:
    async with make() as engine:
        await engine.apply(random_weights(engine, 0), turns="recompute")
        # Given a prompt that is in the prefix cache
        await run(engine, ask("warm", Sampling(max_tokens=2)))
        # When requests ask what the model gives its tokens, one of them with tokens of an earlier claim
        asked = Sampling(max_tokens=6, temperature=0.5, top_k=2, prompt_logprobs=4, logprobs=2)
        first, bare, resumed, single, other = await run(
            engine,
            ask("first", asked),
            ask("bare", Sampling(max_tokens=6, prompt_logprobs=0)),
            ask("resumed", asked, prior_ids=PRIOR),
            ask("single", asked, PROMPT[:1]),
            ask("other", Sampling(max_tokens=6)),
        )
        logits = logits_of("tiny", engine.weight_bits(), PROMPT[:1], np.concatenate((PROMPT[1:], PRIOR)))
    # Then they are told what a forward pass says, whatever their temperature, but for the first token of all
    logits = logits.astype(np.float64)
    truth = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    context = np.concatenate((PROMPT, PRIOR))
    for generation, count in ((first, 40), (bare, 40), (resumed, 43), (single, 1)):
        own = read(generation, "prompt_logprobs", count)
        assert own.dtype == np.float32 and np.isnan(own[0])
        expected = np.take_along_axis(truth[: count - 1], context[1:count, None].astype(np.int64), axis=-1)[:, 0]
        np.testing.assert_allclose(own[1:], expected, **CLOSE)
    for generation, count in ((first, 40), (resumed, 43), (single, 1)):
        ids, logprobs = (read(generation, f"prompt_top_{name}", count) for name in ("ids", "logprobs"))
        assert ids.shape == (count, 4) and (ids[0] == -1).all() and np.isneginf(logprobs[0]).all()
        agree(ids[1:], logprobs[1:], truth[: count - 1])
        assert made(generation, "top_ids").shape == (len(generation.completion_ids), 2)
    assert {side.name for side in bare.sides} == {"prompt_logprobs"} and other.sides == ()


async def check_a_turn_of_two_claims(make: Make) -> None:
    async with make() as engine:
        of_prompt = None if "prompt_logprobs" in engine.cannot else 1
        sampling = Sampling(max_tokens=40, temperature=0.0, logprobs=3, prompt_logprobs=of_prompt)
        await engine.apply(random_weights(engine, 0), turns="recompute")
        (full,) = await run(engine, ask("full", sampling))
        # Given a request that is aborted on its way, and another engine's share of it
        await catch(engine, ask("cut", sampling), at_least=5)
        await engine.pause("test")
        so_far = engine.progress(["cut"])
        await engine.resume("test")
        (cut,) = await engine.abort(["cut"])
        log = merge(None, cut, "w1")
        if len(cut.completion_ids) < 40:  # on a busy machine it may have ended
            (rest,) = await run(engine, ask("rest", sampling, prior_ids=cut.completion_ids))
            assert made(rest, "top_ids").shape == (40 - len(cut.completion_ids), 3)
            log = merge(log, rest, "w2")
    # Then what was told so far has a row for each token, and joined they are as if nothing had happened
    for each in (*so_far, cut):
        assert made(each, "top_logprobs").shape == (len(each.completion_ids), 3)
        assert of_prompt is None or read(each, "prompt_logprobs", 40).shape == (40,)
    for name in ("top_ids", "top_logprobs"):
        np.testing.assert_allclose(made(log, name), made(full, name), **CLOSE)
    if of_prompt is not None:
        told = dense(log.sides, "prompt_logprobs", -40, 0)
        np.testing.assert_allclose(told, read(full, "prompt_logprobs", 40), **CLOSE)


async def check_a_request_that_starts_over(make: Make, logits_of: Logits) -> None:
    """Weights change before its first token: all that it tells is of the new ones, and told once."""
    async with make() as engine:
        await engine.apply(random_weights(engine, 0), turns="recompute")
        engine.set_limits(EngineLimits(step_tokens=1))  # its prompt takes 40 steps
        while True:
            before = engine.stats().step_count
            engine.generate(ask("anew", Sampling(max_tokens=4, logprobs=2, prompt_logprobs=0)))
            await until(lambda: engine.stats().step_count > before, every_s=0.001)  # noqa: B023
            await engine.pause("test")
            if any(not len(each.completion_ids) for each in engine.progress(["anew"])):
                break  # half of its prompt is read; on a busy machine it may have gone further, or ended: then again
            await engine.abort(["anew"])
            await engine.resume("test")
        await engine.apply(random_weights(engine, 1), turns="keep")
        engine.set_limits(EngineLimits())
        await engine.resume("test")
        (generation,) = await engine.finished(30.0)
        assert (generation.error, generation.versions) == (None, ((0, 4, 1),))
        logits = logits_of(
            "tiny", engine.weight_bits(), PROMPT[:1], np.concatenate((PROMPT[1:], generation.completion_ids))
        )
    logits = logits.astype(np.float64)
    truth = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(truth[:39], PROMPT[1:, None].astype(np.int64), axis=-1)[:, 0]
    np.testing.assert_allclose(read(generation, "prompt_logprobs", 40)[1:], expected, **CLOSE)
    agree(made(generation, "top_ids"), made(generation, "top_logprobs"), truth[39:])
    assert sorted(side.name for side in generation.sides) == ["prompt_logprobs", "top_ids", "top_logprobs"]
