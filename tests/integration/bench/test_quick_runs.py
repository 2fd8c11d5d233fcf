"""Benches that kill and hand over real processes: their quick runs break no promise."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.bench.chaos.main import QUICK as CHAOS
from tests.bench.chaos.report import CALL_PROMISES, PROMISES
from tests.bench.resume.main import QUICK as RESUME
from tests.bench.resume.main import TURNS_TOGETHER
from tests.bench.sharing.main import GOAL as SHARING_GOAL
from tests.bench.training.main import QUICK as TRAINING

LARGE_GAP = 0.35  # of two samples of 96 of one distribution, once in a hundred thousand pairs


def results_of(name: str, *words: str) -> dict[str, Any]:
    """What `rollfab bench NAME --quick` finds."""
    command = [sys.executable, "-m", "rollfab", "bench", name, "--quick", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["name"] == name
    results: dict[str, Any] = report["results"]
    return results


def check_chaos(results: dict[str, Any]) -> None:
    """Every role was hit, in every way, while there was work, and no promise was broken."""
    assert {name: results[name] for name in PROMISES} == dict.fromkeys(PROMISES, 0), results
    assert set(results["faults_by_role"]) == {*CHAOS.workload.counts, "broker"}
    assert set(results["faults_by_kind"]) == {"kill", "freeze", "cut", "hold"}
    assert results["faults"] == sum(results["faults_by_kind"].values())
    assert results["groups"] > 0 and results["rollouts"] == results["groups"] * CHAOS.workload.group_size
    turns = results["rollouts"] * CHAOS.workload.turn_count
    assert results["tokens_delivered"] == turns * CHAOS.workload.completion_tokens
    assert results["tokens_made"] >= results["tokens_settled"] >= results["tokens_delivered"]
    assert results["recovery_count"] > 0
    assert results["recovery_ms_p99"] >= results["recovery_ms_p50"] > 0


def check_calls(results: dict[str, Any]) -> None:
    """Those who hold the sessions were harmed with all others, and every call was answered, once, as undisturbed."""
    promises = (*PROMISES, *CALL_PROMISES)
    assert {name: results[name] for name in promises} == dict.fromkeys(promises, 0), results
    assert {"worker", "controller", "trainer", "broker"} < set(results["faults_by_role"])
    assert {"agent", "gateway"} & set(results["faults_by_role"])
    assert results["calls"] == results["calls_completed"] > 0
    assert results["groups"] == results["rollouts"] > 0


def check_resume(results: dict[str, Any]) -> None:
    """Turns went from one worker to another in their middle, with their tokens, and ended with the very same ones."""
    assert (results["exact"], results["inexact_turns"]) == (True, 0)
    assert results["distinct_tokens_min"] > 20  # so that going on from other tokens could be told
    assert results["handover_count"] >= RESUME.handover_count
    assert results["tokens_handed_over"] > 0
    assert results["tokens_regenerated"] == 0  # a lease that ends wastes none
    assert 0 < results["kill_handover_count"] <= RESUME.kill_count * TURNS_TOGETHER
    assert results["tokens_regenerated_after_kill"] >= 0
    for name in ("handover", "kill_handover", "prefill"):
        assert 0 < results[f"{name}_ms_p50"] <= results[f"{name}_ms_p99"]
    assert results["token_log_tokens_per_s"] > 0 and results["token_log_never_tokens_per_s"] > 0


def check_training(results: dict[str, Any]) -> None:
    """Workers came and went while a policy learnt, nothing was lost, and answers were as long as undisturbed ones."""
    reward, lengths = results["reward"], results["lengths"]
    assert reward["lost_count"] == 0
    assert len(reward["curves"][0]) == TRAINING.step_count
    assert reward["lent_count"] > 0 and reward["delta_count"] == TRAINING.step_count
    assert len(lengths["values"]) >= TRAINING.length_count
    assert lengths["revoked_count"] > 0
    assert lengths["gap"] < LARGE_GAP


def check_sharing(results: dict[str, Any]) -> None:
    """Every run was served, by weight, and none waited for longer than was promised."""
    assert 0 < results["longest_wait_fair_turns"] <= SHARING_GOAL
    apart, alike = results["rows"]
    assert all(0.5 < part < 1.5 for part in (*apart["of_tokens"], *alike["of_tokens"]))  # a slice more or less, of some
    assert alike["longest_wait_s"] < apart["longest_wait_s"]


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.redis
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "words", "check"),
    [
        ("chaos", ["--seed", "11"], check_chaos),
        ("chaos", ["--seed", "11", "--calls", "agents"], check_calls),
        ("chaos", ["--seed", "11", "--calls", "gateway"], check_calls),
        ("resume", [], check_resume),
        ("training", [], check_training),
        ("sharing", [], check_sharing),
    ],
)
def test_a_quick_run_breaks_no_promise(name: str, words: list[str], check: Any) -> None:
    check(results_of(name, *words))
