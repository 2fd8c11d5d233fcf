"""How the bench of evaluation turns moments at which groups came into seconds a group."""

from __future__ import annotations

import pytest

from tests.bench.evaluation.main import seconds_a_group

BATCH, PERIOD_S, WINDOW_S = 8, 1.9, 45.0


@pytest.mark.parametrize("phase", [index / 10 for index in range(10)])
def test_where_a_window_cuts_batches_says_little(phase: float) -> None:
    batches_s = [(index + phase) * PERIOD_S for index in range(100)]
    ended_s = [moment_s for moment_s in batches_s if moment_s < WINDOW_S for _ in range(BATCH)]
    assert seconds_a_group(ended_s) == pytest.approx(PERIOD_S / BATCH, rel=0.003)


def test_slower_groups_take_longer() -> None:
    assert seconds_a_group([0.0, 2.04, 4.08]) == pytest.approx(2.04)
