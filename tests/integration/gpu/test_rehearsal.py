"""Every step of the acceptance run on a GPU that needs no vLLM, on a CPU and at tiny sizes: the same script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollfab.deploy.gpu.plan import STEPS, VLLM
from rollfab.deploy.gpu.run import main, read_records

pytestmark = [pytest.mark.timeout(400), pytest.mark.redis]
TOGETHER = ["probe", "publisher", "commit", "members"]  # take seconds
TESTS = ["publisher-tests", "transformers-contract"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the steps that take seconds tell, run together."""
    results = tmp_path_factory.mktemp("gpu") / "results.jsonl"
    main(["--device", "cpu", "--only", ",".join(TOGETHER), "--results", str(results)])
    return {record["step"]: record for record in read_records(results)}


def figures(records: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    record = records[name]
    assert record["state"] == "passed", record["reason"]
    found: dict[str, Any] = record["figures"]
    return found


@pytest.mark.slow
def test_the_probe_says_what_is_there(records: dict[str, dict[str, Any]]) -> None:
    found = figures(records, "probe")
    assert found["distributions"]["torch"] and found["shared_memory_bytes"] > 0
    assert set(found["gb_per_s"]) == {"within", "pageable to the device", "pageable to the host"}
    assert all(value > 0 for value in found["gb_per_s"].values())
    assert "gpus" in found["gpu"]


@pytest.mark.slow
def test_the_publisher_compares_as_the_host_does(records: dict[str, dict[str, Any]]) -> None:
    found = figures(records, "publisher")
    counts = [found[f"at {each} %"]["changed"] / found["parameters"] for each in ("0.1", "1", "30")]
    assert counts == pytest.approx([0.001, 0.01, 0.3], rel=0.1)
    assert set(found["comparison_s"]) == {"1 MiB", "4 MiB"}


@pytest.mark.slow
def test_a_commit_of_each_share_is_written(records: dict[str, dict[str, Any]]) -> None:
    found = figures(records, "commit")
    for each in ("0.1", "1", "30"):
        row = found[f"at {each} %"]
        assert row["changed"] > 0 and row["stage_s"] > 0 and row["commit_s"] > 0


@pytest.mark.slow
def test_members_outlive_one_that_dies(records: dict[str, dict[str, Any]]) -> None:
    found = figures(records, "members")
    assert found["both_live"] and found["without"]["is_enough"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", TESTS)
def test_tests_of_ours_run_as_a_step(name: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["--device", "cpu", "--only", name, "--results", str(results)]) == 0
    [record] = read_records(results)
    assert record["figures"]["tests"] > 10 and not record["figures"]["skipped"]


def test_every_step_is_rehearsed() -> None:
    assert {*TOGETHER, *TESTS} == {step.name for step in STEPS if VLLM not in step.needs}
