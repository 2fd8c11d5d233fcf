"""What rollouts cost serving requests, told only where there is something to compare."""

from __future__ import annotations

import pytest

from rollfab.fabric.rules.tax import sharing_totals, taxes
from rollfab.fabric.sharing import SharingReport

ALONE = {"request_count": 9, "ttft_ms_p99": 50.0, "tpot_ms_p99": 10.0}


def test_a_tax_is_shared_over_alone_less_one() -> None:
    report = SharingReport(worker_id="w", alone=ALONE, shared={**ALONE, "ttft_ms_p99": 55.0})
    found = taxes(report)
    assert (found["ttft_tax_p99"], found["tpot_tax_p99"]) == (pytest.approx(0.1), 0.0)


def test_where_no_shared_request_had_a_second_token_there_is_no_tpot_tax() -> None:
    report = SharingReport(worker_id="w", alone=ALONE, shared={**ALONE, "tpot_ms_p99": 0.0})
    assert taxes(report)["tpot_tax_p99"] is None
    totals = sharing_totals([report])
    assert totals["tpot_tax_p99_worst"] is totals["tpot_ms_p99_shared_worst"] is None
    assert totals["ttft_tax_p99_worst"] == 0.0
