"""The bench of conversations runs: contexts say what the template writes, and cost less than encoding all anew."""

from __future__ import annotations

import pytest

from tests.bench.conversation.main import FLOOR, OURS, QUICK, WHOLE, faults, measure, print_table


def test_a_quick_run_measures_three_ways_to_the_same_context(capsys: pytest.CaptureFixture[str]) -> None:
    report = measure(QUICK)
    assert faults(report) == [] and report.results["wrong_count"] == 0
    first, last = report.results["rows"]
    assert last["token_count"] > 2 * first["token_count"] and all(last[way] > 0 for way in (OURS, WHOLE, FLOOR))
    print_table(report)
    assert "10 turns" in capsys.readouterr().out
    report.results["wrong_count"] = 1
    assert faults(report) == ["1 contexts are not what the template writes"]
