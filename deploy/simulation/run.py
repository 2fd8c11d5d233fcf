"""One arm on one seed of a scenario at one load: build, run, check, sum up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ...fabric.contract.errors import ConfigError, FabricError
from ...fabric.contract.text import counted
from ...fabric.rules.serving.facts import Slo
from ..replay.records import Arrival
from ..replay.scale import at_rate
from ..replay.traces import Part, Trace, read_trace
from .arms import ARMS, Arm
from .cluster import LENT_CHUNK, OWN_CHUNK, Cluster, Setup
from .failing import Failures
from .lending import Lender, Planned
from .machine.books import Broken
from .machine.bound import rollout_bound_s, spare
from .machine.capacity import Instance
from .machine.cost import Model, StepCost, cheapest, kv_room_tokens, model_of
from .machine.serving import Served, served
from .machine.tails import TailBatches
from .machine.workload import KINDS, StepPlan, draw_step
from .scenario import LOAD_MAX, Scenario
from .several import Shared, Sharing
from .timeline import Timeline
from .training import StepTimes, Trainer

LOAD_S_MAX = 3400.0  # of a trace; it is repeated
TRIED_COUNT, TRIED_S_MIN = 50_000, 600.0  # of it, to find what an instance can serve
ATTAINED_MIN = 0.99  # the bound is on what keeps the SLO: an arm that breaks it may have more
SEEDS_APART = 1_000_003  # of what runs of one cluster draw
TELL_S = 60.0  # simulated, between two words of how far it is
TOLERANCE = 0.02  # above a bound: steps scatter


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of it. steps: without the first of an arm that runs ahead, which only fills.

    span_s: simulated seconds. bounds_s: the least that each step's rollouts could take; cpu_s: what simulating took.
    shared: what each of the runs had. lost: of the wasted tokens, those that died with their worker.
    harvest: of the time of the GPUs that serve, in which rollouts computed; spare: in which they could have, at most.
    """

    arm: str
    seed: int
    load: float
    steps: tuple[StepTimes, ...]
    served: Served | None
    span_s: float
    harvest: float
    spare: float
    tokens: int
    harvested: int
    wasted: int
    lost: int
    deaths: int
    shared: tuple[Shared, ...]
    prefilled: int
    refilled: int
    moved: int
    turns: int
    bounds_s: tuple[float, ...]
    events: int
    cpu_s: float

    @property
    def step_s(self) -> float:
        """The mean step."""
        return _mean_step_s(self.steps)

    @property
    def rollout_s(self) -> float:
        """The mean rollouts of a step."""
        return sum(each.rollout_s for each in self.steps) / sum(each.part for each in self.steps)


def load_of(scenario: Scenario, load: float, seed: int) -> tuple[list[Arrival], float]:
    """Return the serving load of all instances together, and how long it lasts before it repeats.

    Raises:
        ConfigError, InputError: the trace cannot be had.
    """
    part = load * scenario.instances[1]
    if not part:
        return [], 1.0
    played, span_s = _played(scenario.serving.trace)
    return at_rate(played, part * capacity_of(scenario), span_s=span_s, seed=seed), span_s


def trace_of(scenario: Scenario) -> tuple[list[Arrival], float]:
    """Return all requests of the trace, at the rate at which they were recorded, and how long it lasts.

    Raises:
        ConfigError, InputError: it cannot be had.
    """
    arrivals = _trace(scenario.serving.trace).arrivals
    return arrivals, max(1.0, arrivals[-1].at_s)


def told_trace(scenario: Scenario) -> str:
    """Say how the trace was read: a rate that is not its own shows a unit that was not meant. "": nothing serves.

    Raises:
        ConfigError, InputError: it cannot be had.
    """
    name = scenario.serving.trace
    if not scenario.instances[1]:
        return ""
    arrivals, span_s = trace_of(scenario)
    size = f"{counted(len(arrivals), 'request')} in {span_s:,.0f} s, {len(arrivals) / span_s:.3g} a second"
    return f"{name}, {_trace(name).origin}: {size}"


@lru_cache(maxsize=2)
def _trace(name: str) -> Trace:
    return read_trace(name, Part())


@lru_cache(maxsize=2)
def _played(name: str) -> tuple[list[Arrival], float]:
    """Return the part of a trace that is played, again and again, and how long that is."""
    arrivals = _trace(name).arrivals
    span_s = max(1.0, min(arrivals[-1].at_s, LOAD_S_MAX))
    return [each for each in arrivals if each.at_s < span_s], span_s


def capacity_of(scenario: Scenario) -> float:
    """Return the requests per second that one instance can serve within the objectives: as the scenario says, or found;
    0.0: nothing serves.

    Raises:
        ConfigError, InputError: it can serve none so, or the models do not fit, or the trace cannot be had.
    """
    serving = scenario.serving
    if serving.capacity_per_s or not scenario.instances[1]:
        return serving.capacity_per_s
    (model, kv_tokens), trace = _serving(scenario), serving.trace
    found, said = _capacity(trace, model.cost, kv_tokens, serving.ttft_ms, serving.tpot_ms)
    if not found:
        raise ConfigError(
            f"{scenario.name}: 99 of 100 requests of {trace}, each alone on an instance of {serving.model}, {said}: "
            f"[serving] ttft_ms = {serving.ttft_ms:g} and tpot_ms = {serving.tpot_ms:g} cannot be kept. Raise what is "
            "too low, or give capacity_per_s, the requests a second that loads are parts of"
        )
    return found


def recorded(scenario: Scenario) -> Scenario:
    """Return a scenario whose load is the one at which its trace was recorded, if it asks for that.

    Raises:
        ConfigError, InputError: its instances cannot serve that, or the trace cannot be had.
    """
    serving, count = scenario.serving, scenario.instances[1]
    if not (serving.as_recorded and count):
        return scenario
    arrivals, span_s = trace_of(scenario)
    rate, capacity = len(arrivals) / span_s, capacity_of(scenario)
    load = rate / (capacity * count)
    if load > LOAD_MAX:
        here = f"{counted(count, 'instance')} can serve {capacity * count:.3g}"
        raise ConfigError(
            f"{scenario.name}: {serving.trace} as recorded is {rate:.3g} requests a second, and {here}: "
            f"{math.ceil(rate / capacity)} could serve it"
        )
    return replace(scenario, serving=replace(serving, loads=(float(f"{load:.3g}"),)))


@lru_cache(maxsize=8)
def _capacity(trace: str, cost: StepCost, kv_tokens: int, ttft_ms: float, tpot_ms: float) -> tuple[float, str]:
    """Find it; and what latencies requests have that are alone, where it is 0."""
    played, span_s = _played(trace)
    instance = Instance(cost=cost, kv_tokens=kv_tokens, slo=Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms))

    def load(rate: float) -> list[Arrival]:
        part_s = min(span_s, max(TRIED_S_MIN, TRIED_COUNT / rate))
        return at_rate([each for each in played if each.at_s < part_s], rate, span_s=part_s, seed=0)

    alone = instance.alone(played)
    if alone is None or instance.keeps(alone):
        return instance.capacity_per_s(load), ""
    return 0.0, f"have their first token in {alone.ttft_ms_p99:.0f} ms and each later one in {alone.tpot_ms_p99:.0f} ms"


def _serving(scenario: Scenario) -> tuple[Model, int]:
    """Return the model of a serving instance, and the tokens that its KV cache has room for."""
    model = _model(scenario, scenario.serving.model)
    return model, int(_both_gb(scenario, model) * scenario.serving.kv_share * 1e9 / model.kv_bytes)


def _both_gb(scenario: Scenario, serving: Model) -> float:
    """Compute what the KV caches of serving and rollouts have together, on one instance with both models."""
    cluster = scenario.cluster
    rollout = _model(scenario, cluster.model)
    tokens = kv_room_tokens(rollout, cluster.memory_gb, cluster.gpus_per_instance, serving.weight_gb)
    return tokens * rollout.kv_bytes / 1e9


def _model(scenario: Scenario, name: str, gpu: str = "") -> Model:
    cluster = scenario.cluster
    error = scenario.simulation.cost_error
    return model_of(name, gpu or cluster.gpu, cluster.gpus_per_instance, error, cluster.step_times)


def setup_of(scenario: Scenario, arm: Arm, load: float, seed: int) -> Setup:
    """Make the setup of an arm.

    Raises:
        ConfigError, InputError: the models are not known, or do not fit, or the trace cannot be had.
    """
    cluster, serving = scenario.cluster, scenario.serving
    gpus = cluster.gpus_per_instance
    rollout, (other, kv_serving) = _model(scenario, cluster.model), _serving(scenario)
    own, lendable = scenario.instances
    handed = scenario.static_count(load) if arm.is_static else 0
    kv_dedicated = kv_room_tokens(rollout, cluster.memory_gb, gpus)
    unlike = _model(scenario, cluster.model, cluster.other_gpu) if cluster.other else None
    kv_lent = int(_both_gb(scenario, other) * (1 - serving.kv_share) * 1e9 / rollout.kv_bytes)
    arrivals, load_s = load_of(scenario, 0.0 if arm.is_elsewhere else load, seed)
    offered = (serving.offered if serving.offered >= 0 else None) if arm.lends else 0
    return Setup(
        rollout=rollout,
        serving=other,
        dedicated=own + handed,
        lendable=lendable - handed,
        slot_count=cluster.slots,
        kv_dedicated=kv_dedicated,
        kv_lent=kv_dedicated if arm.is_whole else kv_lent,
        kv_serving=kv_serving,
        turn_tokens_max=KINDS[scenario.work.kind].turn_tokens_max,
        load=arrivals,
        load_s=load_s,
        ttft_ms=serving.ttft_ms,
        tpot_ms=serving.tpot_ms,
        activation_s=scenario.trainer.activation_s,
        fetch_s=scenario.trainer.transfer_s,
        noise=scenario.simulation.noise,
        seed=seed,
        places=arm.places,
        router=arm.router,
        lent_chunk=OWN_CHUNK if arm.is_whole else LENT_CHUNK,
        offered=offered,
        lent_places=arm.lent_places,
        keeps_tokens=arm.keeps_tokens,
        policy=arm.policy,
        serving_chunk=arm.serving_chunk,
        agents=scenario.failures.agents,
        other=unlike,
        other_count=cluster.other // gpus,
        kv_other=kv_room_tokens(unlike, cluster.memory_gb, gpus) if unlike else 0,
        suits=arm.suits,
    )


def simulate(
    scenario: Scenario,
    arm_name: str,
    *,
    load: float,
    seed: int,
    timeline: Timeline | None = None,
    tell: Callable[[str], None] | None = None,
) -> Run:
    """Simulate a scenario's steps. timeline: is told what happens when; tell: how far it is, each simulated minute.

    Raises:
        ConfigError, InputError: it cannot be simulated.
        FabricError: it did not end within the scenario's hours.
        Broken: an invariant does not hold: there are no figures then.
    """
    began = time.process_time()
    arm, weights = ARMS[arm_name], scenario.runs.weights
    setup = setup_of(scenario, arm, load, seed)
    cluster = Cluster(setup, weight=weights[0])
    for weight in weights[1:]:
        Cluster(setup, weight=weight, host=cluster)
    lender, sharing = arm.lender() if arm.lends or len(weights) == 1 else Planned(), Sharing()
    trainers = [_trainer(scenario, arm, each, lender) for each in cluster.beside]
    for trainer in trainers:
        trainer.start()
    lender.start(cluster)
    Failures(cluster, lender, scenario.failures).start()
    if len(trainers) > 1:
        sharing.watch(cluster)
    if timeline is not None:
        timeline.watch(cluster)
    if tell is not None:
        _keep_telling(trainers, f"{arm_name}, load {load:g}, seed {seed}", tell)
    limit_s, first = scenario.simulation.hours_max * 3600, trainers[0]
    cluster.events.run(lambda: first.is_over and all(each.is_over for each in trainers), limit_s)
    cluster.check()
    for trainer in trainers:
        _require_over(trainer, scenario, arm_name)
    cpu_s = time.process_time() - began
    spare_gpus = _spare_gpus(scenario, load, seed, cluster.setup.lendable)
    run = _summed(cluster, (arm_name, load), trainers, sharing, spare_gpus, cpu_s)
    if timeline is not None:
        timeline.end(cluster)
    check_bounds(run, arm)
    return run


def _trainer(scenario: Scenario, arm: Arm, cluster: Cluster, lender: Lender) -> Trainer:
    work, seed = scenario.work, cluster.setup.seed + SEEDS_APART * cluster.index

    def draw(step: int) -> StepPlan:
        size = {"groups": work.groups, "group_size": work.group_size}
        return draw_step(work.kind, seed=seed, step=step, **size, oversample=work.oversample)

    return Trainer(
        cluster=cluster,
        draw=draw,
        step_count=work.steps + arm.is_ahead,
        train_s=scenario.trainer.train_s,
        transfer_s=scenario.trainer.transfer_s,
        is_ahead=arm.is_ahead,
        on_rollouts=lender.rollouts,
        tails=TailBatches(draw, group_count=work.groups, group_size=work.group_size) if arm.puts_tails_off else None,
    )


def _keep_telling(trainers: Sequence[Trainer], what: str, tell: Callable[[str], None]) -> None:
    """Tell which step the slowest trainer is in, now and each TELL_S."""
    events, slowest = trainers[0].cluster.events, min(trainers, key=lambda each: len(each.steps))
    step = min(len(slowest.steps) + 1, slowest.step_count)
    tell(f"{what}: step {step} of {slowest.step_count}, {events.now_s / 60:.0f} simulated minutes")
    events.after(TELL_S, _keep_telling, trainers, what, tell)


def _require_over(trainer: Trainer, scenario: Scenario, arm: str) -> None:
    if trainer.is_over:
        return
    hours, fewer = scenario.simulation.hours_max, " fewer [failures]," if scenario.failures.mortals else ""
    raise FabricError(
        f"arm {arm} did {len(trainer.steps)} of {scenario.work.steps} steps in {hours:g} simulated "
        f"hours: give it fewer trajectories, more GPUs,{fewer} or a higher [simulation] hours_max"
    )


def check_bounds(run: Run, arm: Arm) -> None:
    """Refuse what cannot be: latencies below 0, and more than the oracle's harvest or speed with the SLO kept.

    Raises:
        Broken: it is so.
    """
    if run.served is not None and min(run.served.ttft_ms_p50, run.served.tpot_ms_p50) < 0:
        raise Broken(f"{run.arm}: latencies below 0")
    if run.served is not None and run.served.attained < ATTAINED_MIN:
        return
    if run.harvest > run.spare + TOLERANCE and not arm.is_elsewhere:
        raise Broken(
            f"{run.arm} harvests {run.harvest:.3f} of the GPUs that serve, and {run.spare:.3f} is all there is"
        )
    for step, bound_s in zip(run.steps, run.bounds_s, strict=True):
        if arm.has_bound and step.rollout_s < bound_s * (1 - TOLERANCE):
            raise Broken(f"{run.arm} rolls out in {step.rollout_s:.1f} s, less than the bound of {bound_s:.1f} s")


def _summed(
    cluster: Cluster,
    run: tuple[str, float],
    trainers: Sequence[Trainer],
    sharing: Sharing,
    spare_gpus: Sequence[float],
    cpu_s: float,
) -> Run:
    setup, books = cluster.setup, cluster.books
    steps = [step for each in trainers for step in each.done[0]]
    plans = [plan for each in trainers for plan in each.done[1]]
    requests = cluster.requests()
    now_s = cluster.events.now_s
    harvested_s = sum(engine.rollout_s for engine in cluster.lendable)
    cluster.drain()
    cluster.check()
    lent_s = len(cluster.lendable) * now_s
    seconds = range(math.ceil(now_s))
    spare_s = sum(spare_gpus[second % len(spare_gpus)] for second in seconds)
    return Run(
        arm=run[0],
        seed=setup.seed,
        load=run[1],
        steps=tuple(steps),
        served=served(requests, Slo(ttft_ms=setup.ttft_ms, tpot_ms=setup.tpot_ms), cluster.events.now_s),
        span_s=now_s,
        harvest=harvested_s / lent_s if lent_s else 0.0,
        spare=spare_s / len(seconds) / setup.lendable if setup.lendable else 0.0,
        tokens=books.kept,
        harvested=books.harvested,
        wasted=books.wasted,
        lost=books.lost,
        deaths=books.death_count,
        prefilled=books.prefilled,
        refilled=books.refilled,
        moved=books.moved_count,
        turns=books.turn_count,
        shared=tuple(sharing.of(each.cluster, _mean_step_s(each.done[0])) for each in trainers),
        bounds_s=tuple(_bounds(setup, plans, steps, spare_gpus)),
        events=cluster.events.count,
        cpu_s=cpu_s,
    )


@lru_cache(maxsize=8)
def _spare_gpus(scenario: Scenario, load: float, seed: int, lendable: int) -> list[float]:
    """Compute what rollouts could have of all lendable instances together, by second of the load."""
    arrivals, load_s = load_of(scenario, load, seed)
    if not (arrivals and lendable):
        return [float(lendable)]
    serving = scenario.serving
    cost = _model(scenario, serving.model).cost
    rows = [spare(arrivals[index::lendable], load_s, cost, serving.tpot_ms / 1000) for index in range(lendable)]
    return [sum(column) for column in zip(*rows, strict=True)]


def _bounds(
    setup: Setup, plans: Sequence[StepPlan], steps: Sequence[StepTimes], spare_gpus: Sequence[float]
) -> list[float]:
    """Bound the rollouts of each step that was done, on all GPUs of the arm."""
    found, cost = [], cheapest([setup.rollout, setup.other] if setup.other else [setup.rollout])
    for plan, step in zip(plans, steps, strict=True):
        first = int(step.began_s) % len(spare_gpus)
        gpus = [*spare_gpus[first:], *spare_gpus[:first]]
        found.append(rollout_bound_s(plan, cost, slot_count=setup.slot_count, own=setup.dedicated, spare_gpus=gpus))
    return found


def _mean_step_s(steps: Sequence[StepTimes]) -> float:
    return sum(each.step_s for each in steps) / sum(each.part for each in steps)
