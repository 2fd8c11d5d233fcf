"""The bench of saving runs: turns go on with all that was saved, and parts write less than all of it each time."""

from __future__ import annotations

import dataclasses

import pytest

from tests.bench.saving.main import PARTS, QUICK, WHOLE, faults, measure, print_table

pytestmark = [pytest.mark.redis]


async def test_a_quick_run_reads_back_what_was_saved_and_counts_what_was_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = await measure(QUICK)
    assert faults(report) == [] and report.results["wrong_count"] == 0
    for row in report.results["rows"]:
        assert row["floor_bytes"] / row["token_count"] < row[PARTS]["bytes_per_token"] < row[WHOLE]["bytes_per_token"]
    assert report.ratio["bytes"] > 2
    print_table(report)
    assert "2,000 tokens" in capsys.readouterr().out
    report.results["wrong_count"] = 1.0
    assert faults(dataclasses.replace(report)) == ["1 turns went on elsewhere with other tokens than were saved"]
