"""What is particular to the transformers engine: its thread, how it fails, how it draws. The rest is the contract."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import ConfigError, EngineError, EngineUnsupported, WeightError
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.versions.commit import Staged
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.request import Admission, stretches
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState  # noqa: E402

from rollfab.workers.engines.transformers import loop as transformers_loop  # noqa: E402, F401  imported here, or the first test pays for it
from rollfab.workers.engines.transformers.sampler import RowReader, draw  # noqa: E402
from tests.support.seeing_model import write_seeing_model  # noqa: E402
from tests.support.until import until  # noqa: E402

ROOT = Path(__file__).parents[3]


async def started(**options: Any) -> TransformersEngine:
    engine = TransformersEngine(TransformersConfig(slot_count=4, **options))
    await engine.start()
    return engine


def ask(request_id: str, max_tokens: int = 200, seed: int | None = None, **options: Any) -> GenerationRequest:
    prompt = np.arange(5, 25, dtype=np.int32)
    sampling = Sampling(max_tokens=max_tokens, seed=seed)
    return GenerationRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling, **options)


async def until_it_runs(engine: TransformersEngine, request_id: str) -> None:
    await until(lambda: any(len(each.completion_ids) for each in engine.progress([request_id])), every_s=0.001)


async def gather(engine: TransformersEngine, count: int) -> list[Generation]:
    ended: list[Generation] = []
    while len(ended) < count:
        batch = await engine.finished(30.0)
        assert batch, "nothing ended in time"
        ended += batch
    return ended


# a number that is not one, as every element of the embedding: the next step has no distribution to draw from
BROKEN = (None, np.full(104 * 64, 0x7FC00000, dtype=np.uint32))
# the second tensor's write fails when the first is already done
TORN = (np.array([0, 10**9]), np.zeros(2, dtype=np.uint32))


async def test_a_crash_ends_everything_with_an_error_and_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await started()
    for i in range(6):  # four run, two wait
        engine.generate(ask(f"{i}"))
    await until_it_runs(engine, "3")

    def crash(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("rollfab.workers.engines.transformers.sampler.draw", crash)
    ended = await gather(engine, 6)
    assert {generation.finish_reason for generation in ended} == {"error"}
    assert all("out of order" in (generation.error or "") for generation in ended)
    by_id = {generation.request_id: generation for generation in ended}
    assert len(by_id["0"].completion_ids) == len(by_id["0"].logprobs) > 0, "what it had made is still handed out"
    assert by_id["0"].versions == ((0, len(by_id["0"].completion_ids), -1),)
    with pytest.raises(EngineError, match="crashed"):
        engine.generate(ask("late"))
    with pytest.raises(EngineError, match="crashed"):
        await engine.pause("test")
    assert await engine.abort(["0"]) == [] and await engine.finished(0.01) == []
    await engine.close()


async def test_requests_without_a_distribution_end_alone_with_what_they_had_made() -> None:
    engine = await started()
    engine.generate(ask("runs"))
    await until_it_runs(engine, "runs")
    await engine.apply(Staged(1, {"model.embed_tokens.weight": BROKEN}))
    engine.generate(ask("one token", max_tokens=1))
    ended = {generation.request_id: generation for generation in await gather(engine, 2)}
    assert all(each.finish_reason == "error" and "not numbers" in (each.error or "") for each in ended.values())
    assert len(ended["runs"].completion_ids) == len(ended["runs"].logprobs) > 0, "the tokens before are handed out"
    assert np.isfinite(ended["runs"].logprobs).all() and len(ended["one token"].completion_ids) == 0
    assert engine.stats().running_count == engine.stats().waiting_count == 0

    await engine.apply(Staged(2, {"model.embed_tokens.weight": (None, np.zeros(104 * 64, dtype=np.uint32))}))
    engine.generate(ask("healed", max_tokens=3))
    (healed,) = await gather(engine, 1)
    assert healed.finish_reason == "length" and np.isfinite(healed.logprobs).all()
    await engine.close()


def test_a_row_without_a_distribution_leaves_its_neighbours_alone() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [torch.nan, 1.0, 2.0], [torch.inf, 0.0, 0.0], [0.0, 1.0, 2.0]])
    temperatures, uniform = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.full((4,), 0.5, dtype=torch.float64)

    tokens, logprobs = draw(logits, temperatures, uniform)

    assert tokens.tolist() == [2, 0, 0, 2]
    assert torch.isnan(logprobs).tolist() == [False, True, True, False]


async def test_a_torn_write_fails_the_engine_rather_than_generating_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rollfab.workers.engines.transformers.engine.check_writes", lambda *_: None
    )  # else refused whole
    engine = await started()
    engine.generate(ask("running"))
    with pytest.raises(WeightError, match="version 1"):
        await engine.apply(Staged(1, {"model.norm.weight": TORN}))
    (ended,) = await gather(engine, 1)
    assert ended.finish_reason == "error"
    with pytest.raises(EngineError, match="crashed"):
        engine.generate(ask("late"))
    await engine.close()


async def test_close_ends_the_thread_whatever_it_is_doing() -> None:
    for state in ("idle", "busy", "held"):
        engine = await started()
        if state != "idle":
            for i in range(8):
                engine.generate(ask(f"{i}"))
        if state == "held":
            await engine.pause("test")
        async with asyncio.timeout(20.0):
            await engine.close()
        await asyncio.sleep(0.05)
        assert not [thread for thread in threading.enumerate() if thread.name == "rollfab-engine"]
        await engine.close()  # twice is once


@pytest.mark.timeout(40)  # a fresh process imports torch first
async def test_a_process_whose_event_loop_dies_ends_all_the_same() -> None:
    program = """
import asyncio, numpy
from rollfab.fabric.contract.records import Sampling
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersEngine
async def main():
    engine = TransformersEngine()
    await engine.start()
    prompt = numpy.arange(5, 25, dtype=numpy.int32)
    for i in range(200):
        engine.generate(GenerationRequest(request_id=str(i), prompt_ids=prompt, sampling=Sampling(max_tokens=400)))
    await asyncio.sleep(0.2)
    print("generated", engine.stats().token_count > 0, flush=True)
    raise RuntimeError("mishap")
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT / "src", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 50)
    assert b"generated True" in output, errors.decode()
    assert process.returncode == 1 and b"mishap" in errors, errors.decode()


async def test_a_model_that_can_not_be_loaded_says_so() -> None:
    with pytest.raises(EngineError, match="no-such-dtype"):
        await started(dtype="no-such-dtype")
    with pytest.raises(EngineError, match="/no/such/path"):
        await started(model="/no/such/path")
    with pytest.raises(ConfigError, match="page_size"):
        TransformersConfig(page_size=1)


async def test_a_context_beyond_the_model_is_cut_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    engine = await started(context_tokens_max=4096)
    await engine.close()
    assert "model 'tiny' has 512 positions: turns end there, and not at the 4096 tokens of --context" in caplog.messages


async def test_a_model_that_sees_is_refused_with_the_engine_that_takes_it(tmp_path: Path) -> None:
    model = str(write_seeing_model(tmp_path))
    with pytest.raises(EngineUnsupported, match=r"sees, and this engine reads tokens alone: take --engine vllm"):
        await TransformersEngine(TransformersConfig(model=model)).start()


async def test_bfloat16_weights_are_written_as_the_bits_they_are() -> None:
    engine = await started(dtype="bfloat16")
    spec = next(spec for spec in engine.layout.tensors if spec.name == "model.norm.weight")
    bits = np.arange(spec.element_count, dtype=np.uint16) + 0x3F00
    assert (spec.dtype, engine.weight_bits()[spec.name].dtype) == ("bfloat16", np.uint16)
    await engine.apply(Staged(3, {"model.norm.weight": (None, bits)}))
    assert (engine.weight_bits()[spec.name] == bits).all()
    engine.generate(ask("one", max_tokens=8))
    (one,) = await gather(engine, 1)
    assert one.versions == ((0, 8, 3),)
    await engine.close()


async def test_one_seed_gives_one_answer_whatever_others_do_with_torch() -> None:
    answers = []
    for _ in range(2):
        engine = await started(seed=7)
        torch.manual_seed(len(answers))
        engine.generate(ask("one", max_tokens=30))
        answers += await gather(engine, 1)
        await engine.close()
    assert (answers[0].completion_ids == answers[1].completion_ids).all()


async def test_a_seeded_request_handed_over_anywhere_goes_on_as_if_it_had_not_been() -> None:
    engine, other = await started(seed=1), await started(seed=2)
    engine.generate(ask("whole", max_tokens=60, seed=7))
    (whole,) = await gather(engine, 1)
    ids = whole.completion_ids
    for i, count in enumerate((1, 17, 59)):  # to an engine with other dice of its own, and something else to do
        other.generate(ask(f"other{i}", max_tokens=20))
        other.generate(ask("rest", max_tokens=60, seed=7, prior_ids=ids[:count]))
        other.generate(ask(f"sibling{i}", max_tokens=60, seed=8, prior_ids=ids[:count]))
        ended = {generation.request_id: generation for generation in await gather(other, 3)}
        assert ended["rest"].completion_ids.tolist() == ids[count:].tolist()
        np.testing.assert_allclose(ended["rest"].logprobs, whole.logprobs[count:], rtol=1e-5, atol=1e-5)
        assert count > 50 or ended[f"sibling{i}"].completion_ids.tolist() != ids[count:].tolist()
    await engine.close()
    await other.close()


async def test_a_seeded_request_that_is_aborted_goes_on_from_its_last_token() -> None:
    engine = await started()
    engine.generate(ask("whole", max_tokens=200, seed=7))
    (whole,) = await gather(engine, 1)
    made: list[int] = []
    for _ in range(3):
        engine.generate(ask("part", seed=7, prior_ids=np.array(made, np.int32)))
        await until_it_runs(engine, "part")
        (part,) = await engine.abort(["part"])
        made += part.completion_ids.tolist()
    engine.generate(ask("part", seed=7, prior_ids=np.array(made, np.int32)))
    (rest,) = await gather(engine, 1)
    assert made + rest.completion_ids.tolist() == whole.completion_ids.tolist()
    await engine.close()


async def test_a_seeded_request_that_is_read_again_with_the_same_weights_goes_on_as_if_it_had_not_been() -> None:
    # Given more requests than slots, so that some wait, and a cache that holds them only just
    engine = await started(context_tokens_max=112)
    for i in range(6):
        engine.generate(ask(f"{i}", max_tokens=80, seed=i))
    whole = {generation.request_id: generation for generation in await gather(engine, 6)}
    norm = engine.weight_bits()["model.norm.weight"].copy()
    for i in range(6):
        engine.generate(ask(f"{i}", max_tokens=80, seed=i))
    # When the same weights are written again and again in the middle
    for version in range(1, 6):
        await until_it_runs(engine, f"{version - 1}")
        await engine.apply(Staged(version, {"model.norm.weight": (None, norm)}), turns="recompute")
    for generation in await gather(engine, 6):
        expected = whole[generation.request_id]
        assert generation.completion_ids.tolist() == expected.completion_ids.tolist()
        np.testing.assert_allclose(generation.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert engine.stats().kv_used_fraction == 0.0
    await engine.close()


async def test_a_seeded_neighbour_does_not_change_what_the_others_draw() -> None:
    answers = []
    for seed in (None, 7):
        engine = await started(seed=1)
        await engine.pause("test")  # so that all begin with one step
        engine.generate(ask("neighbour", max_tokens=30, seed=seed))
        engine.generate(ask("one", max_tokens=30))
        await engine.resume("test")
        answers.append({generation.request_id: generation.completion_ids for generation in await gather(engine, 2)})
        await engine.close()
    assert answers[0]["one"].tolist() == answers[1]["one"].tolist()
    assert answers[0]["neighbour"].tolist() != answers[1]["neighbour"].tolist()


def test_a_seeded_row_counts_its_tokens_from_the_first_claim_on_and_through_an_eviction() -> None:
    def request(name: str, made_count: int, temperature: float) -> Any:
        wishes = {"temperature": temperature}
        state = RequestState(request_id=name, initial_tokens=[5, 6, 7], logit_processor_kwargs=wishes)
        state.generated_tokens, state.logprobs = [8] * made_count, [-1.0] * made_count
        return state

    def admission(name: str, prior_count: int = 0, **wishes: Any) -> Admission:
        sampling = Sampling(max_tokens=9, **wishes)
        return Admission(
            request_id=name, input_ids=[5, 6, 7], token_count_max=9, sampling=sampling, prior_count=prior_count
        )

    seeded = request("seeded", 4, temperature=1.0)
    states = [request("plain", 1, temperature=0.5), seeded, seeded.create_equivalent_initial_request()]
    reader = RowReader({"plain": admission("plain"), "seeded": admission("seeded", prior_count=3, seed=7)})
    reader.prepare_tensor_args([FutureRequestState(state, True, {}, 1) for state in states])
    assert reader.seeded == [(1, 7, 7), (2, 7, 7)]
    reader.prepare_tensor_args([])
    assert reader.seeded == []


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([[2.0, 0.0, -200.0, 1.0, -float("inf")]])
    count = 40_000
    temperature = torch.full((count,), 2.0)
    numbers = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits.expand(count, -1), temperature, numbers)
    expected = torch.softmax(logits[0] / 2.0, dim=-1)
    frequency = torch.bincount(tokens, minlength=5) / count
    assert (frequency - expected).abs().max() < 0.01 and frequency[4] == 0
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_greedy_takes_the_first_largest_logit_and_reports_it_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 0.0]])
    tokens, logprobs = draw(logits, torch.zeros(2), torch.rand(2, dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0])


def test_versions_cover_every_token_once() -> None:
    assert stretches([(0, 4)], 3) == ((0, 3, 4),)
    assert stretches([(0, 4), (2, 5), (3, 6)], 5) == ((0, 2, 4), (2, 3, 5), (3, 5, 6))
    assert stretches([(0, 4), (2, 5)], 2) == ((0, 2, 4),), "a version that began after the last token made none"
    assert stretches([(0, 4), (2, 5)], 1) == ((0, 1, 4),)
    assert stretches([(0, 4)], 0) == stretches([], 0) == ()


JUNK = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=3), st.binary(max_size=3)
)
NUMBERS = st.one_of(st.integers(-(10**40), 10**40), st.integers(-3, 200), st.floats())
IDS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 103), max_size=40)
ARRAYS = st.one_of(JUNK, IDS.map(lambda ids: np.array(ids, np.int32)), st.lists(st.floats(), max_size=9).map(np.array))
SAMPLINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": JUNK | NUMBERS | st.just(1.0),
        "max_tokens": JUNK | NUMBERS,
        "stop_ids": JUNK | IDS | IDS.map(tuple),
        "seed": JUNK | NUMBERS,
    },
)


@pytest.mark.timeout(120)
def test_no_request_harms_the_one_beside_it() -> None:
    with asyncio.Runner() as runner:
        engine = runner.run(started(seed=0))

        def good(name: str) -> GenerationRequest:
            prompt = np.arange(5, 25, dtype=np.int32)
            return GenerationRequest(
                request_id=name, prompt_ids=prompt, sampling=Sampling(temperature=0.0, max_tokens=10)
            )

        async def beside(sampling: dict[str, Any], arrays: dict[str, Any]) -> Generation:
            engine.generate(good("good"))
            wanted = 1
            with contextlib.suppress(EngineError):  # whatever else it raises is a fault
                hostile: Any = {"prompt_ids": np.arange(5, 25, dtype=np.int32), **arrays}
                engine.generate(GenerationRequest(request_id="hostile", sampling=Sampling(**sampling), **hostile))
                wanted = 2
            ended = {each.request_id: each for each in await gather(engine, wanted)}
            assert len(ended) == wanted
            return ended["good"]

        engine.generate(good("good"))
        (alone,) = runner.run(gather(engine, 1))

        @settings(max_examples=80, deadline=None)
        @given(SAMPLINGS, st.fixed_dictionaries({}, optional={"prompt_ids": ARRAYS, "prior_ids": ARRAYS}))
        def look(sampling: dict[str, Any], arrays: dict[str, Any]) -> None:
            found = runner.run(beside(sampling, arrays))
            assert (found.finish_reason, found.error) == ("length", None)
            assert found.completion_ids.tolist() == alone.completion_ids.tolist()

        try:
            look()
        finally:
            runner.run(engine.close())
