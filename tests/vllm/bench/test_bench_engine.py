"""`rollfab bench engine` with a real vLLM: both arms do the same work, and the figures follow from it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own, because the bench computes the weights with torch, and engines are forked from this one.
MEASURE = """
from tests.bench.engine.main import Settings, measure
from tests.bench.engine.arms import Rollouts

work = Rollouts(
    name="work", model="tiny", trajectory_count=32, turn_count=2, completion_tokens_min=4, completion_tokens=8,
    observation_tokens=8,
)
settings = Settings(
    workloads=(work,), round_count=1, control_model="tiny", sample_count=2, version_count=2, rank_counts=(1,)
)
print(measure(settings).json())
"""


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(240)
def test_a_real_measurement_reports_both_arms_and_every_stop() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"name", "params", "results", "baselines", "ratio", "machine"}
    assert report["name"] == "engine"
    results = report["results"]

    # Both arms made the same tokens (of greedy turns the very same), and the ratio is that of their rates
    (found,) = results["rows"]
    alone, fabric = found["engine_alone"], found["fabric"]
    assert alone["tokens_per_round"] == fabric["tokens_per_round"] == 32 * 2 * 6
    assert results["same_tokens_fraction"] >= 0.9
    assert results["tokens_per_s"] == fabric["tokens_per_s"] > 0
    assert report["baselines"]["offline generate"] == alone
    assert report["ratio"]["engine_alone"] == pytest.approx(fabric["tokens_per_s"] / alone["tokens_per_s"])
    assert set(alone["cpu_ms_per_turn"]) == {"caller", "engine core"}
    everybody = {"controller", "agent", "worker", "engine core", "broker", "trainer"}
    assert set(fabric["cpu_ms_per_turn"]) == everybody
    assert fabric["cpu_ms_per_turn"]["engine core"] > 0

    # And the engine stood still each time, in both batches
    stops = {(each["action"], each["batch"]): each for each in results["stops"]}
    assert set(stops) == {(name, batch) for name in ("abort", "pause", "running", "step_tokens") for batch in (1, 32)}
    assert all(0 <= each["steps_p50"] <= each["steps_p99"] for each in stops.values())
    for name in ("abort_steps_p99", "pause_steps_p99", "budget_ms_p99", "budget_over_step_ms_p99", "step_ms_p50"):
        assert isinstance(results[name], float)
    assert results["step_ms_p99"] >= results["step_ms_p50"] > 0

    # And its longest step while a version came is told beside an ordinary one
    (stall,) = results["stalls"]
    assert stall["stalled_ms_p99"] >= stall["stalled_ms_p50"] > 0 and stall["changed_count"] > 0
    assert results["stalled_ms_p99"] == stall["stalled_ms_p99"]
    assert results["stalled_of_step"] == stall["stalled_ms_p50"] / stall["step_ms_p50"]
