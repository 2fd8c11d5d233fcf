"""`rollfab bench coserve`: rollouts lent time on a serving engine's device, what they made of it, and what it cost.

- Both engines are real vLLMs. On a CPU they compute on one core, which is the device; all else is on another one
  (places.py). A dedicated worker is there, unless its slots are 0: `alone` is what a run has without borrowing.
- Arms alternate every few seconds within one call, on the same arrivals, and are compared only within a repetition
  (arms.py).
- The objectives are calibrated first, once everything is warm, on the arrivals of all repetitions: the P99 of serving
  alone in the worst of them, and a quarter more. They are promised before the first arm, and never changed after. Three
  times the P50 of serving alone is reported beside them.
- Results are those of `ours`; `baselines` has the same of every arm.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollfab.deploy.replay.figures import Report
from rollfab.fabric.contract.errors import ConfigError, EngineUnsupported
from rollfab.fabric.rules.serving.facts import Slo
from tests.bench.measure import complain, run_bench

from ..alone import alone
from .arms import SLICES_MAX, Load, Rounds, interleaved
from .bursts import bursts
from .capacity import find_capacity
from .cast import BORROWED, DEDICATED, Pair, Sizes
from .control import frozen_broker, kill_switch
from .figures import ALONE, LATENCIES, Round, arm_figures, promised, relative
from .load import LENGTHS, TRACE, burstiness, traffic
from .places import PLACES
from .policies import NAMES
from .switch import Profile, Switch
from .table import faults, print_table

HEADLINE = "ours"
ANY = Slo(ttft_ms=60_000.0, tpot_ms=60_000.0)  # of a worker that is not lent
WARM = 30_000  # never a repetition
LOAD_REQUESTS_MIN = 100  # of an arm in a repetition
HEADLINE_KEYS = (
    "violations",
    "ttft_tax_p99",
    "tpot_tax_p99",
    "harvest_of_oracle",
    "speedup_over_dedicated",
    "reclaim_ms_p99",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured. loads: fractions of the SLO capacity to go through, each for about as long; empty: at
    `rate_per_s` only."""

    rate_per_s: float = 8.0
    request_count: int = 240
    """Of each arm in each repetition."""
    round_count: int = 3
    """Repetitions."""
    slice_count: int = 4
    """Of a repetition: arms alternate slice by slice."""
    spoiled_max: int = 2
    """Repetitions that are measured again because serving alone missed its objectives in them."""
    calibration_count: int = 2
    """Passes of serving alone over the arrivals of all repetitions."""
    warm_count: int = 2
    """Repetitions of serving alone that do not count: the first minute of all these processes is slower than others."""
    arms: tuple[str, ...] = NAMES
    loads: tuple[float, ...] = ()
    switch_samples: int = 0
    burst_samples: int = 0
    is_broker_frozen: bool = False
    is_quick: bool = False
    sizes: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in NAMES]
        if unknown or not self.arms:
            raise ConfigError(f"arm {', '.join(unknown) or '(none)'} is none of {', '.join(NAMES)}", option="--arms")
        if not 1 <= self.slice_count <= min(SLICES_MAX, self.request_count):
            raise ConfigError(f"{self.request_count} requests cannot be cut into {self.slice_count} slices")
        if not all(0 < fraction <= 1 for fraction in self.loads):
            raise ConfigError("a load is a fraction of the SLO capacity, above 0 and at most 1", option="--load")


BURST_COUNT = 100  # fewer have no P99
FULL = Settings(switch_samples=20, burst_samples=BURST_COUNT, is_broker_frozen=True)
QUICK = Settings(
    request_count=100,
    round_count=1,
    slice_count=1,
    spoiled_max=0,
    calibration_count=1,
    warm_count=0,
    arms=("alone", "share-all", "ours"),
    is_quick=True,
)
CONTROL = Settings(
    arms=(HEADLINE,),
    round_count=0,
    calibration_count=1,
    warm_count=1,
    switch_samples=20,
    burst_samples=BURST_COUNT,
    is_broker_frozen=True,
)


def settings_of(
    *,
    quick: bool,
    control: bool,
    rate: float | None,
    requests: int | None,
    rounds: int | None,
    arms: str,
    loads: str,
) -> Settings:
    """What a person asked for; None and "": as it is usually.

    Raises:
        ConfigError: there is no such arm, or a load is no fraction.
    """
    said = {"rate_per_s": rate, "request_count": requests, "round_count": rounds}
    changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if arms:
        changes["arms"] = tuple(name.strip() for name in arms.split(","))
    try:
        changes["loads"] = tuple(float(word) for word in loads.split(",") if word.strip())
    except ValueError as error:
        raise ConfigError(f"loads {loads!r} are no fractions: write them as 0.1,0.5,0.95", option="--load") from error
    return replace(CONTROL if control else QUICK if quick else FULL, **changes)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that was measured. by_load: rounds by requests per second. spoiled: those measured again."""

    slo: Slo
    second: Slo
    profile: Profile
    capacity_per_s: float | None
    by_load: dict[float, list[Round]]
    spoiled: list[Round]
    control: dict[str, Any]
    made: int
    settled: int


def bench_coserve(settings: Settings, *, json_output: bool) -> int:
    """Measure and print; returns the exit code: 1 when something did not do its work, or there is no vLLM."""
    return run_bench(lambda: measure(settings, complain), print_table, json_output=json_output, faults=faults)


def measure(settings: Settings, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Measure everything that the settings name.

    Raises:
        EngineUnsupported: vLLM is not installed.
        FabricError: this machine has no pair of cores, another call measures, a process ended, or an arm did not come
            into force.
    """
    if find_spec("vllm") is None:
        raise EngineUnsupported(
            "vLLM is not installed in this environment: in a clone of rollfab type `make bench BENCH=coserve`;"
            " elsewhere see `rollfab doctor`"
        )
    switch = Switch.create(Path("/dev/shm") / f"rollfab-bench-{os.getpid()}-switch")
    try:
        with alone("coserve"), Pair(settings.sizes, switch.path) as pair:
            found = _measure(settings, pair, switch, tell)
    finally:
        switch.path.unlink(missing_ok=True)
    return report(settings, found)


def _measure(settings: Settings, pair: Pair, switch: Switch, tell: Callable[[str], None]) -> Found:
    rounds = Rounds(pair, _load(settings, settings.rate_per_s), switch)
    rounds.warm()
    rounds.borrow(ANY)
    rounds.enter(ALONE)
    for _ in range(settings.warm_count):
        rounds.calibrate(WARM)
    profile = rounds.profile()
    switch.set_profile(profile)
    repetitions = range(1, max(settings.round_count, 1) + 1)
    calibration = [rounds.calibrate(each) for _ in range(settings.calibration_count) for each in repetitions]
    slo, second = promised(calibration), relative(calibration)
    tell(f"promised: {_text(slo)}; 3 x P50: {_text(second)}")
    capacity = find_capacity(rounds, slo, settings.rate_per_s, repetitions) if settings.loads else None
    pair.give_back()
    rounds.load = _load(settings, settings.rate_per_s)
    rounds.borrow(slo)
    if settings.warm_count:
        interleaved(rounds, (ALONE, HEADLINE), 1, slo=slo)
    points = [(each * capacity, each) for each in settings.loads] if capacity else [(settings.rate_per_s, 1.0)]
    by_load: dict[float, list[Round]] = {}
    spoiled: list[Round] = []
    for rate_per_s, fraction in points:
        rounds.load = _load(settings, rate_per_s, fraction)
        by_load[rate_per_s], again = interleaved(
            rounds,
            settings.arms,
            settings.round_count,
            slo=slo,
            spoiled_max=settings.spoiled_max,
            tell=lambda each: tell(_line(each, slo)),
        )
        spoiled += again
    rounds.load = _load(settings, settings.rate_per_s)
    control = _control(settings, pair, rounds, slo)
    made, settled = _drained(pair)
    return Found(
        slo=slo,
        second=second,
        profile=profile,
        capacity_per_s=capacity,
        by_load=by_load,
        spoiled=spoiled,
        control=control,
        made=made,
        settled=settled,
    )


def _load(settings: Settings, rate_per_s: float, fraction: float = 1.0) -> Load:
    """Of a fraction of all requests, so that lighter loads take no longer; enough for a P99."""
    count = max(round(fraction * settings.request_count), min(LOAD_REQUESTS_MIN, settings.request_count))
    return Load(rate_per_s=rate_per_s, request_count=count, slice_count=settings.slice_count)


def _control(settings: Settings, pair: Pair, rounds: Rounds, slo: Slo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if settings.switch_samples:
        rounds.enter(HEADLINE)
        found["kill_switch"] = kill_switch(pair, settings.switch_samples)
    if settings.burst_samples:
        found["bursts"] = bursts(pair, rounds, settings.burst_samples)
    if settings.is_broker_frozen:
        found["frozen_broker"] = frozen_broker(pair, rounds, slo)
    return found


def _drained(pair: Pair) -> tuple[int, int]:
    """Tokens that engines made, and those of settled turns, once nothing is under way any more."""
    pair.lend("on")
    counters = pair.demand.drain()
    roles = [role for role in (DEDICATED, BORROWED) if role in pair.supervisor.children]
    return pair.final_count(roles), counters.get("tokens", 0)


def report(settings: Settings, found: Found) -> Report:
    """What was found, as figures; a curve has them for every load, and the headline is its last."""
    curve = [
        {"load": load, "rate_per_s": rate_per_s, "arms": _arms(settings, rounds, found)}
        for load, (rate_per_s, rounds) in zip(settings.loads or (None,), found.by_load.items(), strict=True)
    ]
    arms = curve[-1]["arms"]
    assert isinstance(arms, dict)
    headline = arms.get(HEADLINE, {})
    params = {
        "is_quick": settings.is_quick,
        "settings": asdict(settings),
        "places": {role: asdict(place) for role, place in PLACES.items()},
        "trace": TRACE,
        "lengths_of_trace": LENGTHS,
        "burstiness": _burstiness(settings),
        "slo": asdict(found.slo),
        "slo_3x_p50": asdict(found.second),
        "profile": asdict(found.profile),
        "capacity_per_s": found.capacity_per_s,
    }
    return Report(
        name="coserve",
        params=params,
        results={
            **{name: headline.get(name) for name in HEADLINE_KEYS},
            "tokens_made": found.made,
            "tokens_settled": found.settled,
            "regenerated_fraction": (found.made - found.settled) / found.made if found.made else 0.0,
            "spoiled_repetitions": [_spoiled(each, found.slo) for each in found.spoiled],
            **found.control,
            **headline,
            "curve": curve if settings.loads else [],
        },
        baselines=arms,
        ratio={name: headline.get(name) for name in ("harvest_of_oracle", "speedup_over_dedicated")},
    )


def _arms(settings: Settings, rounds: Sequence[Round], found: Found) -> dict[str, Any]:
    measured = {arm: [each for each in rounds if each.arm == arm] for arm in settings.arms}
    return {arm: arm_figures(mine, rounds, found.slo, found.second) for arm, mine in measured.items() if mine}


def _spoiled(found: Round, slo: Slo) -> dict[str, Any]:
    latencies = {f"{name}_ms_p99": found.at(name, 0.99) for name in LATENCIES}
    return {"arm": found.arm, "repetition": found.repetition, "is_within": found.is_within(slo), **latencies}


def _burstiness(settings: Settings) -> list[float]:
    load, context = _load(settings, settings.rate_per_s), settings.sizes.context_tokens
    slices = [(each, part) for each in range(1, settings.round_count + 1) for part in range(load.slice_count)]
    found = []
    for repetition, part in slices:
        seed, count = SLICES_MAX * repetition + part, load.count_of(part)
        arrivals = traffic(seed, rate_per_s=load.rate_per_s, count=count, context_tokens=context)
        found.append(burstiness(arrivals, load.rate_per_s))
    return found


def _text(slo: Slo) -> str:
    return f"TTFT {slo.ttft_ms:.0f} ms, TPOT {slo.tpot_ms:.1f} ms"


def _line(found: Round, slo: Slo) -> str:
    """A round, for whoever waits."""
    tokens = f"{found.borrowed_per_s:.0f} + {found.dedicated_per_s:.0f} tokens/s"
    latencies = ", ".join(
        f"{name} P50 {json.dumps(round(found.at(name, 0.5), 1))} P99 {json.dumps(round(found.at(name, 0.99), 1))} ms"
        for name in ("ttft", "tpot")
    )
    lent = f"lent {found.guard.get('lent_s', 0.0) / found.duration_s:.0%}"
    verdict = "within" if found.is_within(slo) else "BEYOND"
    return f"{found.repetition} {found.arm:>9}: {latencies}; {tokens}; {lent}; {verdict}"
