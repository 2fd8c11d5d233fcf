"""What every engine promises (workers/engines/base.py). Each environment runs the engines that it has: `make test-all`
runs this file twice, with transformers and with real vLLM on a CPU. vLLM does it all once more with a step scheduled
while the one before it runs, as on a GPU.

Weights are replaced by larger random ones, version 0: as initialised, a model says one token for ever. Tests share one
engine, idle and at version 0 when each begins; its counts go on.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollfab.fabric.contract.errors import EngineError, EngineUnsupported, LayoutMismatch
from rollfab.fabric.contract.images import Image, digest_of
from rollfab.fabric.contract.records import Int32, Sampling, TurnResult
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Engine, EngineLimits, Generation, GenerationRequest, TurnsAtCommit
from tests.support.device import DEVICE
from tests.support.processes.scheduling_ahead import scheduling_ahead
from tests.support.queue.played_worker import RUN, Stage
from tests.support.until import PATIENCE, until
from tests.support.weights.engine_sides import random_weights
from tests.support.weights.reference import (
    kept_logprobs,
    kept_logprobs_elsewhere,
    plain_logits,
    plain_logits_elsewhere,
    plain_logprobs,
    plain_logprobs_elsewhere,
    shaped_logprobs,
)

KIND = "vllm" if find_spec("vllm") else "transformers"
if KIND == "vllm":
    from rollfab.workers.engines.vllm.common.environment import prepare_environment

    prepare_environment()
    import vllm.v1.engine.async_llm  # noqa: F401  imported here, or the first test pays for it
else:
    from rollfab.workers.engines.transformers import loop as transformers_loop  # noqa: F401

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
if KIND == "vllm":
    pytestmark += [pytest.mark.timeout(60), pytest.mark.filterwarnings("default")]
TEXT = CharTokenizer()
SLOT_COUNT, CONTEXT_TOKENS = 8, 256
PROMPT = np.arange(5, 45, dtype=np.int32)  # two and a half blocks of KV cache
BOTH: tuple[TurnsAtCommit, ...] = ("keep", "recompute")


def new_engine(kind: str) -> Engine:
    if kind == "vllm":
        from rollfab.workers.engines.vllm.common.config import VllmConfig
        from rollfab.workers.engines.vllm.engine import VllmEngine

        return VllmEngine(
            VllmConfig(
                model="tiny",
                slot_count=SLOT_COUNT,
                context_tokens_max=CONTEXT_TOKENS,
                seed=0,
                arguments={"block_size": 32},
                probes_writes=False,
            )
        )
    from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine

    return TransformersEngine(
        TransformersConfig(
            model="tiny",
            device=DEVICE,
            dtype="float32",
            slot_count=SLOT_COUNT,
            context_tokens_max=CONTEXT_TOKENS,
            page_size=16,
            seed=0,
        )
    )


@pytest.fixture(params=[KIND], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(
    params=["", "ahead"] if KIND == "vllm" else [""],
    ids=lambda how: how or "alone",
    scope="module",
    loop_scope="module",
)
async def shared(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    engine = new_engine(kind)
    with scheduling_ahead() if request.param else contextlib.nullcontext():
        await engine.start()
    if request.param:
        scheduler = engine._door._llm.vllm_config.scheduler_config.scheduler_cls  # type: ignore[attr-defined]
        assert scheduler.endswith(".LimitedAsyncScheduler")
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: Any) -> AsyncIterator[Engine]:
    """As it was when it started, but for its counts; whatever the test before left in it is over. Its books agree."""
    shared.set_limits(EngineLimits())
    for reason in shared.stats().paused_by:
        await shared.resume(reason)
    while shared.stats().running_count + shared.stats().waiting_count:
        await shared.finished(1.0)
    await shared.finished(0.0)
    await shared.apply(random_weights(shared, 0), turns="recompute")
    await shared.check_integrity()
    yield shared
    await shared.check_integrity()


def greedy(request_id: str, max_tokens: int, prompt: Int32 = PROMPT, **options: Any) -> GenerationRequest:
    stop_ids = options.pop("stop_ids", ())
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, stop_ids=stop_ids)
    return GenerationRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling, **options)


async def standing(engine: Engine) -> int:
    """The count of steps, once it does not grow any more: a step at hand may take long on a busy machine."""
    while True:
        steps = engine.stats().step_count
        await asyncio.sleep(0.1)
        if engine.stats().step_count == steps:
            return steps


async def gather(engine: Engine, count: int) -> dict[str, Generation]:
    """The next `count` that end."""
    ended: dict[str, Generation] = {}
    while len(ended) < count:
        batch = await engine.finished(10.0 * PATIENCE)
        assert batch, "nothing ended in time"
        for generation in batch:
            assert generation.request_id not in ended
            ended[generation.request_id] = generation
    assert len(ended) == count
    return ended


async def run(engine: Engine, *requests: GenerationRequest) -> list[Generation]:
    for request in requests:
        engine.generate(request)
    ended = await gather(engine, len(requests))
    return [ended[request.request_id] for request in requests]


async def tokens_of(engine: Engine, request_id: str, at_least: int) -> Generation:
    """Progress of a running request, once it has some."""
    while True:
        for generation in engine.progress([request_id]):
            if len(generation.completion_ids) >= at_least:
                return generation
        await asyncio.sleep(0.001)


def reference_logprobs(engine: Engine, prompt: Int32, completion: Int32, temperature: float) -> Any:
    """float32 (T, V): log-softmax of a plain forward pass over the engine's own weights."""
    plain = plain_logprobs_elsewhere if KIND == "vllm" else plain_logprobs
    return plain("tiny", engine.weight_bits(), prompt, completion, temperature)


async def test_every_request_ends_once_with_its_tokens(engine: Engine) -> None:
    before_count = engine.stats().token_count
    requests = [
        GenerationRequest(request_id=f"g.{i}.0", prompt_ids=PROMPT[: 1 + i], sampling=Sampling(max_tokens=1 + i % 7))
        for i in range(30)  # more than slots
    ]
    ended = await run(engine, *requests)
    for request, generation in zip(requests, ended, strict=True):
        count = request.sampling.max_tokens
        assert generation.finish_reason == "length" and generation.error is None
        assert generation.completion_ids.shape == generation.logprobs.shape == (count,)
        assert generation.completion_ids.dtype == np.int32 and generation.logprobs.dtype == np.float32
        assert generation.versions == ((0, count, 0),)
    assert await engine.finished(0.02) == []
    stats = engine.stats()
    assert (stats.running_count, stats.waiting_count, stats.active_version) == (0, 0, 0)
    assert stats.token_count - before_count == sum(request.sampling.max_tokens for request in requests)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
async def test_logprobs_are_those_of_the_distribution_sampled_from(engine: Engine, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=60)
    requests = [GenerationRequest(request_id=f"{i}", prompt_ids=PROMPT[i:], sampling=sampling) for i in range(6)]
    for request, generation in zip(requests, await run(engine, *requests), strict=True):
        logprobs = reference_logprobs(engine, request.prompt_ids, generation.completion_ids, temperature or 1.0)
        expected = np.take_along_axis(logprobs, generation.completion_ids[:, None].astype(np.int64), axis=1)[:, 0]
        np.testing.assert_allclose(generation.logprobs, expected, rtol=5e-5, atol=5e-5)
        if temperature == 0.0:
            assert (logprobs.argmax(axis=1) == generation.completion_ids).all()


async def test_greedy_and_sampled_requests_share_a_batch(engine: Engine) -> None:
    (alone,) = await run(engine, greedy("alone", 40))
    hot = [
        GenerationRequest(request_id=f"hot{i}", prompt_ids=PROMPT, sampling=Sampling(temperature=2.0, max_tokens=40))
        for i in range(6)
    ]
    together, *others = await run(engine, greedy("together", 40), *hot)
    assert (together.completion_ids == alone.completion_ids).all()
    assert len({generation.completion_ids.tobytes() for generation in others}) == len(others)


async def test_a_stop_token_ends_only_its_own_request_and_is_part_of_it(engine: Engine) -> None:
    (full,) = await run(engine, greedy("full", 40))
    stop_id = int(full.completion_ids[20])
    first = full.completion_ids.tolist().index(stop_id)
    stopped, other = await run(engine, greedy("stopped", 40, stop_ids=(stop_id,)), greedy("other", 40))
    assert stopped.finish_reason == "stop" and other.finish_reason == "length"
    assert (stopped.completion_ids == full.completion_ids[: first + 1]).all()
    assert (other.completion_ids == full.completion_ids).all()


async def test_a_resumed_request_makes_the_rest_of_its_tokens(engine: Engine) -> None:
    (full,) = await run(engine, greedy("full", 40))
    for count in (1, 17, 39):
        (rest,) = await run(engine, greedy(f"rest{count}", 40, prior_ids=full.completion_ids[:count]))
        assert (rest.completion_ids == full.completion_ids[count:]).all()
        np.testing.assert_allclose(rest.logprobs, full.logprobs[count:], rtol=1e-4, atol=1e-5)
        assert rest.versions == ((0, 40 - count, 0),)


async def test_a_resumed_request_with_nothing_left_to_make_ends_at_once(engine: Engine) -> None:
    at_limit, at_stop = await run(
        engine,
        greedy("at-limit", 3, prior_ids=np.array([7, 8, 9], dtype=np.int32)),
        greedy("at-stop", 30, prior_ids=np.array([7, 8, 9], dtype=np.int32), stop_ids=(9,)),
    )
    assert (at_limit.finish_reason, at_stop.finish_reason) == ("length", "stop")
    assert at_limit.completion_ids.size == at_stop.completion_ids.size == 0


async def test_an_abort_keeps_every_token_made(engine: Engine) -> None:
    before_count = engine.stats().token_count
    (full,) = await run(engine, greedy("full", 150))
    engine.generate(greedy("cut", 150))
    seen = await tokens_of(engine, "cut", 10)
    (cut,) = await engine.abort(["cut", "never-started"])
    count = len(cut.completion_ids)
    assert cut.finish_reason == "abort" and len(seen.completion_ids) <= count < 150
    assert (cut.completion_ids == full.completion_ids[:count]).all()
    np.testing.assert_allclose(cut.logprobs, full.logprobs[:count], rtol=1e-4, atol=1e-5)
    assert cut.versions == ((0, count, 0),)
    (rest,) = await run(engine, greedy("cut", 150, prior_ids=cut.completion_ids))  # the same id may run again
    assert (np.concatenate([cut.completion_ids, rest.completion_ids]) == full.completion_ids).all()
    assert await engine.finished(0.02) == [] and engine.stats().token_count == before_count + 300


async def test_an_aborted_request_that_waits_has_made_nothing(engine: Engine) -> None:
    engine.set_limits(EngineLimits(running_count=1))
    engine.generate(greedy("first", 100))
    engine.generate(greedy("second", 10))
    await tokens_of(engine, "first", 1)
    assert (engine.stats().running_count, engine.stats().waiting_count) == (1, 1)
    (second,) = await engine.abort(["second"])
    assert second.finish_reason == "abort" and second.completion_ids.size == 0 and second.versions == ()
    assert engine.stats().waiting_count == 0
    assert list(await gather(engine, 1)) == ["first"]


async def test_a_request_that_just_ended_is_handed_out_once_also_when_aborted(engine: Engine) -> None:
    goal_count = engine.stats().token_count + 2
    engine.generate(greedy("done", 2))
    await until(lambda: engine.stats().token_count >= goal_count, every_s=0.001)
    (done,) = await engine.abort(["done"])
    assert done.finish_reason == "length" and len(done.completion_ids) == 2
    assert await engine.finished(0.02) == []


async def test_nothing_is_generated_while_any_reason_holds_the_engine(engine: Engine) -> None:
    (full,) = await run(engine, greedy("full", 100))
    engine.generate(greedy("held", 100))
    await tokens_of(engine, "held", 5)
    await engine.pause("lease")
    await engine.pause("weights")
    before = engine.stats()
    await engine.pause("weights")  # twice for one reason holds once
    engine.generate(greedy("later", 3))
    await asyncio.sleep(0.05)
    await engine.resume("weights")
    await asyncio.sleep(0.05)
    after = engine.stats()
    assert before.paused_by == ("lease", "weights") and after.paused_by == ("lease",)
    assert (before.step_count, before.token_count) == (after.step_count, after.token_count)
    progress = {each.request_id: each for each in engine.progress(["held", "later"])}["held"]
    assert 5 <= len(progress.completion_ids) < 100
    await engine.resume("lease")
    held = (await gather(engine, 2))["held"]
    assert (held.completion_ids == full.completion_ids).all()
    np.testing.assert_allclose(held.logprobs, full.logprobs, rtol=1e-4, atol=1e-5)


async def test_a_held_engine_still_aborts_and_takes_weights(engine: Engine) -> None:
    engine.generate(greedy("cut", 100))
    await tokens_of(engine, "cut", 5)
    await engine.pause("test")
    (progress,) = engine.progress(["cut"])
    await engine.apply(random_weights(engine, 1))
    (cut,) = await engine.abort(["cut"])
    assert (cut.completion_ids == progress.completion_ids).all()
    assert engine.stats().active_version == 1 and engine.stats().kv_used_fraction == 0.0


async def test_applied_weights_answer_like_a_fresh_engine_that_holds_them(engine: Engine, kind: str) -> None:
    requests = [greedy(f"{i}", 40, prompt=np.roll(PROMPT, i)) for i in range(4)]
    old = await run(engine, *requests)  # leaves prompts of the old weights in the cache
    addresses = {name: bits.ctypes.data for name, bits in engine.weight_bits().items()}
    pause_s = await engine.apply(random_weights(engine, 1))
    assert 0 < pause_s < 1
    assert addresses == {name: bits.ctypes.data for name, bits in engine.weight_bits().items()}
    new = await run(engine, *requests)
    fresh_engine = new_engine(kind)
    await fresh_engine.start()
    await fresh_engine.apply(random_weights(fresh_engine, 1))
    fresh = await run(fresh_engine, *requests)
    await fresh_engine.close()
    for before, after, expected in zip(old, new, fresh, strict=True):
        assert (after.completion_ids == expected.completion_ids).all()
        assert (after.completion_ids != before.completion_ids).any()
        np.testing.assert_allclose(after.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
        assert after.versions == ((0, 40, 1),)


@pytest.mark.parametrize("turns", BOTH)
async def test_what_a_request_computed_before_a_commit_is_never_shared_after_it(
    engine: Engine, turns: TurnsAtCommit
) -> None:
    # Given a request that lives through a commit and fills blocks since, behind a prompt of the old weights
    engine.generate(greedy("lives-through", 120))
    await tokens_of(engine, "lives-through", 3)
    await engine.apply(random_weights(engine, 1), turns=turns)
    made = await tokens_of(engine, "lives-through", 60)
    (same_prompt,) = await run(engine, greedy("same-prompt", 20))
    # When a prompt goes on where it has gone: its first blocks are of the new weights, the others are not
    longer = np.concatenate([PROMPT, made.completion_ids])
    (same_start,) = await run(engine, greedy("same-start", 20, prompt=longer))
    for prompt, found in ((PROMPT, same_prompt), (longer, same_start)):
        expected = reference_logprobs(engine, prompt, found.completion_ids, 1.0)
        assert (expected.argmax(axis=1) == found.completion_ids).all()
        np.testing.assert_allclose(found.logprobs, expected.max(axis=1), rtol=1e-4, atol=1e-5)
    await engine.abort(["lives-through"])


@pytest.mark.parametrize("turns", BOTH)
async def test_a_request_without_a_token_starts_over_with_the_new_weights(engine: Engine, turns: TurnsAtCommit) -> None:
    # Given one whose prompt is half read, and one that waits
    engine.set_limits(EngineLimits(step_tokens=1, running_count=1))
    idle = engine.stats().kv_used_fraction
    engine.generate(greedy("half-read", 20))
    engine.generate(greedy("waits", 20))
    await until(lambda: engine.stats().kv_used_fraction > idle, every_s=0.001)
    await engine.pause("test")
    assert engine.progress(["half-read"])[0].completion_ids.size == 0, "the test is too slow: the prompt was read whole"
    await engine.apply(random_weights(engine, 1), turns=turns)
    await engine.resume("test")
    engine.set_limits(EngineLimits())
    for ended in (await gather(engine, 2)).values():
        expected = reference_logprobs(engine, PROMPT, ended.completion_ids, 1.0)
        assert (expected.argmax(axis=1) == ended.completion_ids).all() and ended.versions == ((0, 20, 1),)


async def through_a_commit(engine: Engine, turns: TurnsAtCommit) -> tuple[list[Generation], list[int]]:
    """Three greedy requests that live through it, and how many tokens each had."""
    for i in range(3):
        engine.generate(greedy(f"{i}", 60, prompt=np.roll(PROMPT, i)))
    for i in range(3):
        await tokens_of(engine, f"{i}", 12 + i)
    await engine.pause("test")
    progress = {each.request_id: each for each in engine.progress(["0", "1", "2"])}
    counts = [len(progress[f"{i}"].completion_ids) for i in range(3)]
    await engine.apply(random_weights(engine, 1), turns=turns)
    await engine.resume("test")
    ended = await gather(engine, 3)
    return [ended[f"{i}"] for i in range(3)], counts


async def test_a_kept_request_goes_on_from_what_the_old_weights_computed(engine: Engine) -> None:
    old = {name: bits.copy() for name, bits in engine.weight_bits().items()}
    ended, counts = await through_a_commit(engine, "keep")
    kept = kept_logprobs_elsewhere if KIND == "vllm" else kept_logprobs
    for i, (generation, count) in enumerate(zip(ended, counts, strict=True)):
        assert generation.versions == ((0, count, 0), (count, 60, 1))
        made, rest = np.split(generation.completion_ids, [count])
        context = np.concatenate([np.roll(PROMPT, i), made])
        expected = kept("tiny", old, engine.weight_bits(), context, rest)
        assert (expected.argmax(axis=1) == rest).all()
        np.testing.assert_allclose(generation.logprobs[count:], expected.max(axis=1), rtol=1e-4, atol=1e-5)
        again = reference_logprobs(engine, context, rest, 1.0)
        assert abs(again.max(axis=1) - generation.logprobs[count:]).max() > 0.01, "nothing was kept"


async def test_a_recomputed_request_goes_on_as_a_new_one_with_its_tokens_would(engine: Engine) -> None:
    ended, counts = await through_a_commit(engine, "recompute")
    for i, (generation, count) in enumerate(zip(ended, counts, strict=True)):
        assert generation.versions == ((0, count, 0), (count, 60, 1))
        made, rest = np.split(generation.completion_ids, [count])
        (fresh,) = await run(engine, greedy(f"fresh{i}", 60, prompt=np.roll(PROMPT, i), prior_ids=made))
        assert (fresh.completion_ids == rest).all()
        np.testing.assert_allclose(generation.logprobs[count:], fresh.logprobs, rtol=1e-4, atol=1e-5)


async def test_a_recomputed_request_counts_its_prompt_once_and_ends_once(engine: Engine) -> None:
    before = engine.stats()
    await through_a_commit(engine, "recompute")
    after = engine.stats()
    assert (after.running_count, after.waiting_count, after.kv_used_fraction) == (0, 0, 0.0)
    assert after.token_count - before.token_count == 3 * 60
    assert after.prompt_token_count - before.prompt_token_count == 3 * len(PROMPT)
    assert after.cached_token_count == before.cached_token_count


async def test_turns_that_finish_are_of_the_old_weights_alone_and_those_that_wait_of_the_new(engine: Engine) -> None:
    # Given a worker with this engine, two turns that run and one that waits
    stage = Stage(dataclasses.replace(RUN, turns_at_commit="finish"), engine=engine)
    await stage.ask(3, Sampling(temperature=0.0, max_tokens=40))
    await stage.lease(1, 2)
    before_count = engine.stats().token_count
    async with stage.worker():
        await until(lambda: engine.stats().token_count > before_count)
        (receiver,) = stage.receivers

        # When new weights come
        async with receiver.gate():
            assert engine.stats().running_count == 0
            await engine.apply(random_weights(engine, 1), turns="recompute")
            receiver.version = 1
        results: list[TurnResult] = []
        while len(results) < 3:
            results += await stage.turns.results("a", 5.0)
    # Then
    found = [[(span.start, span.end, span.policy_version) for span in result.spans] for result in results]
    assert found == [[(0, 40, 0)], [(0, 40, 0)], [(0, 40, 1)]]


async def test_prefixes_of_older_weights_are_found_only_where_that_was_asked_for(engine: Engine) -> None:
    await run(engine, greedy("old", 2))
    for version, turns in ((1, "keep"), (2, "recompute")):
        await engine.apply(random_weights(engine, version), turns=turns)
        assert await prompt_counts(engine, greedy("new", 2)) == (len(PROMPT), 0), turns
        assert await prompt_counts(engine, greedy("again", 2)) == (len(PROMPT), 32), turns
    await engine.apply(random_weights(engine, 3), may_reuse_prefix=True)
    assert await prompt_counts(engine, greedy("shared", 2)) == (len(PROMPT), 32)
    await engine.apply(random_weights(engine, 4), turns="recompute", may_reuse_prefix=True)
    assert await prompt_counts(engine, greedy("last", 2)) == (len(PROMPT), 0), "nothing is left to share"


@pytest.mark.parametrize("turns", BOTH)
async def test_versions_say_exactly_which_weights_made_which_token(engine: Engine, turns: TurnsAtCommit) -> None:
    engine.generate(greedy("spans", 120))
    counts = []
    for version in (1, 2):
        await tokens_of(engine, "spans", 20 * version)
        await engine.pause("test")  # so that progress is exact
        counts.append(len(engine.progress(["spans"])[0].completion_ids))
        await engine.apply(random_weights(engine, version), turns=turns)
        await engine.apply(random_weights(engine, version), turns=turns)  # twice at the same token
        await engine.resume("test")
    spans = (await gather(engine, 1))["spans"]
    first, second = counts
    assert spans.versions == ((0, first, 0), (first, second, 1), (second, 120, 2))


async def test_a_sparse_write_changes_only_its_elements(engine: Engine) -> None:
    name = engine.layout.tensors[0].name
    before = engine.weight_bits()[name].copy()
    indices = np.array([0, 3, before.size - 1], dtype=np.int64)
    values = np.array([1, 2, 3], dtype=before.dtype)
    await engine.apply(Staged(1, {name: (indices, values)}))
    after = engine.weight_bits()[name]
    assert after[indices].tolist() == [1, 2, 3]
    assert (np.delete(after, indices) == np.delete(before, indices)).all()
    with pytest.raises(ValueError, match="read-only"):
        after[0] = 0


async def test_a_commit_of_nothing_names_what_is_live_and_spoils_no_prefix(engine: Engine) -> None:
    (before,) = await run(engine, greedy("before", 20))
    await engine.apply(Staged(7, {}), turns="keep", may_reuse_prefix=True)
    assert await prompt_counts(engine, greedy("cached", 2)) == (len(PROMPT), 32)
    (after,) = await run(engine, greedy("after", 20))
    assert after.versions == ((0, 20, 7),)
    assert (after.completion_ids == before.completion_ids).all()


async def test_weights_of_another_model_are_refused_before_anything_is_written(engine: Engine) -> None:
    spec = engine.layout.tensors[0]
    before = engine.weight_bits()[spec.name].copy()
    good = np.zeros(spec.element_count, dtype=spec.bits_dtype)
    for name, bits in (("no.such.tensor", good), (engine.layout.tensors[1].name, good[:-1])):
        with pytest.raises(LayoutMismatch, match=name):
            await engine.apply(Staged(1, {spec.name: (None, good), name: (None, bits)}))
    assert (engine.weight_bits()[spec.name] == before).all()
    assert engine.stats().active_version == 0
    assert (await run(engine, greedy("alive", 3)))[0].finish_reason == "length"


async def test_limits_bound_what_runs_and_lifting_them_lets_everything_end(engine: Engine) -> None:
    (full,) = await run(engine, greedy("full", 60))
    engine.set_limits(EngineLimits(running_count=3))
    for i in range(6):
        engine.generate(greedy(f"{i}", 60))
    await tokens_of(engine, "2", 2)
    assert (engine.stats().running_count, engine.stats().waiting_count) == (3, 3)
    engine.set_limits(EngineLimits(running_count=0))
    before = engine.stats().step_count
    steps = await standing(engine)
    assert steps <= before + 3  # one at hand, one scheduled ahead, one whose end has not been seen
    await asyncio.sleep(0.05)
    assert engine.stats().step_count == steps
    engine.set_limits(EngineLimits(running_count=1))  # two keep their KV and wait
    first = await gather(engine, 1)
    assert list(first) == ["0"] and engine.stats().running_count >= 2
    engine.set_limits(EngineLimits(step_tokens=7))
    rest = await gather(engine, 5)
    for generation in [*first.values(), *rest.values()]:
        assert (generation.completion_ids == full.completion_ids).all()


async def test_a_kv_limit_admits_by_what_is_held(engine: Engine) -> None:
    engine.set_limits(EngineLimits(kv_tokens=3 * len(PROMPT) - 1))
    for i in range(4):
        engine.generate(greedy(f"{i}", 80))
    await tokens_of(engine, "1", 2)
    assert (engine.stats().running_count, engine.stats().waiting_count) == (2, 2)
    assert 0 < engine.stats().kv_used_fraction < 2.2 * (len(PROMPT) + 80) / (SLOT_COUNT * CONTEXT_TOKENS)
    assert len(await gather(engine, 4)) == 4


async def test_a_request_that_can_not_fit_is_refused_with_its_sizes(engine: Engine) -> None:
    prompt = np.full(CONTEXT_TOKENS, 7, dtype=np.int32)
    with pytest.raises(EngineError, match=rf"\b{CONTEXT_TOKENS} tokens"):
        engine.generate(greedy("long", 1, prompt=prompt))
    with pytest.raises(EngineError, match="0 tokens"):
        engine.generate(greedy("empty", 1, prompt=prompt[:0]))
    with pytest.raises(EngineError, match="tokenizer"):
        engine.generate(greedy("alien", 1, prompt=np.array([10_000], dtype=np.int32)))
    engine.generate(greedy("twice", 1))
    with pytest.raises(EngineError, match="already running"):
        engine.generate(greedy("twice", 1))
    assert list(await gather(engine, 1)) == ["twice"]


async def test_a_request_that_outgrows_the_context_is_cut_there(engine: Engine) -> None:
    prompt = np.resize(PROMPT, CONTEXT_TOKENS - 5)
    (cut,) = await run(engine, greedy("cut", 50, prompt=prompt))
    assert cut.finish_reason == "length" and len(cut.completion_ids) == 5


async def test_a_prompt_that_fills_the_context_is_refused_for_good_by_the_workers_option(engine: Engine) -> None:
    prompt = np.resize(PROMPT, CONTEXT_TOKENS)
    with pytest.raises(EngineUnsupported, match=rf"has {CONTEXT_TOKENS} tokens .* larger --context") as caught:
        engine.generate(greedy("full", 1, prompt=prompt))
    assert "context_tokens_max" not in str(caught.value)
    # But tokens that another engine made are no fault of the prompt: another attempt may do better
    resumed = GenerationRequest(
        request_id="resumed", prompt_ids=prompt[:-4], sampling=Sampling(max_tokens=9), prior_ids=prompt[:4]
    )
    with pytest.raises(EngineError, match="larger --context") as late:
        engine.generate(resumed)
    assert not isinstance(late.value, EngineUnsupported)


async def test_a_closed_engine_takes_no_requests(kind: str) -> None:
    engine = new_engine(kind)
    await engine.start()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(greedy("late", 1))
    assert await engine.finished(0.01) == [] and await engine.abort(["late"]) == []


def sampled(request_id: str, max_tokens: int, seed: int | None, prompt: Int32 = PROMPT) -> GenerationRequest:
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens, seed=seed)
    return GenerationRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling)


async def test_seeded_sampling_gives_the_same_tokens_in_a_batch_and_alone(engine: Engine) -> None:
    await engine.apply(random_weights(engine, 1, scale=0.05))  # large ones round so that one draw in 300,000 differs
    requests = [sampled(f"{i}", 20 + 5 * i, seed=1 << (9 * i), prompt=PROMPT[i:]) for i in range(6)]
    alone = [(await run(engine, request))[0] for request in requests]
    unseeded = [sampled(f"unseeded{i}", 33, seed=None) for i in range(SLOT_COUNT)]  # more than slots: they take turns
    together = await run(engine, unseeded[0], *reversed(requests), *unseeded[1:])
    batch = {generation.request_id: generation for generation in together}
    for expected in alone:
        found = batch[expected.request_id]
        assert found.completion_ids.tolist() == expected.completion_ids.tolist()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


async def test_seeded_sampling_gives_the_same_tokens_when_the_prompt_is_read_in_pieces(engine: Engine) -> None:
    await engine.apply(random_weights(engine, 1, scale=0.05))
    engine.set_limits(EngineLimits(step_tokens=7))
    pieces, _ = await run(engine, sampled("pieces", 12, seed=7), sampled("other", 9, seed=8, prompt=PROMPT[20:]))
    engine.set_limits(EngineLimits())
    (whole,) = await run(engine, sampled("whole", 12, seed=7))
    assert pieces.error is None and pieces.completion_ids.tolist() == whole.completion_ids.tolist()


async def test_two_seeds_differ_and_an_unseeded_request_is_not_repeated(engine: Engine) -> None:
    requests = [sampled(f"{seed}", 30, seed) for seed in (0, 1, 2, (1 << 63) - 1)]
    unseeded = [sampled(f"unseeded{i}", 30, seed=None) for i in range(3)]
    ended = [*await run(engine, *requests, *unseeded), *await run(engine, *unseeded)]
    assert len({generation.completion_ids.tobytes() for generation in ended}) == len(ended)


async def test_what_is_no_seed_is_refused_with_what_would_be(engine: Engine) -> None:
    for seed in (-1, 1 << 63):
        with pytest.raises(EngineError, match=rf"'r' has seed {seed}, .* 0 to 9223372036854775807"):
            engine.generate(sampled("r", 1, seed))
    assert engine.stats().running_count == engine.stats().waiting_count == 0


async def test_a_temperature_that_no_engine_samples_at_is_refused_and_harms_nobody(engine: Engine) -> None:
    engine.generate(greedy("beside", 20))
    for temperature in (1e-40, 0.005, -1.0, 1e9, float("nan"), float("inf")):
        request = GenerationRequest(
            request_id="r", prompt_ids=PROMPT, sampling=Sampling(temperature=temperature, max_tokens=1)
        )
        with pytest.raises(EngineError, match=r"'r' has temperature .* 0 \(greedy\) or a number from 0.01 to 100"):
            engine.generate(request)
    (beside,) = await gather(engine, 1)
    assert beside == "beside"


# ---- what shapes the distribution

SHAPES: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": -1.5},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "logit_bias": {"logit_bias": {7: 4.0, 50: -100.0}},
    "all": {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {9: 2.0},
    },
}
SHAPED = [
    pytest.param(fields, temperature, id=f"{name}-{temperature}")
    for name, fields in SHAPES.items()
    for temperature in (0.0, 1.3)
]


def shaped(request_id: str, fields: dict[str, Any], temperature: float, **options: Any) -> GenerationRequest:
    sampling = Sampling(temperature=temperature, max_tokens=40, seed=options.pop("seed", None), **fields)
    return GenerationRequest(request_id=request_id, prompt_ids=PROMPT, sampling=sampling, **options)


@pytest.mark.parametrize(("fields", "temperature"), SHAPED)
async def test_every_parameter_makes_the_distribution_that_it_should(
    engine: Engine, fields: dict[str, Any], temperature: float
) -> None:
    plain = [GenerationRequest(request_id=f"plain{i}", prompt_ids=PROMPT, sampling=Sampling()) for i in range(2)]
    requests = [shaped(f"{i}", fields, temperature) for i in range(1 if temperature == 0 else 3)]
    for request, made in zip(requests, await run(engine, *requests, *plain), strict=False):
        ids = made.completion_ids.astype(np.int64)
        logits = (plain_logits_elsewhere if KIND == "vllm" else plain_logits)("tiny", engine.weight_bits(), PROMPT, ids)
        expected = shaped_logprobs(logits, PROMPT, ids, request.sampling)
        np.testing.assert_allclose(made.logprobs, expected[np.arange(len(ids)), ids], rtol=2e-4, atol=2e-4)
        if temperature == 0:
            assert ids.tolist() == expected.argmax(axis=1).tolist()
        else:
            assert not np.allclose(
                made.logprobs, shaped_logprobs(logits, PROMPT, ids, Sampling(temperature=1.3))[np.arange(len(ids)), ids]
            )


async def test_what_cuts_all_but_the_likeliest_token_is_greedy(engine: Engine) -> None:
    (alone,) = await run(engine, greedy("alone", 40))
    cuts: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    for made in await run(engine, *(shaped(f"{cut}", cut, 1.3) for cut in cuts)):
        assert made.completion_ids.tolist() == alone.completion_ids.tolist(), made.request_id
        np.testing.assert_allclose(made.logprobs, 0, atol=1e-6)
    (biased,) = await run(engine, shaped("biased", {"logit_bias": {77: 100.0}}, 0.0))
    assert set(biased.completion_ids.tolist()) == {77}


@pytest.mark.parametrize(("fields", "temperature"), SHAPED)
async def test_a_turn_that_changes_workers_in_the_middle_is_what_it_would_have_been(
    engine: Engine, fields: dict[str, Any], temperature: float
) -> None:
    await engine.apply(random_weights(engine, 1, scale=0.05))
    seed = 7 if temperature else None
    (full,) = await run(engine, shaped("full", fields, temperature, seed=seed))
    for count in (1, 17):
        prior_ids = full.completion_ids[:count]
        beside = greedy("beside", 9, prior_ids=np.array([7], dtype=np.int32))
        rest, _ = await run(engine, shaped("rest", fields, temperature, seed=seed, prior_ids=prior_ids), beside)
        assert rest.completion_ids.tolist() == full.completion_ids[count:].tolist()
        np.testing.assert_allclose(rest.logprobs, full.logprobs[count:], rtol=1e-3, atol=1e-4)


# ---- stop texts


def first_end(tokens: list[int], stop: str) -> int:
    """How many tokens there are until their text contains it, found by decoding everything again and again."""
    return next(count for count in range(1, len(tokens) + 1) if stop in TEXT.decode(tokens[:count]))


def stopped(request_id: str, max_tokens: int, *stop: str, **options: Any) -> GenerationRequest:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, stop=stop)
    return GenerationRequest(request_id=request_id, prompt_ids=PROMPT, sampling=sampling, **options)


async def test_a_stop_text_ends_a_turn_across_tokens_and_claims(engine: Engine) -> None:
    # Given a turn, and a piece of its text that is several tokens
    (full,) = await run(engine, greedy("full", 60))
    tokens = full.completion_ids.tolist()
    text = TEXT.decode(tokens)
    stop = text[20:24]
    count = first_end(tokens, stop)
    assert 4 <= count < 60

    # Then it ends there, with all of its tokens; also where there was room for no more, and beside one that goes on
    ended = await run(engine, stopped("s", 60, "never", stop), stopped("l", count, stop), greedy("full", 60))
    for made in ended[:2]:
        assert (made.finish_reason, made.error) == ("stop", None)
        assert made.completion_ids.tolist() == tokens[:count] and made.versions == ((0, count, 0),)
        np.testing.assert_allclose(made.logprobs, full.logprobs[:count], rtol=1e-4, atol=1e-5)
    assert ended[2].completion_ids.tolist() == tokens

    # And where it went on from any of its tokens, the stop's own among them
    for cut in (1, count - 1, count):
        (rest,) = await run(engine, stopped(f"{cut}", 60, stop, prior_ids=full.completion_ids[:cut]))
        assert rest.finish_reason == "stop" and rest.completion_ids.tolist() == tokens[cut:count]
    assert await engine.finished(0.02) == []


async def test_a_turn_with_a_stop_text_is_saved_and_cut_like_any_other(engine: Engine) -> None:
    (full,) = await run(engine, greedy("full", 150))
    engine.generate(stopped("cut", 150, "never"))
    seen = await tokens_of(engine, "cut", 10)
    await engine.apply(random_weights(engine, 0), turns="recompute")
    (cut,) = await engine.abort(["cut"])
    count = len(cut.completion_ids)
    assert cut.finish_reason == "abort" and len(seen.completion_ids) <= count < 150
    assert cut.completion_ids.tolist() == full.completion_ids[:count].tolist()


async def test_a_stop_of_one_token_ends_a_turn_too(engine: Engine) -> None:
    (full,) = await run(engine, greedy("full", 60))
    tokens = full.completion_ids.tolist()
    letter = next(each for each in TEXT.decode(tokens[10:]) if each.isalnum())
    (made,) = await run(engine, stopped("one", 60, letter))
    assert made.finish_reason == "stop" and made.completion_ids.tolist() == tokens[: first_end(tokens, letter)]


@pytest.mark.parametrize("fields", [{"guided_regex": "a+"}, {"guided_json": "{}"}, {"guided_tag": "{}"}])
async def test_what_an_engine_cannot_do_is_refused_with_the_field_the_engine_and_who_can(
    engine: Engine, kind: str, fields: dict[str, str]
) -> None:
    (name,) = fields
    assert name in engine.cannot
    with pytest.raises(EngineUnsupported, match=rf"'r' asks for {name}, which {kind} .* cannot do: .*tokenizer"):
        engine.generate(shaped("r", fields, 1.0))
    assert engine.stats().running_count == engine.stats().waiting_count == 0


async def test_a_model_that_reads_tokens_alone_refuses_images_with_the_engine_and_who_takes_them(
    engine: Engine, kind: str
) -> None:
    data = b"a file"
    image = Image(start=3, end=7, digest=digest_of(data), data=data)
    with pytest.raises(EngineUnsupported, match=rf"'r' has images, which {kind} .* cannot take: .* alone.*qwen2_vl"):
        engine.generate(greedy("r", 3, images=(image,)))
    assert "images" in engine.cannot
    assert engine.stats().running_count == engine.stats().waiting_count == 0


WORDS: Any = "words"
HOSTILE: dict[str, dict[str, Any]] = {
    "temperature of a name": {"temperature": WORDS},
    "temperature of none": {"temperature": None},
    "temperature of truth": {"temperature": True},
    "temperature of a list": {"temperature": [1.0]},
    "temperature below floats": {"temperature": 1e-40},
    "temperature below nothing": {"temperature": -0.5},
    "temperature without end": {"temperature": 10**400},
    "max_tokens of a name": {"max_tokens": WORDS},
    "max_tokens of a fraction": {"max_tokens": 1.5},
    "max_tokens not a number": {"max_tokens": float("nan")},
    "max_tokens below nothing": {"max_tokens": -(10**30)},
    "max_tokens without end": {"max_tokens": 10**30},
    "stop_ids of a name": {"stop_ids": WORDS},
    "stop_ids of none": {"stop_ids": None},
    "stop_ids of fractions": {"stop_ids": (0.5,)},
    "stop_ids below nothing": {"stop_ids": (-1,)},
    "stop_ids beyond tokens": {"stop_ids": (1 << 62,)},
    "stop_ids without end": {"stop_ids": tuple(range(100_000))},
    "stop_ids outside the vocabulary": {"stop_ids": ((1 << 31) - 1,)},
    "seed of a name": {"seed": WORDS},
    "seed of a fraction": {"seed": 0.5},
    "seed beyond": {"seed": 1 << 63},
    "top_p of nothing": {"top_p": 0.0},
    "top_p not a number": {"top_p": float("nan")},
    "top_k below nothing": {"top_k": -1},
    "top_k without end": {"top_k": 1 << 80},
    "min_p beyond": {"min_p": 1.5},
    "presence_penalty beyond": {"presence_penalty": 1e9},
    "frequency_penalty of a name": {"frequency_penalty": WORDS},
    "repetition_penalty of nothing": {"repetition_penalty": 0.0},
    "stop of a text": {"stop": "ab"},
    "stop of nothing": {"stop": ("",)},
    "stop of numbers": {"stop": (1,)},
    "stop of no Unicode": {"stop": ("\ud800",)},
    "stop of a million": {"stop": ("a" * (1 << 20),)},
    "stop without end": {"stop": ("a",) * 10_000},
    "logit_bias of a list": {"logit_bias": [1]},
    "logit_bias not a number": {"logit_bias": {1: float("nan")}},
    "logit_bias beyond": {"logit_bias": {1: 1e30}},
    "logit_bias below nothing": {"logit_bias": {-1: 1.0}},
    "logit_bias outside the vocabulary": {"logit_bias": {104: 1.0}},
    "logit_bias without end": {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
    "guided_json of a list": {"guided_json": "[]"},
    "guided_json of no JSON": {"guided_json": "{"},
    "guided_json without end": {"guided_json": "[" * (1 << 20)},
    "guided_regex of a number": {"guided_regex": 7},
    "guided_regex of a million": {"guided_regex": "a" * (1 << 20)},
    "guided by two": {"guided_regex": "a", "guided_json": "{}"},
    "guided_tag of a list": {"guided_tag": "[]"},
    "guided by another two": {"guided_tag": "{}", "guided_json": "{}"},
    "prompt of a list": {"prompt_ids": [1, 2, 3]},
    "prompt of fractions": {"prompt_ids": np.array([0.5, np.nan])},
    "prompt of rows": {"prompt_ids": np.ones((2, 3), np.int32)},
    "prompt of names": {"prompt_ids": np.array(["a"])},
    "prompt of anything": {"prompt_ids": np.array([None, 1], dtype=object)},
    "prompt of nothing": {"prompt_ids": np.zeros(0, np.int32)},
    "prompt below nothing": {"prompt_ids": np.array([-1], np.int32)},
    "prompt outside the vocabulary": {"prompt_ids": np.array([1 << 40], np.int64)},
    "prompt of a million": {"prompt_ids": np.ones(1 << 20, np.int32)},
    "prior of a name": {"prior_ids": WORDS},
    "prior outside the vocabulary": {"prior_ids": np.array([(1 << 31) - 1], np.int32)},
    "prior of a million": {"prior_ids": np.ones(1 << 20, np.int32)},
}


def hostile(request_id: str, **values: Any) -> GenerationRequest:
    """A request like any other but for these values."""
    arrays = {name: values.pop(name) for name in ("prompt_ids", "prior_ids") if name in values}
    sampling = Sampling(**{"temperature": 1.0, "max_tokens": 4, **values})
    return GenerationRequest(**{"request_id": request_id, "prompt_ids": PROMPT, "sampling": sampling, **arrays})


async def test_a_hostile_request_fails_alone_with_a_sentence(engine: Engine) -> None:
    # Given what a good request makes alone
    (alone,) = await run(engine, greedy("good", 200))

    # When every hostile one comes while it runs
    engine.generate(greedy("good", 200))
    begun, refusals, is_final = [], {}, {}
    for name, values in HOSTILE.items():
        try:
            engine.generate(hostile(name, **values))
            begun.append(name)
        except EngineError as error:
            refusals[name], is_final[name] = str(error), isinstance(error, EngineUnsupported)
        await asyncio.sleep(0)
    assert all(final for name, final in is_final.items() if not name.startswith(("prompt", "prior")))
    assert is_final["prompt of a million"] and not is_final["prior of a million"]
    assert all(repr(name) in told and len(told) < 500 for name, told in refusals.items())
    ended = await gather(engine, 1 + len(begun))

    # Then it makes the same, those that mean something have ended, and the engine takes more
    assert ended["good"].completion_ids.tolist() == alone.completion_ids.tolist()
    assert set(begun) == {"max_tokens below nothing", "max_tokens without end"}
    assert {ended[name].finish_reason for name in begun} == {"length"}
    (after,) = await run(engine, greedy("after", 20))
    assert after.completion_ids.tolist() == alone.completion_ids.tolist()[:20]


async def until_paused_by(engine: Engine, *reasons: str) -> None:
    await until(lambda: engine.stats().paused_by == reasons, lambda: f"{reasons}, but {engine.stats().paused_by}")


@pytest.mark.parametrize("limits", [EngineLimits(running_count=0), EngineLimits(step_tokens=0)])
async def test_an_engine_held_by_its_limits_says_so(engine: Engine, limits: EngineLimits) -> None:
    assert engine.stats().paused_by == ()
    engine.set_limits(limits)
    engine.generate(greedy("held", 5))
    await until_paused_by(engine, "limits")
    await engine.pause("slo")
    assert set(engine.stats().paused_by) == {"limits", "slo"}
    await engine.resume("slo")
    assert await engine.finished(0.1) == []
    engine.set_limits(EngineLimits())
    await until_paused_by(engine)
    assert list(await gather(engine, 1)) == ["held"]


async def test_a_reason_holds_once_however_often_it_is_given(engine: Engine) -> None:
    for reason in ("slo", "operator", "slo", "slo"):
        await engine.pause(reason)
    engine.generate(greedy("held", 5))
    assert engine.stats().paused_by == ("operator", "slo")
    await engine.resume("slo")
    assert engine.stats().paused_by == ("operator",)
    assert await engine.finished(0.1) == []
    await engine.resume("operator")
    assert list(await gather(engine, 1)) == ["held"]


async def test_an_engine_on_a_cpu_says_that_it_cannot_sleep_and_goes_on(engine: Engine, kind: str) -> None:
    assert engine.name.startswith(kind) and any(each.isdigit() for each in engine.name)
    with pytest.raises(EngineUnsupported, match="CPU"):
        await engine.sleep()
    assert engine.stats().paused_by == ()
    (ended,) = await run(engine, greedy("after", 5))
    assert ended.finish_reason == "length"


async def prompt_counts(engine: Engine, request: GenerationRequest) -> tuple[int, int]:
    """Tokens of its prompt as they are counted, and those of them found in the prefix cache."""
    before = engine.stats()
    (ended,) = await run(engine, request)
    after = engine.stats()
    assert ended.cached_token_count == after.cached_token_count - before.cached_token_count
    return after.prompt_token_count - before.prompt_token_count, ended.cached_token_count


async def test_prompts_and_what_the_prefix_cache_had_of_them_are_counted(engine: Engine) -> None:
    assert await prompt_counts(engine, greedy("first", 2)) == (len(PROMPT), 0)
    assert await prompt_counts(engine, greedy("again", 2)) == (len(PROMPT), 32)  # whole blocks


async def test_prompts_find_what_the_cache_has_under_their_own_salt_alone(engine: Engine) -> None:
    # Given a prompt that was read under one salt, in part by an answer
    assert await prompt_counts(engine, greedy("first", 40, cache_salt="a")) == (len(PROMPT), 0)
    # When the same prompt comes again, then only the same salt finds it
    assert await prompt_counts(engine, greedy("other", 2, cache_salt="b")) == (len(PROMPT), 0)
    assert await prompt_counts(engine, greedy("bare", 2)) == (len(PROMPT), 0)
    assert await prompt_counts(engine, greedy("same", 2, cache_salt="a")) == (len(PROMPT), 32)
    assert await prompt_counts(engine, greedy("other again", 2, cache_salt="b")) == (len(PROMPT), 32)
    # And what was computed again for a commit keeps its salt
    engine.generate(greedy("through", 60, cache_salt="a"))
    await tokens_of(engine, "through", 3)
    await engine.apply(random_weights(engine, 1), turns="recompute")
    await gather(engine, 1)
    assert await prompt_counts(engine, greedy("b", 2, cache_salt="b")) == (len(PROMPT), 0)
    assert await prompt_counts(engine, greedy("a", 2, cache_salt="a")) == (len(PROMPT), 32)


async def test_a_salt_changes_no_token_and_no_logprob(engine: Engine) -> None:
    requests = [greedy(f"{salt}.{i}", 20, cache_salt=salt) for salt in ("", "a", "b") for i in range(2)]
    first, *others = [(await run(engine, each))[0] for each in requests]
    for each in others:
        assert (each.completion_ids == first.completion_ids).all()
        np.testing.assert_allclose(each.logprobs, first.logprobs, rtol=1e-4, atol=1e-5)


async def test_read_weights_gives_what_the_engine_computes_with_at_that_time(engine: Engine) -> None:
    before = await engine.read_weights()
    staged = random_weights(engine, 1)
    await engine.apply(staged)
    after = await engine.read_weights()
    assert before.keys() == after.keys() == staged.writes.keys()
    for name, (_, values) in staged.writes.items():
        np.testing.assert_array_equal(after[name], values)
        assert (before[name] != values).any()
