"""Reports of two checkouts over one another."""

from __future__ import annotations

from typing import Any

from tests.versus import compared


def report(rate: float, cpu_ms: float, **more: Any) -> dict[str, Any]:
    rows = [{"name": "1 token", "cpu_ms": {"agent": cpu_ms}, "cpu_ms_spread": [1.0, 2.0]}]
    return {"results": {"jobs_per_s": rate, "lost": 0, "exact": True, "rows": rows, **more}, "ratio": {"peer": 2.0}}


def test_each_number_of_both_is_divided_pair_by_pair() -> None:
    pairs = [(report(100, 0.5), report(90, 1.0, new=3)), (report(200, 0.5, gone=1), report(100, 0.25))]
    assert compared(pairs) == {
        "ratio.peer": [1.0, 1.0],
        "results.jobs_per_s": [0.9, 0.5],
        "results.rows[1 token].cpu_ms.agent": [2.0, 0.5],
    }
