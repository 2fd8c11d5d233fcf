"""`rollfab bench coserve` with two real vLLMs on one core: every request is answered, every arm does what it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rollfab.fabric.contract.errors import ConfigError
from tests.bench.alone import alone
from tests.bench.coserve.main import HEADLINE_KEYS, QUICK, measure
from tests.bench.measure import child_pids
from tests.vllm.attached.checkpoints import random_tensors, write_checkpoint, write_config

pytestmark = pytest.mark.alone

# In a process of its own, because the bench computes the weights with torch, and engines are forked from this one.
MEASURE = """
from tests.bench.coserve.main import Settings, measure
from tests.bench.coserve.cast import Sizes

sizes = Sizes(model="tiny", serving_slots=16, borrowed_slots=8, dedicated_slots=4, context_tokens=256)
settings = Settings(
    rate_per_s=6.0, request_count=24, round_count=1, calibration_count=1, arms=("alone", "share-all", "ours"),
    switch_samples=1, sizes=sizes,
)
print(measure(settings).json())
"""


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="co-serving is measured on a pair of cores")
@pytest.mark.timeout(400)
def test_a_real_measurement_reports_every_arm() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"name", "params", "results", "baselines", "ratio", "machine"}
    assert report["name"] == "coserve"
    results, arms = report["results"], report["baselines"]
    assert set(arms) == {"alone", "share-all", "ours"}

    # Every request was answered, in all arms
    for arm in arms.values():
        assert set(arm) >= set(HEADLINE_KEYS)
        assert arm["requests"] == 24 and arm["requests_failed"] == 0
        check_latencies(arm)
        assert 0 <= arm["requests_beyond"] <= 24 and arm["violations"] == arm["within_by_repetition"].count(False)

    # Rollouts were made where they were lent time, and by the dedicated worker always
    tokens = {name: {kind: each["median"] for kind, each in arm["tokens_per_s"].items()} for name, arm in arms.items()}
    assert tokens["alone"]["borrowed"] == 0 and tokens["share-all"]["borrowed"] > 0
    assert all(each["dedicated"] > 0 for each in tokens.values())
    assert all(each["total"] == pytest.approx(each["dedicated"] + each["borrowed"]) for each in tokens.values())

    # The headline is ours, and follows from the arms
    ours, alone = arms["ours"], arms["alone"]
    assert {name: results[name] for name in HEADLINE_KEYS} == {name: ours[name] for name in HEADLINE_KEYS}
    tax = ours["ttft_ms"]["p99"]["median"] / alone["ttft_ms"]["p99"]["median"] - 1
    assert results["ttft_tax_p99"] == pytest.approx(tax)
    assert results["speedup_over_dedicated"] == pytest.approx(tokens["ours"]["total"] / tokens["alone"]["total"])
    assert results["harvest_of_oracle"] is None  # that arm was not measured

    # No token was lost, and the switch stopped the engine
    assert 0 < results["tokens_settled"] <= results["tokens_made"]
    assert 0 <= results["kill_switch"]["ms_p50"] < 10_000
    assert not list(Path("/dev/shm").glob(f"rollfab-bench-{os.getpid()}*"))


def test_nothing_is_measured_while_another_call_measures() -> None:
    with ExitStack() as held:
        with suppress(ConfigError):  # somebody measures on this machine: as good
            held.enter_context(alone("coserve"))
        with pytest.raises(ConfigError, match="coserve is being measured on this machine by process"):
            measure(QUICK)


def check_latencies(arm: dict[str, Any]) -> None:
    """Of answered requests: finite, above 0, in order."""
    for name in ("ttft_ms", "tpot_ms"):
        p50, p99 = (arm[name][key]["median"] for key in ("p50", "p99"))
        assert 0 < p50 <= p99
        low, high = arm[name]["p99_of_all_ci"]
        assert low <= arm[name]["p99_of_all"] <= high


SERVE = """
import sys, time
from pathlib import Path
from tests.bench.coserve.server import ServingEngine
model, directory = Path(sys.argv[1]), Path(sys.argv[2])
with ServingEngine(model, directory, slot_count=2, context_tokens=128, probe=directory / "page") as engine:
    engine.ready()
    print(engine.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.timeout(300)
def test_a_serving_engine_ends_with_the_bench_that_started_it_even_if_that_was_killed(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", random_tensors(write_config(tmp_path / "model"), 1))
    starter = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(model), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    family = [pid, *child_pids(pid)]
    assert len(family) > 1  # the EngineCore

    starter.kill()
    starter.wait()
    starter.stdout.close()

    while any(is_running(each) for each in family):  # the test's timeout is the limit
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
