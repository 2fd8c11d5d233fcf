"""A scenario: a TOML file, read strictly. A key that is not known is refused with the nearest one that is.

Shipped scenarios are named without a path: `s0` to `s12` (docs/simulation.md tells what each is for).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.text import did_you_mean, one_line, told
from ...fabric.host.files import parse_toml, read_regular
from .arms import ARMS
from .machine.workload import KINDS

SAMPLES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "s12")
BYTES_MAX = 1 << 16
STATIC_LOAD_MAX = 0.7
LOAD_MAX = 1.5
WEIGHT_MIN, WEIGHT_MAX, RUN_COUNT_MAX = 0.01, 100.0, 16


@dataclass(frozen=True, kw_only=True)
class ClusterPart:
    """[cluster]: GPUs and the model that is trained. dedicated, serving: GPUs; slots: turns of one instance.

    step_times: a file of them (data/README.md); "": what is shipped. other: of the dedicated GPUs, those that are
    other_gpu instead.
    """

    model: str = "Qwen3-8B"
    gpu: str = "h100"
    gpus_per_instance: int = 1
    dedicated: int = 16
    serving: int = 16
    slots: int = 16
    memory_gb: float = 80.0
    step_times: str = ""
    other_gpu: str = ""
    other: int = 0


@dataclass(frozen=True, kw_only=True)
class ServingPart:
    """[serving]: what the lendable GPUs serve. loads: of capacity_per_s, which one instance can serve within the SLO;
    0: as much of this trace as is found, by simulating one that lends nothing. as_recorded: the load is the trace's own
    mean rate, for all instances together.

    kv_share: of the KV cache that two engines have room for together, serving's part. static: instances that the arm of
    this name hands over; -1: as many as leaves the others at 0.7 of their capacity, at most. offered: instances that
    may be lent; -1: all.
    """

    model: str = "Qwen2.5-7B"
    trace: str = "azure-conv"
    loads: tuple[float, ...] = (0.25,)
    as_recorded: bool = False
    capacity_per_s: float = 0.0
    ttft_ms: float = 500.0
    tpot_ms: float = 150.0
    kv_share: float = 0.6
    static: int = -1
    offered: int = -1


@dataclass(frozen=True, kw_only=True)
class WorkPart:
    """[work]: what a training step waits for. oversample: above 1, U(1, oversample) times the groups (DAPO)."""

    kind: str = "frozenlake"
    groups: int = 16
    group_size: int = 16
    steps: int = 4
    oversample: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainerPart:
    """[trainer]: seconds of a training step; of moving weights; of waking a lent engine."""

    train_s: float = 40.0
    transfer_s: float = 2.0
    activation_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class RunsPart:
    """[runs]: runs that share the cluster, by their weights. Each does [work] of its own and trains by itself."""

    weights: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, kw_only=True)
class FailuresPart:
    """[failures]: who dies. hours_between: of a rollout worker's deaths, on average; 0: none dies; the others: of an
    agent's, the controller's and the broker's. back_s: until it has started again; a worker then wakes and fetches
    weights like any (activation_s, transfer_s). agents: that trajectories are divided among.
    """

    hours_between: float = 0.0
    agent_hours_between: float = 0.0
    controller_hours_between: float = 0.0
    broker_hours_between: float = 0.0
    back_s: float = 60.0
    agents: int = 4

    @property
    def mortals(self) -> list[str]:
        """Who dies, for people."""
        hours = {
            "workers": self.hours_between,
            "agents": self.agent_hours_between,
            "controllers": self.controller_hours_between,
            "brokers": self.broker_hours_between,
        }
        return [name for name, each in hours.items() if each]


@dataclass(frozen=True, kw_only=True)
class SimulationPart:
    """[simulation]: arms and seeds. cost_error: factor on all step times; noise: log-deviation of a step's time."""

    arms: tuple[str, ...] = ("fixed", "async", "static", "share-all", "idle-only", "rose", "ours", "ours-few")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    noise: float = 0.03
    cost_error: float = 1.0
    hours_max: float = 24.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to simulate."""

    name: str = "unnamed"
    cluster: ClusterPart = field(default_factory=ClusterPart)
    serving: ServingPart = field(default_factory=ServingPart)
    work: WorkPart = field(default_factory=WorkPart)
    trainer: TrainerPart = field(default_factory=TrainerPart)
    runs: RunsPart = field(default_factory=RunsPart)
    failures: FailuresPart = field(default_factory=FailuresPart)
    simulation: SimulationPart = field(default_factory=SimulationPart)

    @property
    def instances(self) -> tuple[int, int]:
        """Dedicated instances, and serving ones."""
        each = self.cluster.gpus_per_instance
        return self.cluster.dedicated // each, self.cluster.serving // each

    def static_count(self, load: float) -> int:
        """Count the serving instances that the static arm hands over; the others are left at 0.7 of capacity."""
        count = self.instances[1]
        if self.serving.static >= 0:
            return min(self.serving.static, count)
        return count - min(count, max(1, math.ceil(count * load / STATIC_LOAD_MAX)))


PARTS: dict[str, type[Any]] = {
    "cluster": ClusterPart,
    "serving": ServingPart,
    "work": WorkPart,
    "trainer": TrainerPart,
    "runs": RunsPart,
    "failures": FailuresPart,
    "simulation": SimulationPart,
}


def read_scenario(source: str | Path) -> Scenario:
    """Read a scenario by its name or path.

    Raises:
        ConfigError: names the file, the key, and what is wrong with it.
    """
    name, text = str(source), _text(source)
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{name} is no TOML: {error}") from error
    found: dict[str, Any] = {"name": Path(name).stem}
    for key, value in tables.items():
        if key == "name":
            found["name"] = one_line(_value(f"{name}: name", "", value))
        elif key not in PARTS:
            raise ConfigError(f"{name}: {key} is no part of a scenario: {did_you_mean(key, ['name', *PARTS])}")
        elif not isinstance(value, dict):
            raise ConfigError(f"{name}: {key} is no table: write [{key}], and its settings below")
        elif key == "failures" and value.keys() <= {"back_s", "agents"}:
            mortal = "of a worker's deaths, nor agent_, controller_ or broker_hours_between"
            raise ConfigError(f"{name}: [failures] has no hours_between, {mortal}: without it nobody dies")
        elif key == "serving" and value.get("as_recorded") is True and "loads" in value:
            raise ConfigError(f"{name}: [serving] has loads, and as_recorded, which finds the load: give one of them")
        else:
            found[key] = _part(name, key, value)
    return checked(Scenario(**found), name)


def _text(source: str | Path) -> bytes:
    name = str(source)
    try:
        if name in SAMPLES:
            return files(__package__).joinpath("data", f"{name}.toml").read_bytes()
        return read_regular(Path(source), BYTES_MAX)
    except FileNotFoundError as error:
        raise ConfigError(f"no scenario {name!r}: give a TOML file, or one of {', '.join(SAMPLES)}") from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error


def _part(name: str, key: str, table: dict[str, Any]) -> Any:
    known = {each.name: each for each in fields(PARTS[key])}
    values = {}
    for setting, value in table.items():
        if setting not in known:
            raise ConfigError(f"{name}: [{key}] has no setting {setting}: {did_you_mean(setting, known)}")
        values[setting] = _value(f"{name}: [{key}] {setting}", known[setting].default, value)
    return PARTS[key](**values)


def _value(where: str, like: Any, value: Any) -> Any:
    """Return a value of the same type as the default.

    Raises:
        ConfigError: it is of another one.
    """
    if isinstance(like, tuple):
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{where} is {told(value)}: expected a list, with something in it")
        return tuple(_value(where, like[0], each) for each in value)
    if isinstance(like, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(like) or (isinstance(value, float) and not math.isfinite(value)):
        kinds = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
        kind = kinds[type(like).__name__]
        raise ConfigError(f"{where} is {told(value)}: expected {kind}")
    return value


BOUNDS: dict[str, tuple[float, float]] = {
    "cluster.gpus_per_instance": (1, 64),
    "cluster.dedicated": (1, 4096),
    "cluster.serving": (0, 4096),
    "cluster.slots": (1, 1024),
    "cluster.other": (0, 4096),
    "cluster.memory_gb": (1, 1000),
    "serving.capacity_per_s": (0.01, 1000),
    "serving.ttft_ms": (1, 600_000),
    "serving.tpot_ms": (1, 60_000),
    "serving.kv_share": (0.05, 0.95),
    "serving.static": (-1, 4096),
    "serving.offered": (-1, 4096),
    "work.groups": (1, 10_000),
    "work.group_size": (1, 1024),
    "work.steps": (1, 1000),
    "work.oversample": (1, 16),
    "trainer.train_s": (0, 86_400),
    "trainer.transfer_s": (0, 86_400),
    "trainer.activation_s": (0, 3600),
    "failures.hours_between": (0.01, 1_000_000),
    "failures.agent_hours_between": (0.01, 1_000_000),
    "failures.controller_hours_between": (0.01, 1_000_000),
    "failures.broker_hours_between": (0.01, 1_000_000),
    "failures.agents": (1, 1000),
    "failures.back_s": (0, 86_400),
    "simulation.noise": (0, 0.5),
    "simulation.cost_error": (0.1, 10),
    "simulation.hours_max": (0.01, 1000),
}
NOTHING = {  # what 0 means where it is out of bounds
    "serving.capacity_per_s": ", or 0: it is found by simulating",
    "failures.hours_between": ", or 0: no worker dies",
    "failures.agent_hours_between": ", or 0: no agent dies",
    "failures.controller_hours_between": ", or 0: no controller dies",
    "failures.broker_hours_between": ", or 0: the broker never dies",
}


def checked(scenario: Scenario, name: str) -> Scenario:
    """Return a scenario that can be simulated.

    Raises:
        ConfigError: it cannot.
    """
    for key, (low, high) in BOUNDS.items():
        part, setting = key.split(".")
        value = getattr(getattr(scenario, part), setting)
        nothing = NOTHING.get(key, "")
        if not low <= value <= high and not (nothing and value == 0):
            raise ConfigError(f"{name}: [{part}] {setting} is {value:g}: expected {low:g} to {high:g}{nothing}")
    loads, seeds = scenario.serving.loads, scenario.simulation.seeds
    if not all(0 <= load <= LOAD_MAX for load in loads) or min(seeds) < 0:
        given = f"loads {told([*loads])}, seeds {told([*seeds])}"
        raise ConfigError(f"{name}: {given}: expected 0 to {LOAD_MAX:g}, and 0 or more")
    if scenario.work.kind not in KINDS:
        raise ConfigError(f"{name}: [work] kind {scenario.work.kind!r}: {did_you_mean(scenario.work.kind, KINDS)}")
    for key, values in (("loads", loads), ("seeds", seeds), ("arms", scenario.simulation.arms)):
        if len(set(values)) < len(values):
            raise ConfigError(f"{name}: {key} names {max(values, key=values.count)!r} twice: once is enough")
    for arm in scenario.simulation.arms:
        if arm not in ARMS:
            raise ConfigError(f"{name}: [simulation] arms has no {arm!r}: {did_you_mean(arm, ARMS)}")
    check_runs(scenario, name)
    check_cluster(scenario.cluster, name)
    return scenario


def check_cluster(cluster: ClusterPart, name: str) -> None:
    """Require whole instances, and other GPUs that have a name.

    Raises:
        ConfigError: they are not so.
    """
    each = cluster.gpus_per_instance
    if cluster.dedicated % each or cluster.serving % each:
        counts = f"{cluster.dedicated} and {cluster.serving} GPUs"
        raise ConfigError(f"{name}: [cluster] {counts}: no whole numbers of instances of {each}")
    if cluster.other > cluster.dedicated or cluster.other % each:
        wanted = f"expected at most {cluster.dedicated}, the dedicated ones, in whole instances of {each}"
        raise ConfigError(f"{name}: [cluster] other is {cluster.other}: {wanted}")
    if bool(cluster.other) != bool(cluster.other_gpu):
        raise ConfigError(f"{name}: [cluster] other and other_gpu go together: how many GPUs, and which")


def check_runs(scenario: Scenario, name: str) -> None:
    """Require runs that can share the cluster, in every arm.

    Raises:
        ConfigError: they cannot.
    """
    weights = scenario.runs.weights
    if len(weights) > RUN_COUNT_MAX or not all(WEIGHT_MIN <= each <= WEIGHT_MAX for each in weights):
        bounds = f"{WEIGHT_MIN:g} to {WEIGHT_MAX:g}, for {RUN_COUNT_MAX} runs at most"
        raise ConfigError(f"{name}: [runs] weights {', '.join(f'{each:g}' for each in weights)}: expected {bounds}")
    alone = [arm for arm in scenario.simulation.arms if arm in ARMS and not ARMS[arm].can_share]
    if len(weights) > 1 and alone:
        known = ", ".join(arm for arm in ARMS if ARMS[arm].can_share)
        raise ConfigError(f"{name}: {', '.join(alone)}: no rule for several [runs]; arms that have one: {known}")
