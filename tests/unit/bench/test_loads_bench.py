"""Loads that nothing was tuned on are what they are named for; what ours misses beside dedicated GPUs is listed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.deploy.replay.figures import Report
from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.replay.scale import Load
from rollfab.deploy.replay.traces import Part, read_trace
from rollfab.deploy.simulation.run import capacity_of
from rollfab.deploy.simulation.scenario import Scenario
from tests.bench.loads.main import QUICK, RATE_PER_S, SHAPES, SPAN_S, faults, measure, under, write_shape


def drawn(shape: str, tmp_path: Path) -> list[Arrival]:
    return read_trace(str(write_shape(shape, tmp_path / "trace.csv")), Part()).arrivals


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_has_its_rate_and_differs_from_even_requests_as_it_says(shape: str, tmp_path: Path) -> None:
    found = drawn(shape, tmp_path)
    load = Load.of([each for each in found if each.at_s < SPAN_S], SPAN_S)
    assert load.mean_per_s == pytest.approx(RATE_PER_S, rel=0.1)
    uneven = {"crowds": 20, "on and off": 10, "bursts": 3, "tides": 2}
    least = uneven.get(shape, 0.8)
    assert load.idc > least if shape in uneven else load.idc == pytest.approx(1, rel=0.2)
    prompt, answer = (
        np.median([getattr(each, name) for each in found]) for name in ("prompt_tokens", "completion_tokens")
    )
    median = {"long prompts": (4000, 150), "long answers": (200, 900)}.get(shape, (900, 130))
    assert (prompt, answer) == (pytest.approx(median[0], rel=0.1), pytest.approx(median[1], rel=0.1))


def test_objectives_are_such_that_requests_can_keep_them(tmp_path: Path) -> None:
    def scenario(prompt_tokens: int) -> Scenario:
        path = tmp_path / f"{prompt_tokens}.csv"
        rows = [f"{second},{prompt_tokens},20\n" for second in range(100)]
        path.write_text("".join(["t_s,input_tokens,output_tokens\n", *rows]))
        return under(path)

    assert (scenario(200).serving.ttft_ms, scenario(200).serving.tpot_ms) == (500, 150)
    assert scenario(60_000).serving.ttft_ms > 1500
    assert capacity_of(scenario(60_000)) > 0


def test_under_crowds_ours_is_faster_and_keeps_the_objectives() -> None:
    report = measure(QUICK)
    assert faults(report) == []
    ours = report.results["arms"]["ours"]
    assert ours["over_fixed"] == ours["slowest"] == ours["by_load"]["0.5"] > 1.1
    assert (ours["missed"], ours["count"]) == (0, 1)


def test_a_missed_objective_and_a_slower_step_are_told() -> None:
    row: dict[str, Any] = {"trace": "tides", "load": 0.5, "seed": 1, "over_fixed": 1.2, "missed": False}
    row |= {"ttft_ms_p99": 612.0, "tpot_ms_p99": 40.0, "ttft_slo_ms": 500.0, "tpot_slo_ms": 150.0}
    late, slow = row | {"arm": "ours", "missed": True}, row | {"arm": "ours-advised", "over_fixed": 0.9}
    others = row | {"arm": "rose", "missed": True, "over_fixed": 0.5}
    report = Report(name="loads", params={}, results={}, baselines={"rows": [row | {"arm": "ours"}]}, ratio={})
    assert faults(report) == []
    assert faults(replace(report, baselines={"rows": [late, slow, others]})) == [
        "tides, load 0.5, seed 1, ours: P99 612 and 40 ms, of 500 and 150",
        "tides, load 0.5, seed 1, ours-advised: steps are 0.900 times as fast as on dedicated GPUs alone",
    ]
