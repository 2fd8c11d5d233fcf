"""Workers that die: what they held goes on as in production, nothing is counted twice or lost, and bugs are found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.deploy.simulation.arms import ARMS
from rollfab.deploy.simulation.cluster import CLAIM_S, FORGET_S, REAP_S, ROUND_S, SAVE_S, Cluster
from rollfab.deploy.simulation.failing import Failures
from rollfab.deploy.simulation.lending import Planned
from rollfab.deploy.simulation.machine.agents import RENEW_S
from rollfab.deploy.simulation.machine.books import Books, Broken
from rollfab.deploy.simulation.machine.turns import Trajectory, Turn
from rollfab.deploy.simulation.machine.workload import StepPlan, TrajectoryPlan, TurnPlan, draw_step
from rollfab.deploy.simulation.run import setup_of
from rollfab.deploy.simulation.scenario import FailuresPart, Scenario
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.queue.turns import CLAIM_MS
from rollfab.workers.rollout.config import RolloutConfig
from tests.support.simulated import SMALL, arms, outcome, run
from tests.support.tried import tried

PAIRS = replace(
    SMALL,
    cluster=replace(SMALL.cluster, dedicated=2, serving=2),
    work=replace(SMALL.work, groups=3),
)
OFTEN = replace(PAIRS, failures=FailuresPart(hours_between=0.01, back_s=10.0))
EVERYBODY = replace(
    PAIRS,
    failures=FailuresPart(
        hours_between=0.02,
        agent_hours_between=0.01,
        controller_hours_between=0.01,
        broker_hours_between=0.01,
        back_s=4.0,
        agents=2,
    ),
)
TOKENS = 600

once = cache(run)


class Watched:
    """A cluster with one trajectory of one long turn under way on a dedicated worker, which saves as it should."""

    def __init__(self, arm: str = "fixed", scenario: Scenario = PAIRS) -> None:
        self.cluster = Cluster(setup_of(scenario, ARMS[arm], 0.0, 0))
        self.ended: list[float] = []
        plan = StepPlan(groups=[(TrajectoryPlan(400, (TurnPlan(TOKENS, 0, 0.0),)),)], needed=1, kept=frozenset({0}))
        self.cluster.submit(plan, lambda _: self.ended.append(self.cluster.events.now_s))
        self._save()
        self.until(3.1)
        self.victim = next(each for each in self.cluster.engines if each.turn_count)
        self.turn = self.victim.turns()[0]

    def _save(self) -> None:
        self.cluster.save()
        self.cluster.events.after(ROUND_S, self._save)

    def until(self, time_s: float) -> None:
        self.cluster.events.run(lambda: False, time_s)
        self.cluster.check()

    def until_elsewhere(self) -> float:
        """Run until the turn is at a worker again; returns when that was."""
        self.cluster.events.run(lambda: self.turn.engine not in ("", self.victim.name), 1e3)
        return self.cluster.events.now_s


# ---------------------------------------------------------------- what production does


def test_a_turn_goes_on_elsewhere_from_the_tokens_saved_once_its_claim_has_ended() -> None:
    world = Watched()
    cluster, turn, made = world.cluster, world.turn, dict(world.victim.progress())[world.turn]
    renewed_s = turn.renewed_at_s
    assert 3.1 - renewed_s <= SAVE_S + ROUND_S
    assert (CLAIM_MS / 1000, RolloutConfig.log_s) == (CLAIM_S, SAVE_S)

    cluster.kill(world.victim)
    again_s = world.until_elsewhere()

    assert CLAIM_S <= again_s - renewed_s <= CLAIM_S + REAP_S
    assert turn.engine != world.victim.name
    assert 0 < turn.made == turn.saved <= made
    assert cluster.books.lost == cluster.books.wasted
    assert made - turn.made <= cluster.books.lost <= made - turn.made + 1  # the step under way is done first
    cluster.events.run(lambda: bool(world.ended), 1e3)
    assert (cluster.books.kept, cluster.books.completed) == (TOKENS, 1)
    cluster.check()


def test_a_turn_that_never_was_renewed_begins_with_nothing_and_is_of_the_weights_it_goes_on_with() -> None:
    world = Watched()
    world.turn.saved, world.turn.renewed_at_s = 0, 3.0
    world.cluster.kill(world.victim)
    world.cluster.events.run(lambda: not world.victim.turn_count, 1e3)
    world.cluster.publish()
    world.until_elsewhere()
    assert (world.turn.made, world.turn.version) == (0, 1)


def test_where_turns_begin_anew_all_that_a_dead_worker_made_is_wasted() -> None:
    world = Watched("rose")
    made = dict(world.victim.progress())[world.turn]
    world.cluster.kill(world.victim)
    world.until_elsewhere()
    assert world.turn.made == 0
    assert world.cluster.books.lost >= made


def test_a_worker_that_is_back_has_neither_weights_nor_prefixes_and_takes_nothing_until_it_is_ready() -> None:
    world = Watched()
    victim, cluster = world.victim, world.cluster
    cluster.kill(victim)
    world.until(8.0)
    cluster.forget(victim)
    assert not victim.is_leased
    assert (victim.turn_count, victim.cached(1)) == (0, 0)

    cluster.revive(victim)
    assert (victim.is_leased, victim.is_ready, victim.version) == (True, False, -1)
    cluster.events.run(lambda: victim.is_ready, 1e3)
    assert cluster.events.now_s == pytest.approx(8.0 + cluster.setup.activation_s + cluster.setup.fetch_s)
    assert victim.version == cluster.head_version


def test_the_controller_counts_a_dead_worker_until_it_was_silent_for_long_and_then_lends_it_no_more() -> None:
    plan = Planned()
    cluster = Cluster(setup_of(PAIRS, ARMS["ours"], 0.25, 0))
    plan.start(cluster)
    Failures(cluster, plan, FailuresPart()).start()  # none by itself
    lent = cluster.lendable[0]
    cluster.events.run(lambda: False, 1.0)
    cluster.kill(lent)

    def told() -> Any:
        return plan._survey(cluster, cluster.events.now_s).workers.get(lent.name)

    before = told()
    cluster.events.run(lambda: False, FORGET_S)
    assert told() == before != None  # noqa: E711 - the same heartbeat, and there is one
    cluster.forget(lent)
    assert told() is None
    cluster.lease(lent)
    assert not lent.is_leased

    guard = lent.guard
    cluster.revive(lent)
    plan.came_back(lent)
    assert told()[0].wake_ms is None  # nobody knows how long it takes to wake
    assert lent.guard is not guard


class Played:
    """A cluster of two agents with one trajectory of three short turns, and when each of these was begun."""

    TOOL_S = 2.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = Cluster(replace(setup_of(PAIRS, ARMS["fixed"], 0.0, 0), agents=2))
        self.begun: list[tuple[int, int, float]] = []  # trajectory, turn, when
        self.ended: list[float] = []
        begin = Cluster._begin

        def noted(cluster: Cluster, turn: Turn, engine: Any) -> None:
            self.begun.append((*turn.key, cluster.events.now_s))
            begin(cluster, turn, engine)

        monkeypatch.setattr(Cluster, "_begin", noted)
        turns = (TurnPlan(20, 4, self.TOOL_S),) * 3
        plan = StepPlan(groups=[(TrajectoryPlan(400, turns),)], needed=1, kept=frozenset({0}))
        self.cluster.submit(plan, lambda _: self.ended.append(self.cluster.events.now_s))
        (self.trajectory,) = self.cluster.batches[0].open.values()

    def until(self, time_s: float) -> None:
        self.cluster.events.at(time_s, lambda: None)  # so that it is then
        self.cluster.events.run(lambda: False, time_s)
        self.cluster.check()


# In the first case its tool is under way as the agent dies, in the second its second turn, which ends meanwhile
@pytest.mark.parametrize(("dies_at_s", "played", "next_turn"), [(1.0, 1, 1), (2.2, 2, 2)])
def test_what_a_dead_agent_had_is_played_again_by_another_and_no_turn_is_made_again(
    dies_at_s: float, played: int, next_turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Played(monkeypatch)
    world.until(dies_at_s)
    holder = world.trajectory.agent
    assert holder is not None
    world.cluster.kill_agent(holder)
    world.until(100.0)
    assert len(world.ended) == 1
    assert [index for _, index, _ in world.begun] == [0, 1, 2]
    claim_ended_s = dies_at_s // RENEW_S * RENEW_S + CLAIM_S
    assert world.begun[next_turn][2] == pytest.approx(claim_ended_s + played * Played.TOOL_S)


def test_while_no_agent_is_there_nobody_takes_back_what_others_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Played(monkeypatch)
    world.until(3.0)
    for agent in range(2):
        world.cluster.kill_agent(agent)
    world.until(50.0)
    assert not world.ended
    assert world.cluster.counts() == (0, 1)  # its claim is nobody's, and has not ended
    world.cluster.agents.revive(1)
    world.until(80.0)
    assert len(world.ended) == 1


def test_nothing_gets_through_while_the_broker_is_away_and_all_of_it_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = Played(monkeypatch)
    calm.until(100.0)

    world = Played(monkeypatch)
    world.until(3.0)
    world.cluster.broker.go()
    begun = list(world.begun)
    world.until(23.0)
    assert world.begun == begun
    world.cluster.reconnect()
    world.until(100.0)
    assert [index for _, index, _ in world.begun] == [0, 1, 2]
    assert calm.ended[0] < world.ended[0] <= calm.ended[0] + 20.0


@pytest.mark.parametrize("who", ["controller", "broker"])
def test_leases_on_serving_workers_run_out_when_nobody_renews_them_and_come_back(who: str) -> None:
    plan = Planned()
    cluster = Cluster(setup_of(PAIRS, ARMS["ours"], 0.25, 0))
    plan.start(cluster)
    work = draw_step("frozenlake", seed=0, step=0, groups=16, group_size=8)
    cluster.submit(work, lambda _: None)
    failures = Failures(cluster, plan, FailuresPart())
    lent = cluster.lendable[0]
    cluster.events.run(lambda: lent.is_leased, 1e3)
    assert lent.is_leased
    # When it is away for less than a lease lasts, then longer
    (die, come_back) = {
        "controller": (failures._lose_controller, failures._lead),
        "broker": (failures._lose_broker, failures._reconnect),
    }[who]
    for away_s, is_kept in ((1.5, True), (3.0, False)):
        die()
        cluster.events.run(lambda: False, cluster.events.now_s + away_s)
        assert lent.is_leased is is_kept
        come_back()
        cluster.events.run(lambda: lent.is_leased, cluster.events.now_s + 60.0)
        assert lent.is_leased
    cluster.check()


def test_a_seed_kills_the_same_workers_in_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: dict[str, list[tuple[float, str]]] = {}
    kill = Cluster.kill
    for arm in ("fixed", "ours"):
        times = killed[arm] = []

        def noted(self: Cluster, engine: Any, times: list[tuple[float, str]] = times) -> None:
            times.append((self.events.now_s, engine.name))
            kill(self, engine)

        monkeypatch.setattr(Cluster, "kill", noted)
        run(arm, OFTEN)
    both = min(map(len, killed.values()))
    assert both >= 5
    assert killed["fixed"][:both] == killed["ours"][:both]


# ---------------------------------------------------------------- nothing is lost


def work(scenario: Scenario, seed: int = 0) -> tuple[int, int]:
    """Tokens and turns of a scenario's one step."""
    given = scenario.work
    plan = draw_step(given.kind, seed=seed, step=0, groups=given.groups, group_size=given.group_size)
    trajectories = [each for group in plan.groups for each in group]
    return sum(each.output_tokens for each in trajectories), sum(len(each.turns) for each in trajectories)


@pytest.mark.parametrize("scenario", [OFTEN, EVERYBODY], ids=["workers, often", "anybody"])
@pytest.mark.parametrize("arm", arms(ARMS))
def test_every_arm_does_all_its_work_whoever_dies(arm: str, scenario: Scenario) -> None:
    found = once(arm, scenario)
    assert found.deaths >= (5 if scenario is OFTEN else 10)
    assert found.lost > 0 or scenario is EVERYBODY
    if not (ARMS[arm].is_ahead or ARMS[arm].puts_tails_off):  # which have steps under way as it ends, and more groups
        assert (found.tokens, found.turns) == work(scenario)


@settings(max_examples=tried(20), deadline=None)
@given(
    arm=st.sampled_from(["fixed", "static", "rose", "ours", "ours-advised", "no-move"]),
    hours=st.tuples(*[st.sampled_from([0.0, 0.01, 0.03])] * 4),
    back_s=st.sampled_from([0.0, 1.0, 2.5, 6.0, 20.0]),
    agents=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_the_books_are_right_whoever_dies(
    arm: str, hours: tuple[float, ...], back_s: float, agents: int, seed: int
) -> None:
    worker, agent, controller, broker = hours
    part = FailuresPart(
        hours_between=worker,
        agent_hours_between=agent,
        controller_hours_between=controller,
        broker_hours_between=broker,
        back_s=back_s,
        agents=agents,
    )
    found = run(arm, replace(PAIRS, failures=part), seed=seed)  # which checks tokens, trajectories and time
    assert (found.tokens, found.turns) == work(PAIRS, seed)


@settings(max_examples=tried(20), deadline=None)
@given(
    arm=st.sampled_from(["fixed", "static", "share-all", "idle-only", "rose", "ours", "ours-advised", "no-move"]),
    hours=st.floats(0.01, 0.1),
    back_s=st.sampled_from([0.0, 1.0, 4.9, 5.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_the_books_are_right_whenever_and_wherever_workers_die(
    arm: str, hours: float, back_s: float, seed: int
) -> None:
    often = replace(OFTEN, failures=FailuresPart(hours_between=hours, back_s=back_s))
    found = run(arm, often, seed=seed)  # which checks tokens, trajectories and time
    assert 0 <= found.lost <= found.wasted
    assert (found.tokens, found.turns) == work(often, seed)


def test_where_none_dies_all_is_as_without_the_table() -> None:
    never = replace(PAIRS, failures=FailuresPart(hours_between=0.0, back_s=1.0))
    assert outcome(run("ours", never)) == outcome(once("ours", PAIRS))
    assert once("ours", PAIRS).deaths == 0


def test_a_seed_decides_who_dies_and_what_comes_of_it() -> None:
    assert outcome(run("ours", OFTEN)) == outcome(once("ours", OFTEN))
    assert outcome(once("ours", OFTEN)) != outcome(run("ours", OFTEN, seed=1))


def test_workers_that_never_live_long_enough_to_get_ready_are_told_of() -> None:
    hopeless = replace(
        OFTEN,
        failures=FailuresPart(hours_between=0.01, back_s=3000.0),
        simulation=replace(OFTEN.simulation, hours_max=0.5),
    )
    with pytest.raises(FabricError, match=r"fewer \[failures\]"):
        run("fixed", hopeless)


# ---------------------------------------------------------------- bugs are found


def forgotten(self: Books, turn: Turn, tokens: int) -> None:
    turn.made -= tokens


def kept_twice(self: Cluster, turn: Turn) -> None:
    self._hand_over(turn)  # with tokens that nobody saved
    turn.made = turn.saved


def run_twice(self: Cluster, turn: Turn, silent_s: float) -> None:
    self._lost.remove(turn)
    self._hand_over(turn)
    self.place()
    self._hand_over(turn)  # a claim that ends twice
    self.place()


def asked_again(self: Cluster, trajectory: Trajectory, fence: int, known: int) -> None:
    if not trajectory.is_over and trajectory.fence == fence and known < len(trajectory.plan.turns):
        trajectory.is_followed = True
        self._ask(trajectory)  # though its turn is under way
    elif not trajectory.is_over and trajectory.fence == fence:
        self._complete(trajectory)


PLANTS: dict[str, tuple[Any, str, Any, str]] = {
    "lost tokens are not counted": (Books, "loses", forgotten, "tokens made"),
    "tokens that died are handed over": (Cluster, "_lose", kept_twice, "tokens made"),
    "a claim ends twice": (Cluster, "_reap", run_twice, "at once|twice|tokens made|of"),
    "a turn under way is asked for again": (Cluster, "_go_on", asked_again, "at once"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_bug_in_what_becomes_of_the_dead_gives_no_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, planted, told = PLANTS[name]
    monkeypatch.setattr(owner, method, planted)
    with pytest.raises(Broken, match=told):
        run("fixed", EVERYBODY if method == "_go_on" else OFTEN)


def test_turns_that_nobody_takes_back_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_reap", lambda self, turn, silent_s: None)
    brief = replace(OFTEN, simulation=replace(OFTEN.simulation, hours_max=0.5))
    with pytest.raises(FabricError, match="did 0 of 1 steps"):
        run("fixed", brief)


def test_time_that_a_dead_worker_computed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    revive = Cluster.revive

    def busy(self: Cluster, engine: Any) -> None:
        engine.rollout_s += 1.0
        revive(self, engine)

    monkeypatch.setattr(Cluster, "revive", busy)
    with pytest.raises(Broken, match="accounts for"):
        run("fixed", OFTEN)
