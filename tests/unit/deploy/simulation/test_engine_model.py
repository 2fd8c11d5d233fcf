"""The simulated engine: macro steps against single ones, tokens and time that add up, whatever comes in between."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.deploy.replay.figures import percentile
from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.replay.scale import at_rate, window
from rollfab.deploy.replay.traces import load_trace
from rollfab.deploy.simulation.machine.books import Broken
from rollfab.deploy.simulation.machine.events import Events
from rollfab.deploy.simulation.machine.serving import ServingSide, served
from rollfab.deploy.simulation.machine.turns import Turn
from rollfab.fabric.rules.serving.facts import Slo, StepWork
from tests.support.simulated import COST, SERVING_COST, Lone

CHUNK = 2048
WARM_S = 8.0  # until prompts are read
Sizes = list[tuple[int, int]]
SIZES = st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 1500)), min_size=1, max_size=4)


def by_single_steps(sizes: Sizes) -> list[float]:
    """When each turn ends, one step at a time: written down without the engine's stretches and heaps.

    All have come before the first step.
    """
    now_s, left = 0.0, [prompt for prompt, _ in sizes]
    made, ends = [0] * len(sizes), [0.0] * len(sizes)
    while any(made[n] < output for n, (_, output) in enumerate(sizes)):
        decoding = [n for n, (_, output) in enumerate(sizes) if not left[n] and made[n] < output]
        context = sum(sizes[n][0] - left[n] + made[n] for n in range(len(sizes)) if made[n] < sizes[n][1])
        room, attention, prefill, begun = max(16, CHUNK - len(decoding)), 0.0, 0, []
        for n in [n for n in range(len(sizes)) if left[n]]:
            part = min(room - prefill, left[n])
            if part <= 0:
                break
            attention += part * (sizes[n][0] - left[n] + part / 2)
            left[n] -= part
            prefill += part
            if not left[n]:
                begun.append(n)
        work = StepWork(prefill_tokens=prefill, decode_count=len(decoding), context_tokens=context)
        now_s += COST.seconds(work, attention)
        for n in [*decoding, *begun]:
            made[n] += 1
            ends[n] = now_s
    return ends


@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_macro_steps_end_turns_when_single_steps_do(sizes: Sizes) -> None:
    world = Lone()
    for number, (prompt, output) in enumerate(sizes):
        world.engine.begin(world.turn(number, prompt, output))
    world.run()

    expected = by_single_steps(sizes)
    for (number, _), (end_s, made) in world.ended.items():
        assert made == sizes[number][1]
        assert end_s == pytest.approx(expected[number], rel=0.03)  # chunks of one prompt count alike
    assert len(world.ended) == len(sizes)


Timed = list[tuple[int, int, float, float]]  # prompt, output, when it comes, when it is taken back
TIMED = st.lists(
    st.tuples(st.integers(1, 6000), st.integers(1, 800), st.floats(0, 8), st.floats(0, 12)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(TIMED, st.booleans(), st.sampled_from([7_000, 10_000, 400_000]))
def test_no_token_and_no_second_is_lost_whoever_comes_and_goes(
    turns: Timed, keeps_tokens: bool, kv_tokens: int
) -> None:
    world = Lone(kv_tokens=kv_tokens)
    taken: list[Turn] = []

    def take(turn: Turn) -> None:
        if turn.engine and turn not in taken:
            taken.append(turn)
            world.engine.take_back([turn], keeps_tokens=keeps_tokens)

    for number, (prompt, output, at_s, back_s) in enumerate(turns):
        turn = world.turn(number, prompt, output)
        world.events.at(at_s, world.engine.begin, turn)
        world.events.at(back_s, take, turn)
    world.run()

    assert {each.key for each in world.back}.isdisjoint(world.ended)
    assert len(world.ended) + len(world.back) == len(turns)
    assert keeps_tokens or all(not each.made for each in world.back)
    world.books.check(sum(each.made for each in world.back))
    world.engine.check_time()
    assert not world.engine.turn_count


def test_when_the_cache_is_full_the_youngest_is_put_back_and_read_anew() -> None:
    # Given a cache that holds two turns as they begin, and one with all that it makes
    roomy, tight = Lone(), Lone(kv_tokens=4_500)
    for world in (roomy, tight):
        for number in range(2):
            world.engine.begin(world.turn(number, 2_000, 1_000))
        world.run()
    assert roomy.engine.preempted_count == 0 < tight.engine.preempted_count <= 3
    # Then the oldest ends when it would have anyway, or sooner, and the other once it has been read again
    assert tight.ended[0, 0][0] <= roomy.ended[0, 0][0] < tight.ended[1, 0][0]
    assert tight.books.prefilled > roomy.books.prefilled + 2_000
    assert tight.books.made == roomy.books.made == 2_000


def test_a_worker_that_knows_what_turns_make_takes_as_many_as_its_cache_holds() -> None:
    world = Lone(slots=16, kv_tokens=10_000)
    for number in range(8):
        world.engine.begin(world.turn(number, 900, 100))
        world.run()
    taken = 0
    while world.engine.can_take(world.turn(8 + taken, 900, 100)):
        world.engine.begin(world.turn(8 + taken, 900, 100))
        taken += 1
    assert taken == 10


def test_a_full_batch_makes_more_tokens_a_second_than_one_turn_but_each_is_slower() -> None:
    alone, full = Lone(), Lone()
    alone.engine.begin(alone.turn(0, 500, 400))
    for number in range(4):
        full.engine.begin(full.turn(number, 500, 400))
    alone.run()
    full.run()

    assert alone.ended[0, 0][0] < full.ended[0, 0][0] < 4 * alone.ended[0, 0][0]


@dataclass
class Asked:
    """A serving request: its prompt's tokens that are read, its answer's that are made, and when."""

    arrival: Arrival
    read: int = 0
    made: int = 0
    first_s: float = 0.0
    ended_s: float = 0.0


def serving_step_s(asked: list[Asked]) -> float:
    """How long serving's next step takes, which reads what it can of the prompts behind its decodes."""
    decoding = [each for each in asked if each.made]
    room, prefill, attention = CHUNK - len(decoding), 0, 0.0
    context = sum(each.read + each.made for each in decoding)
    for each in asked:
        part = min(room - prefill, each.arrival.prompt_tokens - each.read)
        attention += part * (each.read + part / 2)
        each.read += part
        prefill += part
    work = StepWork(prefill_tokens=prefill, decode_count=len(decoding), context_tokens=context)
    return SERVING_COST.seconds(work, attention)


def shared_by_single_steps(load: list[Arrival], span_s: float) -> tuple[float, list[Asked]]:
    """A step of each engine in turn, while both have work: rollouts' part of the time, and what became of requests."""
    now_s = rollout_s = 0.0
    asked, is_servings_turn = [Asked(each) for each in load], True
    rollout_step_s = COST.seconds(StepWork(decode_count=16, context_tokens=16 * 8192), 0.0)
    while now_s < span_s or not all(each.ended_s for each in asked):
        there = [each for each in asked if each.arrival.at_s <= now_s and not each.ended_s]
        if not there or not is_servings_turn:
            now_s += rollout_step_s
            rollout_s += rollout_step_s if now_s < span_s else 0.0
        else:
            now_s += serving_step_s(there)
            for each in (each for each in there if each.read == each.arrival.prompt_tokens):
                each.made += 1
                each.first_s = each.first_s or now_s
                each.ended_s = now_s if each.made == each.arrival.completion_tokens else 0.0
        is_servings_turn = not is_servings_turn
    return rollout_s / span_s, asked


def test_step_times_are_those_of_the_measured_tables() -> None:
    # Then: prompts of 512 and 2048 tokens; 16 sequences of 2,048 tokens; in ms, with what a CPU adds
    prompts = [1e3 * SERVING_COST.seconds(StepWork(prefill_tokens=n), n * n / 2) for n in (512, 2048)]
    decode = 1e3 * SERVING_COST.seconds(StepWork(decode_count=16, context_tokens=16 * 2048), 0.0)
    assert prompts == pytest.approx([12 + 1.5, 42 + 1.5], rel=0.07)
    assert decode == pytest.approx(6.9 + 1.5 + 16 * 0.05, rel=0.07)


def test_a_shared_gpu_is_as_one_simulated_step_by_step() -> None:
    span_s = 75.0
    load = at_rate(window(load_trace("azure-conv"), 0.0, span_s), 9.0, span_s=span_s, seed=0)
    expected_share, asked = shared_by_single_steps(load, span_s)

    world = Lone(slots=16, serving=ServingSide(SERVING_COST, 400_000))
    for number in range(16):
        world.engine.begin(world.turn(number, 7100, 1_000_000))  # 8,192 tokens of context, in the mean
    for each in load:
        world.events.at(WARM_S + each.at_s, world.engine.arrive, each.prompt_tokens, each.completion_tokens)
    world.events.at(WARM_S - 0.1, world.engine.wake)  # what is under way is counted when it ends
    world.run(WARM_S)
    before_s = world.engine.rollout_s
    world.run(WARM_S + span_s)
    share = (world.engine.rollout_s - before_s) / span_s
    world.run(WARM_S + 2 * span_s)
    assert world.engine.serving is not None
    ours = served(world.engine.serving.requests, Slo(ttft_ms=500.0, tpot_ms=150.0), WARM_S + 2 * span_s)

    assert ours is not None
    tpots = [1e3 * (each.ended_s - each.first_s) / (each.made - 1) if each.made > 1 else 0.0 for each in asked]
    assert share == pytest.approx(expected_share, rel=0.1)
    assert ours.tpot_ms_p50 == pytest.approx(percentile(tpots, 0.5), rel=0.1)
    assert ours.tpot_ms_p99 == pytest.approx(percentile(tpots, 0.99), rel=0.15)
    ttfts = [1e3 * (each.first_s - each.arrival.at_s) for each in asked]
    assert ours.ttft_ms_p99 == pytest.approx(percentile(ttfts, 0.99), rel=0.15)


def test_a_context_that_is_cached_is_not_read_again() -> None:
    world = Lone()
    first = world.turn(0, 8000, 10)
    world.engine.begin(first)
    world.run()
    read = world.books.prefilled

    world.engine.begin(Turn(first.trajectory, 1, 8010 + 100, 100, 10))
    world.run()

    assert read == 8000
    assert world.books.prefilled - read == 100  # what the environment added
    assert world.books.refilled == 0


def test_an_engine_gets_no_more_turns_than_it_has_slots() -> None:
    world = Lone(slots=1)
    world.engine.begin(world.turn(0, 100, 10))
    assert not world.engine.can_take(world.turn(1, 100, 10))
    with pytest.raises(Broken, match="no free slot"):
        world.engine.begin(world.turn(1, 100, 10))


def test_time_never_runs_backwards() -> None:
    events = Events()
    events.at(5.0, lambda: events.at(4.0, lambda: None))
    with pytest.raises(Broken, match="backwards"):
        events.run(lambda: False, 10.0)
