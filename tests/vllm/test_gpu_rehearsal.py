"""The steps of the acceptance run on a GPU that need vLLM, on the CPU and at tiny sizes: the same script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollfab.deploy.gpu.run import main, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


def figures(tmp_path: Path, name: str) -> dict[str, Any]:
    """Of one step that has passed."""
    results = tmp_path / "results.jsonl"
    main(["--device", "cpu", "--only", name, "--results", str(results)])
    [record] = read_records(results)
    assert record["state"] == "passed", record["reason"]
    found: dict[str, Any] = record["figures"]
    return found


@pytest.mark.parametrize("name", ["vllm-eager", "vllm-graphs"])
def test_a_tiny_engine_answers_as_a_fresh_one(name: str, tmp_path: Path) -> None:
    found = figures(tmp_path, name)
    assert found["tokens"] == 24 and found["pause_s"] > 0


def test_commits_under_load_end_as_a_fresh_load(tmp_path: Path) -> None:
    found = figures(tmp_path, "commits")
    assert found["same_as_a_fresh_load"] and found["changed"] > 0
    assert found["gap_ms"]["p50"] > 0 and found["gap_ms_around_commit"]["p50"] > 0


def test_an_engine_that_cannot_sleep_says_so(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["--device", "cpu", "--only", "sleep", "--results", str(results)]) == 0
    [record] = read_records(results)
    assert record["state"] == "skipped" and "CPU" in record["reason"]


@pytest.mark.alone
@pytest.mark.redis
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="co-serving is measured on a pair of cores")
def test_co_serving_has_every_arm(tmp_path: Path) -> None:
    found = figures(tmp_path, "coserve")
    assert set(found["arms"]) == {"alone", "share-all", "ours"}
    assert found["arms"]["alone"]["tokens_per_s"] == 0 < found["arms"]["share-all"]["tokens_per_s"]


@pytest.mark.alone
@pytest.mark.redis
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="co-serving is measured on a pair of cores")
def test_serving_lives_when_the_rollout_engine_is_killed(tmp_path: Path) -> None:
    found = figures(tmp_path, "kill")
    assert found["requests"] == 48 and found["after_the_kill"] >= 24 and not found["failures"]
