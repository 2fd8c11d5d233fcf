"""The simulated cluster against the fabric's own code: real agents, workers and scripts, on a virtual clock.

The engine there makes a token for each of its turns in the same time, whatever their number and context. Nothing here
was fitted: the cluster is told the engine's step, the environment's, and which turns there were.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.simulation.cluster import FORGET_S, ROUND_S, Cluster, Setup
from rollfab.deploy.simulation.failing import LEAD_S
from rollfab.deploy.simulation.lending import Lender, Nobody, Planned
from rollfab.deploy.simulation.machine.cost import Model
from rollfab.deploy.simulation.machine.serving import Request, latencies_ms
from rollfab.deploy.simulation.machine.workload import StepPlan, TrajectoryPlan, TurnPlan
from tests.sim import world
from tests.sim.engines.fake import FakeEngine
from tests.sim.engines.shared import KV_TOKENS, SharedEngine, even
from tests.sim.options import Options, draw
from tests.sim.virtual_loop import Process
from tests.sim.world import Outcome, World, simulate
from tests.support.tried import cases

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
    shard_count=1,
    agent_count=2,
    environment_count=16,
    dedicated_count=2,
    serving_count=0,
    slot_count=4,
    is_unlike=False,
    step_s=0.05,
    log_s=0.5,
    sleep_after_s=None,
    publish_every=100,
    think_s=0.0,
    is_transactional=False,
    cancels=False,
    retries=False,
    has_rank=False,
    loosens=False,
    drops=False,
    faults_s=0.0,
    trouble_fraction=0.0,
    travel_s=0.001,
    focus="",
    hangs=False,
    revokes=False,
    kills=False,
    has_guest=False,
    evaluates=False,
    serves_s=0.0,
)
OTHERS = {
    "one worker": {"dedicated_count": 1, "slot_count": 8},
    "slots are plenty": {"slot_count": 16},
    "turns queue for few slots": {},
    "tools take longer than turns": {"pace_s": 0.9, "tokens": 12},
    "long turns": {"tokens": 96, "turns": 2},
    "fewer environments than slots": {"environment_count": 3, "slot_count": 8},
}


def begun_s(outcome: Outcome) -> float:
    """When the first trajectory was claimed."""
    return min(row[0] for row in outcome.lines if row[2] == "claim")


def span_s(outcome: Outcome) -> float:
    """From the first claim of a trajectory to the last one's end."""
    return max(row[0] for row in outcome.lines if row[2] == "settle") - begun_s(outcome)


def predicted_s(outcome: Outcome, options: Options, trouble: Trouble | None = None) -> float:
    """The same, of the simulated cluster, with the turns that there were."""
    return predicted(outcome, options, ServingLoad(), trouble)[0]


def predicted(
    outcome: Outcome, options: Options, serving: ServingLoad, trouble: Trouble | None = None
) -> tuple[float, list[Request]]:
    """The same, and serving's requests."""
    ended_turns = {row[3] for row in outcome.lines if row[2] == "turn.result"}  # a result may come twice
    turns = Counter(name.rpartition(".")[0] for name in ended_turns)
    groups = [
        tuple(
            TrajectoryPlan(4, (TurnPlan(options.tokens, 2, options.pace_s),) * turns[f"g{group}.{index}"])
            for index in range(options.group_size)
        )
        for group in range(options.group_count)
    ]
    cluster = Cluster(
        Setup(
            rollout=Model(cost=even(options.step_s), kv_bytes=1, weight_gb=0.0),
            serving=Model(cost=even(serving.step_s), kv_bytes=1, weight_gb=0.0),
            dedicated=options.dedicated_count,
            lendable=options.serving_count,
            slot_count=options.slot_count,
            kv_dedicated=KV_TOKENS,
            kv_lent=KV_TOKENS,
            kv_serving=KV_TOKENS,
            load=serving.requests(),
            load_s=1e6,
            turn_tokens_max=options.tokens,
            activation_s=0.0,
            fetch_s=0.0,
            ttft_ms=500.0,
            tpot_ms=150.0,
            noise=0.0,
            places="home",
            agents=options.agent_count,
        )
    )
    cluster.agents.place_count = options.agent_count * options.environment_count
    ended: list[float] = []
    plan = StepPlan(groups=groups, needed=len(groups), kept=frozenset(range(len(groups))))
    lender: Lender = Nobody()
    start_s = 0.0
    if options.serving_count:
        start_s = begun_s(outcome)
        lender = planned = Planned()
        planned.start(cluster)
        for at_s, mode in serving.switched:
            cluster.events.at(at_s, planned.say, mode)
    cluster.events.at(start_s, cluster.submit, plan, lambda _: ended.append(cluster.events.now_s))
    if trouble is not None:
        trouble.strike(cluster, lender, begun_s(outcome) - start_s)
        renewing(cluster)
    cluster.events.run(lambda: bool(ended), 1e6)
    cluster.check()
    assert cluster.books.turn_count == sum(turns.values())
    return ended[0] - start_s, [each for each in cluster.requests() if each.ended_s <= ended[0]]


@pytest.mark.parametrize("name", cases(OTHERS, 2))
def test_a_calm_run_of_the_fabric_takes_as_long_as_the_simulated_one(name: str) -> None:
    options = replace(CALM, **OTHERS[name])
    outcome = simulate(options)
    assert not outcome.failure

    assert predicted_s(outcome, options) == pytest.approx(span_s(outcome), rel=0.05)


@dataclass(frozen=True, kw_only=True)
class ServingLoad:
    """What serving has to do, and how it lends.

    step_s: of its engine. bursts: times, requests that come together then, and the tokens of each answer. switched: the
    times when its team switches lending, and to what.
    """

    step_s: float = 0.02
    bursts: tuple[tuple[float, int, int], ...] = ()
    switched: tuple[tuple[float, str], ...] = ()

    def requests(self) -> list[Arrival]:
        return [Arrival(at_s, 64, tokens) for at_s, count, tokens in self.bursts for _ in range(count)]


STEADY = tuple((0.5 + 0.8 * n, 1, 20) for n in range(60))
LENT = {
    "serving rests": ServingLoad(),
    "serving answers one request after another": ServingLoad(bursts=STEADY),
    "serving steps take most of a token's time": ServingLoad(step_s=0.1, bursts=STEADY),
    "serving is busy for a while": ServingLoad(step_s=0.14, bursts=((4.0, 6, 40),)),
    "its team takes the worker back": ServingLoad(bursts=STEADY, switched=((4.0, "off"),)),
    "its team takes the worker back, and lends it again": ServingLoad(switched=((4.0, "off"), (6.0, "on"))),
    "its team lends late": ServingLoad(switched=((0.2, "off"), (5.0, "on"))),
}


class Lending(World):
    """The fabric, of which some workers are beside a serving engine."""

    serving = ServingLoad()
    requests: list[Request]

    async def run(self) -> None:
        for at_s, mode in self.serving.switched:
            self._loop.call_later(at_s, lambda mode=mode: asyncio.ensure_future(self.set_lend(mode)))
        await super().run()

    def make_engine(self, process: Process, **told: Any) -> FakeEngine:
        if process.role != "serving":
            return super().make_engine(process, **told)
        serving = self.serving
        engine = SharedEngine(self.options.step_s, serving=even(serving.step_s), load=serving.requests(), **told)
        Lending.requests = engine.serving.requests
        return engine


@pytest.mark.parametrize("name", cases(LENT, 2))
def test_a_run_on_a_lent_worker_takes_as_long_as_the_simulated_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "World", Lending)
    monkeypatch.setattr(Lending, "serving", LENT[name])
    options = replace(CALM, group_count=32, slot_count=8, dedicated_count=1, serving_count=1)
    outcome = simulate(options)
    assert not outcome.failure
    ended_s = begun_s(outcome) + span_s(outcome)
    seen = [each for each in Lending.requests if each.ended_s <= ended_s]

    found_s, requests = predicted(outcome, options, LENT[name])

    assert found_s == pytest.approx(span_s(outcome), rel=0.05)
    assert abs(len(requests) - len(seen)) <= 2  # the last ones end as rollouts do
    assert tpot_ms(requests) == pytest.approx(tpot_ms(seen), rel=0.05)


def tpot_ms(requests: list[Request]) -> float:
    """What serving's users saw between two tokens, on the average."""
    return sum(latencies_ms(requests, 0.0)[1]) / max(1, len(requests))


def renewing(cluster: Cluster) -> None:
    cluster.save()
    cluster.events.after(ROUND_S, renewing, cluster)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Who dies, when, and how long it is until he, or his successor, is there again. Nobody is told."""

    who: str
    at_s: float
    back_s: float

    def strike(self, cluster: Cluster, lender: Lender, begun_s: float) -> None:
        """Let it happen to the simulated cluster, whose time counts from `begun_s` of the fabric's."""
        at_s, worker = self.at_s - begun_s, cluster.dedicated[0]
        befalls: dict[str, list[tuple[float, Callable[[], Any]]]] = {
            "dedicated": [
                (0.0, lambda: cluster.kill(worker)),
                (FORGET_S, lambda: cluster.forget(worker)),
                (self.back_s, lambda: cluster.revive(worker)),
            ],
            "agent": [(0.0, lambda: cluster.kill_agent(0)), (self.back_s, lambda: cluster.agents.revive(0))],
            "controller": [
                (0.0, lender.fell_silent),
                (max(self.back_s, LEAD_S), lambda: lender.spoke_again(is_new=True)),
            ],
            "broker": [
                (0.0, cluster.broker.go),
                (0.0, lender.fell_silent),
                (self.back_s, cluster.reconnect),
                (self.back_s, lambda: lender.spoke_again(is_new=False)),
            ],
        }
        for after_s, do in befalls[self.who]:
            cluster.events.at(at_s + after_s, do)


class Troubled(World):
    """The fabric, in which somebody dies."""

    trouble: Trouble

    async def run(self) -> None:
        self._loop.call_later(self.trouble.at_s, self._strike)
        await super().run()

    def _strike(self) -> None:
        who, back_s = self.trouble.who, self.trouble.back_s
        if who == "broker":
            self.broker.stop()
            self.broker.trouble_s = self._loop.time() + back_s
            self._loop.call_later(back_s, self.broker.wake)
            return
        names = [name for name in self.links if name.startswith(f"{who}-")]
        for name in names if who == "controller" else names[:1]:  # the one in reserve, too
            victim = self.links[name].process
            self.facts.note("fault", "crash", name)
            victim.trouble_s = self._loop.time()
            self.crash(victim, after_s=back_s)


def with_trouble(options: Options, trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """How the fabric fares in trouble."""
    monkeypatch.setattr(world, "World", Troubled)
    monkeypatch.setattr(Troubled, "trouble", trouble, raising=False)
    outcome = simulate(options)
    assert not outcome.failure
    return outcome


@pytest.mark.parametrize("back_s", cases([6.0, 1e6], 1))
@pytest.mark.parametrize("at_s", cases([4.0, 6.3], 1))
@pytest.mark.parametrize("name", cases(["turns queue for few slots", "long turns"], 1))
def test_a_run_whose_worker_is_killed_takes_as_long_as_the_simulated_one(
    name: str, at_s: float, back_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(CALM, **OTHERS[name])
    outcome = with_trouble(options, Trouble(who="dedicated", at_s=at_s, back_s=back_s), monkeypatch)
    claims = [row[0] for row in outcome.lines if row[1:3] == ("dedicated-3", "turn.claim")]
    away_s = min(claims, default=1e6) - at_s

    found_s = predicted_s(outcome, options, Trouble(who="dedicated", at_s=at_s, back_s=away_s))

    assert found_s == pytest.approx(span_s(outcome), rel=0.05)


FINE = {"group_count": 24, "turns": 6, "tokens": 12}  # so many short turns that no single one decides
FINE_LENT = {**FINE, "slot_count": 8, "dedicated_count": 1, "serving_count": 1}
TROUBLES = {
    "an agent, and no other comes": (FINE, "agent", 1e6),
    "an agent": ({**FINE, "pace_s": 0.9}, "agent", 6.0),
    "one of two agents that have all slots": ({**FINE, "slot_count": 16, "pace_s": 0.6}, "agent", 1e6),
    "the controllers, for a moment": (FINE_LENT, "controller", 1.0),
    "the controllers": (FINE_LENT, "controller", 6.0),
    "the broker": (FINE, "broker", 5.0),
    "the broker, while tools take long": ({**FINE, "pace_s": 0.9}, "broker", 15.0),
    "the broker, and leases run out": (FINE_LENT, "broker", 5.0),
}


@pytest.mark.parametrize("at_s", cases([4.0, 6.3], 1))
@pytest.mark.parametrize("name", cases(TROUBLES, 3))
def test_a_run_in_which_somebody_else_dies_takes_as_long_as_the_simulated_one(
    name: str, at_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, who, back_s = TROUBLES[name]
    options, trouble = replace(CALM, **changed), Trouble(who=who, at_s=at_s, back_s=back_s)
    outcome = with_trouble(options, trouble, monkeypatch)

    assert predicted_s(outcome, options, trouble) == pytest.approx(span_s(outcome), rel=0.05)
