"""The simulated GPU that serving and rollouts share: its engines, its bound, and the arms on a few seconds of load."""

from __future__ import annotations

import pytest

from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.replay.scale import at_rate, window
from rollfab.deploy.replay.traces import load_trace
from rollfab.fabric.rules.serving.facts import StepWork
from tests.support.one_gpu.arms import Guarded, IdleOnly, ServingAlone, Unguarded
from tests.support.one_gpu.engine import SERVING_7B, RolloutEngine, ServingEngine
from tests.support.one_gpu.world import Arm, Run, World, bound, simulate

pytestmark = pytest.mark.slow  # hundreds of simulated seconds

SPAN_S = 25.0
WARM_SPAN_S = 100.0  # of which the guard's first guesses about bursts are a small part
WORLD = World()


def chat(rate_per_s: float, span_s: float = SPAN_S) -> list[Arrival]:
    return at_rate(window(load_trace("azure-conv"), 300.0, span_s), rate_per_s, span_s=span_s, seed=1)


def run(arm: Arm, rate_per_s: float, world: World = WORLD, *, span_s: float = SPAN_S) -> Run:
    return simulate(chat(rate_per_s, span_s), span_s, arm, world)


def test_step_times_are_those_of_the_measured_tables() -> None:
    # Then: prompts of 512 and 2048 tokens; 16 sequences of 2,048 tokens; in ms, with what a CPU adds
    prompts = [1e3 * SERVING_7B.seconds(StepWork(prefill_tokens=n), n * n / 2) for n in (512, 2048)]
    decode = 1e3 * SERVING_7B.seconds(StepWork(decode_count=16, context_tokens=16 * 2048), 0.0)
    assert prompts == pytest.approx([12 + 1.5, 42 + 1.5], rel=0.07)
    assert decode == pytest.approx(6.9 + 1.5 + 16 * 0.05, rel=0.07)


def test_a_serving_engine_makes_every_token_of_every_request_and_ends_empty() -> None:
    # Given: one prompt of two and a half chunks, and a short one behind it
    long, short = Arrival(0.0, 2500, 5), Arrival(0.0, 100, 2)
    engine = ServingEngine(arrivals=[long, short], cost=SERVING_7B, chunk_tokens=1000)
    engine.take_in(0.0)
    works, now_s = [], 0.0
    # When
    while engine.has_work:
        work, took_s = engine.begin_step()
        now_s += took_s
        engine.end_step(now_s)
        works.append(work)
    # Then
    assert [work.prefill_tokens for work in works] == [1000, 1000, 600, 0, 0, 0, 0]
    assert [work.decode_count for work in works] == [0, 0, 0, 2, 1, 1, 1]
    assert [work.context_tokens for work in works] == [0, 0, 0, 2602, 2502, 2503, 2504]
    assert engine.context_tokens == 0
    first, second = engine.served
    assert first.ttft_s == second.ttft_s < second.ended_at_s < first.ended_at_s == now_s


def test_a_rollout_engine_alone_harvests_all_of_its_time() -> None:
    # Given
    engine, busy_s = RolloutEngine(cost=SERVING_7B), 0.0
    # When
    for _ in range(2000):
        work = engine.work(None)
        busy_s += engine.seconds(work)
        engine.end_step(work)
    # Then
    assert engine.harvested_s == pytest.approx(busy_s, rel=0.02)
    assert engine.work(5).decode_count == 5 and engine.work(0).decode_count == 0


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    assert run(Guarded(), 5.0) == run(Guarded(), 5.0)
    assert run(Guarded(), 5.0) != run(Guarded(), 5.0, World(seed=1))


def test_no_one_harvests_more_than_the_bound_of_a_load_that_is_served_in_time() -> None:
    # Given
    light, heavy = bound(chat(2.0), SPAN_S, WORLD), bound(chat(14.0), SPAN_S, WORLD)
    # Then
    assert 0.3 < heavy < light < 0.95
    assert run(Guarded(), 2.0).harvest < light and run(Guarded(), 14.0).harvest < heavy


def test_unguarded_sharing_breaks_the_promise_that_the_guard_keeps() -> None:
    # Given: nine tenths of what serving can carry
    alone, unguarded, ours = (run(arm, 16.0, span_s=WARM_SPAN_S) for arm in (ServingAlone(), Unguarded(), Guarded()))
    # Then
    assert alone.attained == 1.0
    assert unguarded.attained < 0.9
    assert ours.attained >= 0.998 and ours.ttft_ms_p99 < 500 and ours.tpot_ms_p99 < 150
    assert ours.harvest > 0.02


def test_slack_is_harvested_where_there_is_hardly_any_idle_time() -> None:
    # Given: half of what serving can carry
    idle, ours = (run(arm, 9.0, span_s=WARM_SPAN_S) for arm in (IdleOnly(), Guarded()))
    # Then
    assert idle.harvest < 0.05
    assert ours.harvest > 0.7 * bound(chat(9.0, WARM_SPAN_S), WARM_SPAN_S, WORLD)
    assert ours.attained >= 0.998


@pytest.mark.parametrize("is_paced", [True, False])
def test_the_guard_holds_when_steps_scatter_and_changing_engines_is_dear(is_paced: bool) -> None:
    # Given
    rough = World(noise=0.1, switch_ms=(2.0, 4.0), is_paced=is_paced)
    # Then
    assert run(Guarded(), 9.0, rough).attained >= 0.998
