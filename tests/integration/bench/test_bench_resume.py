"""`rollfab bench resume --quick`: turns go from one real worker to another, and end with the very same tokens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench.resume.main import FULL, QUICK, TURNS_TOGETHER


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_the_quick_resume_hands_turns_over_exactly() -> None:
    command = [sys.executable, "-m", "rollfab", "bench", "resume", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    report = json.loads(done.stdout.splitlines()[-1])
    results = report["results"]
    assert report["name"] == "resume"
    assert results["exact"] is True
    assert results["inexact_turns"] == 0
    assert results["distinct_tokens_min"] > 20  # so that going on from other tokens could be told

    # And there was something to hand over: turns in their middle, whose tokens went with them
    assert results["handover_count"] >= QUICK.handover_count
    assert results["tokens_handed_over"] > 0
    assert results["tokens_regenerated"] == 0  # a lease that ends wastes none
    assert 0 < results["kill_handover_count"] <= QUICK.kill_count * TURNS_TOGETHER
    assert results["tokens_regenerated_after_kill"] >= 0
    for name in ("handover", "kill_handover", "prefill"):
        assert 0 < results[f"{name}_ms_p50"] <= results[f"{name}_ms_p99"]
    assert results["token_log_tokens_per_s"] > 0
    assert results["token_log_never_tokens_per_s"] > 0


def test_the_full_resume_measures_enough() -> None:
    assert FULL.handover_count >= 200
    assert QUICK.handover_count >= 30
    assert FULL.kill_count >= 5
