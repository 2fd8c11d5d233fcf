"""What commits cost on a GPU, by calculation: bytes by bandwidths, and the page says what the function does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfab.deploy.gpu.costs import cost_before, cost_now, cost_table

PAGE = Path(__file__).resolve().parents[4] / "docs" / "gpu.md"


def test_the_page_has_the_table_that_is_calculated() -> None:
    assert "\n".join(cost_table()) in PAGE.read_text("utf-8")


def test_costs_are_bytes_by_bandwidths() -> None:
    # 7B, one rank, 1 %: 70 M changes of 6 bytes at 25 GB/s; sectors of 32 bytes, read and written, at 3.35 TB/s
    now = cost_now(7e9, 1, 0.01)
    assert now.side_s == pytest.approx(70e6 * 6 / 25e9)
    sectors = 7e9 / 16 * (1 - 0.99**16)
    assert now.pause_s == pytest.approx((70e6 * 6 + 64 * sectors) / 3.35e12)
    assert now.stall_s == 0

    # 32B on four ranks: 16 GB each come to the host, pageable
    before = cost_before(32e9, 4, 0.01)
    assert before.stall_s == pytest.approx(16e9 / 6e9)
    assert before.pause_s > 80e6 * 10 / 6e9
    assert cost_before(7e9, 1, 0.01).stall_s == 0, "one rank has a copy on the host"
