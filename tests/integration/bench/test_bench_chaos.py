"""`rollfab bench chaos --quick`: real processes of every role, killed and cut off, and every promise kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.chaos.main import FULL, QUICK
from tests.bench.chaos.report import PROMISES

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis]


@pytest.mark.timeout(300)
def test_the_quick_chaos_hits_every_role_and_breaks_no_promise() -> None:
    command = [sys.executable, "-m", "rollfab", "bench", "chaos", "--quick", "--json", "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    report = json.loads(done.stdout.splitlines()[-1])
    results = report["results"]
    assert (report["name"], report["params"]["seed"]) == ("chaos", 11)
    assert {name: results[name] for name in PROMISES} == dict.fromkeys(PROMISES, 0), results

    # And the run was one: every role was hit, in every way, while there was work
    assert set(results["faults_by_role"]) == {*QUICK.workload.counts, "broker"}
    assert set(results["faults_by_kind"]) == {"kill", "freeze", "cut", "hold"}
    assert results["faults"] == sum(results["faults_by_kind"].values())
    assert results["groups"] > 0
    assert results["rollouts"] == results["groups"] * QUICK.workload.group_size
    turns = results["rollouts"] * QUICK.workload.turn_count
    assert results["tokens_delivered"] == turns * QUICK.workload.completion_tokens
    assert results["tokens_made"] >= results["tokens_settled"] >= results["tokens_delivered"]
    assert results["recovery_count"] > 0
    assert results["recovery_ms_p99"] >= results["recovery_ms_p50"] > 0


def test_the_full_chaos_has_every_role_twice() -> None:
    assert set(FULL.workload.counts) == {"worker", "serving", "agent", "controller", "reward", "api", "trainer"}
    assert set(FULL.workload.counts.values()) == {2}
    assert FULL.duration_s == 600.0
    assert set(FULL.pauses) == {*FULL.workload.counts, "broker"}
