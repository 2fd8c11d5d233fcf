"""`rollfab bench gateway --quick` with a real vLLM server: all arms do the same work, figures follow from it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.gateway.main import ARMS, QUICK


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(400)
def test_a_quick_run_reports_every_arm_at_every_concurrency() -> None:
    command = [sys.executable, "-m", "rollfab", "bench", "gateway", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    results = report["results"]
    assert report["name"] == "gateway"
    assert results["same_texts_fraction"] >= 0.75
    assert results["floor_ms"] > results["gateway_hop_ms"] > 0 and results["broker_trip_ms"] > 0
    assert [row["concurrency"] for row in results["rows"]] == [load.concurrency for load in QUICK.loads] == [1, 8, 64]

    assert results["gateway_way_p50_ms"] == results["way"]["overhead_p50_ms"]
    for row, load in zip(results["rows"], QUICK.loads, strict=True):
        direct, told, forwarded, through = arms = [row[name] for name in ARMS]
        # As many calls in every arm (the lengths of all answers are checked as they come), each with its time
        calls = load.concurrency * load.calls_each * QUICK.round_count
        for arm in arms:
            assert arm["call_count"] == calls
            assert 0 < arm["latency_p50_ms"] <= arm["latency_p99_ms"] and arm["tokens_per_s"] > 0
        everybody = {"client", "broker", "server", "controller", "worker", "gateway", "forwarder", "engine core"}
        assert set(through["cpu_ms_per_call"]) == everybody and through["cpu_ms_per_call"]["engine core"] > 0
        # The floor did pass bytes on, and only there
        passing = [arm["cpu_ms_per_call"]["forwarder"] for arm in arms]
        assert max(passing) == passing[ARMS.index("forwarded")] > 0
        # And the figures are those of the rounds
        p99 = through["latency_p99_ms"] - direct["latency_p99_ms"]
        assert results[f"gateway_overhead_p99_ms_{load.concurrency}"] == pytest.approx(p99)
        told_p99 = through["latency_p99_ms"] - told["latency_p99_ms"]
        assert row["beside_told"]["overhead_p99_ms"] == pytest.approx(told_p99)
        floor_p99 = forwarded["latency_p99_ms"] - direct["latency_p99_ms"]
        assert row["floor"]["overhead_p99_ms"] == pytest.approx(floor_p99)
        for name in ("overhead_p50", "tokens_ratio"):
            unit = "_ms" if name == "overhead_p50" else ""
            low, high = row[f"{name}_spread"]
            assert low <= results[f"gateway_{name}{unit}_{load.concurrency}"] <= high
