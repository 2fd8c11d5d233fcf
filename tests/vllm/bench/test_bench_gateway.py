"""`rollfab bench gateway --quick` with a real vLLM server: all arms do the same work, figures follow from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.bench.gateway.arms import Load
from tests.bench.gateway.main import ARMS, QUICK

FIGURES = ("overhead_p50_ms", "overhead_p99_ms", "tokens_ratio")
EVERYBODY = {"client", "broker", "server", "controller", "worker", "gateway", "inference", "forwarder", "engine core"}


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
    assert results["same_texts_fraction"] >= 0.75 and results["same_ids_fraction"] >= 0.75
    assert results["floor_ms"] > results["gateway_hop_ms"] > 0 and results["broker_trip_ms"] > 0
    assert [row["concurrency"] for row in results["rows"]] == [load.concurrency for load in QUICK.loads] == [1, 8, 64]

    assert results["gateway_way_p50_ms"] == results["way"]["overhead_p50_ms"]
    for row, load in zip(results["rows"], QUICK.loads, strict=True):
        check_row(row, load, ARMS, {name: results[f"gateway_{name}_{load.concurrency}"] for name in FIGURES})
        told_p99 = row["through"]["latency_p99_ms"] - row["told"]["latency_p99_ms"]
        assert row["beside_told"]["overhead_p99_ms"] == pytest.approx(told_p99)
    assert all(load.is_ids for load in QUICK.ids)
    for row, load in zip(results["ids"], QUICK.ids, strict=True):
        arms = [name for name in ARMS if name != "told"]
        check_row(row, load, arms, {name: results[f"gateway_ids_{name}_{load.concurrency}"] for name in FIGURES})
    # The floor did pass bytes on, and only there
    passing = {
        name: sum(row[name]["cpu_ms_per_call"]["forwarder"] * row[name]["call_count"] for row in results["rows"])
        for name in ARMS
    }
    assert max(passing, key=lambda name: passing[name]) == "forwarded"


def check_row(row: dict[str, Any], load: Load, names: Sequence[str], figures: dict[str, float]) -> None:
    """As many calls in every arm (the lengths of all answers are checked as they come), and figures of their rounds."""
    arms = {name: row[name] for name in names}
    assert set(ARMS) & row.keys() == arms.keys()
    for arm in arms.values():
        assert arm["call_count"] == load.concurrency * load.calls_each * QUICK.round_count
        assert 0 < arm["latency_p50_ms"] <= arm["latency_p99_ms"] and arm["tokens_per_s"] > 0
        assert arm["cpu_ms_per_call"].keys() == EVERYBODY and arm["cpu_ms_per_call"]["engine core"] > 0
    direct_p99 = arms["direct"]["latency_p99_ms"]
    assert figures["overhead_p99_ms"] == pytest.approx(arms["through"]["latency_p99_ms"] - direct_p99)
    assert row["floor"]["overhead_p99_ms"] == pytest.approx(arms["forwarded"]["latency_p99_ms"] - direct_p99)
    for name in ("overhead_p50", "tokens_ratio"):
        low, high = row[f"{name}_spread"]
        assert low <= figures[name if name in figures else f"{name}_ms"] <= high
