"""The placement bench gives every job out once, and times every kind of call: structure, never speed."""

from __future__ import annotations

import pytest

from tests.bench.placement.main import COLUMNS, EXTEND, FLOOR, QUICK, faults, measure, print_table

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.redis]


async def test_a_quick_run_gives_every_job_out_once_and_times_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    report = await measure(QUICK)
    assert faults(report) == []
    for row in report.results["rows"]:
        assert set(row["us"]) == set(COLUMNS)
        for name, found in row["us"].items():
            assert 0 < found["p50"] <= found["p99"] or name == FLOOR
            least = 1 if name == EXTEND else min(QUICK.call_count, row["live_count"] // 4)
            assert found["count"] >= least, name
        assert set(row["p99_over_floor"]) == set(COLUMNS)
    assert set(report.ratio) == {*COLUMNS, "growth"}
    print_table(report)
    assert "last row over the first" in capsys.readouterr().out
