"""The simulated cluster against the fabric's own code: real agents, workers and scripts, on a virtual clock.

The engine there makes a token for each of its turns in the same time, whatever their number and context. Nothing here
was fitted: the cluster is told the engine's step, the environment's, and which turns there were.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rollfab.deploy.simulation.cluster import Cluster, Setup
from rollfab.deploy.simulation.machine.cost import Model, StepCost
from rollfab.deploy.simulation.machine.workload import StepPlan, TrajectoryPlan, TurnPlan
from tests.sim.options import Options, draw
from tests.sim.world import Outcome, simulate

CALM = replace(
    draw(1),
    recovery="replay",
    group_count=8,
    group_size=4,
    turns=4,
    tokens=24,
    stops="",
    pace_s=0.3,
    has_reward=False,
    staleness=2,
    when_stale="keep",
    quorum=None,
    deadline_s=None,
    trajectory_count_max=64,
    agent_count=2,
    environment_count=16,
    dedicated_count=2,
    serving_count=0,
    slot_count=4,
    step_s=0.05,
    log_s=0.5,
    sleep_after_s=None,
    publish_every=100,
    think_s=0.0,
    is_transactional=False,
    cancels=False,
    faults_s=0.0,
    trouble_fraction=0.0,
    travel_s=0.001,
    focus="",
    hangs=False,
    revokes=False,
    kills=False,
)
OTHERS = {
    "turns queue for few slots": {},
    "slots are plenty": {"slot_count": 16},
    "tools take longer than turns": {"pace_s": 0.9, "tokens": 12},
    "one worker": {"dedicated_count": 1, "slot_count": 8},
    "long turns": {"tokens": 96, "turns": 2},
    "fewer environments than slots": {"environment_count": 3, "slot_count": 8},
}


def span_s(outcome: Outcome) -> float:
    """From the first claim of a trajectory to the last one's end."""
    begin = min(row[0] for row in outcome.lines if row[2] == "claim")
    return max(row[0] for row in outcome.lines if row[2] == "settle") - begin


def predicted_s(outcome: Outcome, options: Options) -> float:
    """The same, of the simulated cluster, with the turns that there were."""
    turns = Counter(row[3].rpartition(".")[0] for row in outcome.lines if row[2] == "turn.result")
    cost = StepCost(
        fixed_ms=1000 * options.step_s,
        weights_ms=0.0,
        token_us=0.0,
        context_us_per_1000=0.0,
        attention_ns=0.0,
        cpu_step_ms=0.0,
        cpu_sequence_ms=0.0,
    )
    groups = [
        tuple(
            TrajectoryPlan(4, (TurnPlan(options.tokens, 2, options.pace_s),) * turns[f"g{group}.{index}"])
            for index in range(options.group_size)
        )
        for group in range(options.group_count)
    ]
    model = Model(cost=cost, kv_bytes=1, weight_gb=0.0)
    cluster = Cluster(
        Setup(
            rollout=model,
            serving=model,
            dedicated=options.dedicated_count,
            lendable=0,
            slot_count=options.slot_count,
            kv_dedicated=1_000_000,
            kv_lent=0,
            kv_serving=0,
            turn_tokens_max=options.tokens,
            ttft_ms=500.0,
            tpot_ms=150.0,
            noise=0.0,
            places="home",
        )
    )
    cluster.place_count = options.agent_count * options.environment_count
    ended: list[float] = []
    plan = StepPlan(groups=groups, needed=len(groups), kept=frozenset(range(len(groups))))
    cluster.submit(plan, lambda: ended.append(cluster.events.now_s))
    cluster.events.run(lambda: bool(ended), 1e6)
    cluster.check()
    assert cluster.books.turn_count == sum(turns.values())
    return ended[0]


@pytest.mark.parametrize("name", OTHERS)
def test_a_calm_run_of_the_fabric_takes_as_long_as_the_simulated_one(name: str) -> None:
    options = replace(CALM, **OTHERS[name])
    outcome = simulate(options)
    assert not outcome.failure

    assert predicted_s(outcome, options) == pytest.approx(span_s(outcome), rel=0.05)
