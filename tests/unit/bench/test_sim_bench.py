"""What ours misses of its criteria is listed by scenario, load and arm; what it keeps is not."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

from rollfab.deploy.simulation.report import results
from rollfab.deploy.simulation.scenario import SimulationPart
from tests.bench.sim.main import misses, ratios
from tests.support.simulated import SMALL, run


def test_what_ours_misses_is_listed() -> None:
    three = replace(SMALL, simulation=SimulationPart(arms=("fixed", "rose", "ours"), seeds=(0,)))
    runs = {arm: run(arm) for arm in ("fixed", "rose", "ours")}
    found = results(three, list(runs.values()))
    part, scenario = found["by_load"][0], found["scenario"]
    ours = part["arms"]["ours"]
    assert ours["over_rose"]["mean"] == runs["rose"].step_s / runs["ours"].step_s
    ours["over_fixed"]["mean"], ours["harvest_of_oracle"]["mean"] = 1.0, 0.95
    ours["over_rose"]["mean"], ours["rollouts_of_bound"]["mean"] = 1.1, 0.2
    assert misses({"s10": {"by_load": [part], "scenario": scenario}}) == []

    worse: dict[str, Any] = deepcopy(part)
    ours = worse["arms"]["ours"]
    ours["over_fixed"]["mean"], ours["harvest_of_oracle"]["mean"] = 0.9, 0.3
    ours["served"]["attained"]["mean"], ours["served"]["worst_minute"]["mean"] = 0.99, 0.9
    ours["wasted_fraction"]["mean"], ours["served"]["ttft_ms_p99"]["mean"] = 0.05, 612.3
    ours["over_rose"]["mean"] = 1.05
    assert misses({"s10": {"by_load": [worse], "scenario": scenario}}) == [
        "s10, load 0.25, ours: steps are 0.90 times as fast as on dedicated GPUs alone",
        "s10, load 0.25, ours: steps are 1.05 times as fast as ROSE's, 1.1 wanted",
        "s10, load 0.25, ours: 1.00 points of attainment lost",
        "s10, load 0.25, ours: 0.900 attained in the worst minute",
        "s10, load 0.25, ours: 5.0% of tokens wasted",
        "s10, load 0.25, ours: 0.30 of the oracle's harvest, 0.93 wanted",
        "s10, load 0.25, ours: P99 of TTFT is 612 ms, of 500",
    ]
    assert misses({"s1": {"by_load": [part], "scenario": scenario}}) == [
        "s1, load 0.25, ours: rollouts have 0.20 of their bound, 0.85 wanted"
    ]
    assert ratios({"s1": {"by_load": [worse], "scenario": scenario}}) == {
        "s1": {"0.25": {"ours": {"speedup_over_fixed": 0.9, "over_rose": 1.05, "of_oracle": 0.2, "violations": 1}}}
    }
