"""The simulated cluster against real runs: real processes, real engines on the CPU, a real trainer's steps.

Engines make a step in a fixed time, as devices of their own do, so that the machine's speed has little part in it. The
cluster is told that time, and how long publishing took before the first step; nothing is fitted to what is compared.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.prediction.main import HALF, faults, measure, print_table

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.redis, pytest.mark.timeout(600)]


def test_real_runs_take_as_long_as_the_simulated_cluster_says(capsys: pytest.CaptureFixture[str]) -> None:
    report = measure(HALF)
    print_table(report)
    shown = capsys.readouterr().out
    assert faults(report) == [], shown
    assert all(case.name in shown for case in HALF.cases)
    (first, *others), far = report.results["rows"], 1.2
    spread = (first["step_ratio"] * far, first["step_ratio"])
    wrong = {**first, "throughput_ratio": far, "step_ratio_spread": spread}
    assert len(faults(replace(report, results={"rows": [wrong, *others]}))) == 2
