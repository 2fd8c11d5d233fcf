"""`rollfab bench controller --quick`: plans, ticks and a failover are measured, and no slot is lent twice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.controller.main import FULL, plan_times_ms


def test_plans_of_a_changing_pool_are_timed_one_by_one() -> None:
    found = plan_times_ms(20, 7)
    assert len(found) == 7
    assert all(wall_ms > 0 and core_ms >= 0 for wall_ms, core_ms in found)


def test_the_full_bench_goes_up_to_a_thousand_workers() -> None:
    assert max(FULL.worker_counts) == 1000
    assert FULL.plan_count >= 200


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(150)
def test_the_quick_bench_fails_over_without_a_slot_that_is_lent_twice() -> None:
    command = [sys.executable, "-m", "rollfab", "bench", "controller", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert results["double_leases"] == 0
    assert results["failover_s"]
    for count in FULL.worker_counts:
        for name in ("plan_ms", "plan_cpu_ms", "tick_ms"):
            assert 0 < results[f"{name}_p50_{count}"] <= results[f"{name}_p99_{count}"]
