"""`rollfab bench room` with real vLLMs: who has no room for turns takes fewer of them; the work is the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(280)
def test_a_small_cache_takes_fewer_turns_than_by_slots() -> None:
    command = [sys.executable, "-m", "rollfab", "bench", "room", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    ours, other = report["results"], report["baselines"]["by slots"]
    assert 0 < ours["small_fraction"] < other["small_fraction"] < 1
    assert report["ratio"]["by slots"] > 0 and ours["tokens_per_s"] > 0
