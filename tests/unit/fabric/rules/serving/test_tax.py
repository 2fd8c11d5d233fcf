"""What rollouts cost serving requests, told only where there is something to compare, and how much it says."""

from __future__ import annotations

import random

import pytest

from rollfab.fabric.contract.sharing import SharingReport
from rollfab.fabric.rules.serving.tax import few, quantile_ranks, sharing_totals, taxes

ALONE = {"request_count": 9, "ttft_ms_p99": 50.0, "tpot_ms_p99": 10.0}


def test_a_tax_is_shared_over_alone_less_one() -> None:
    report = SharingReport(worker_id="w", alone=ALONE, shared={**ALONE, "ttft_ms_p99": 55.0})
    found = taxes(report)
    assert (found["ttft_tax_p99"], found["tpot_tax_p99"]) == (pytest.approx(0.1), 0.0)


def test_where_no_shared_request_had_a_second_token_there_is_no_tpot_tax() -> None:
    report = SharingReport(worker_id="w", alone=ALONE, shared={**ALONE, "tpot_ms_p99": 0.0})
    assert taxes(report)["tpot_tax_p99"] is None
    totals = sharing_totals([report])
    assert totals.tpot_tax_p99_worst is totals.tpot_ms_p99_shared_worst is None
    assert totals.ttft_tax_p99_worst == 0.0


def test_ranks_around_a_quantile_are_those_of_the_tables() -> None:
    assert quantile_ranks(42, 0.5) == (15, 28)  # of the median, in every table of the sign test
    assert quantile_ranks(367, 0.99)[1] is None and quantile_ranks(368, 0.99) == (360, 368)
    assert quantile_ranks(0, 0.99) == (None, None)


@pytest.mark.parametrize("count", [1, 10, 100, 368, 2048])
def test_the_true_quantile_is_within_its_ranks_as_often_as_promised(count: int) -> None:
    dice, misses = random.Random(count), 0
    low, high = quantile_ranks(count, 0.9)
    for _ in range(400):
        ordered = sorted(dice.random() for _ in range(count))
        misses += (low is not None and ordered[low - 1] > 0.9) or (high is not None and ordered[high - 1] < 0.9)
    assert misses <= 400 * 0.09  # promised: 0.05


def test_a_p99_of_few_requests_is_named_also_in_reports_that_do_not_count_them() -> None:
    report = SharingReport(worker_id="w", alone=ALONE, shared={**ALONE, "ttft_count": 500, "tpot_count": 367})
    assert few(report) == ["alone.ttft_ms_p99", "alone.tpot_ms_p99", "shared.tpot_ms_p99"]
