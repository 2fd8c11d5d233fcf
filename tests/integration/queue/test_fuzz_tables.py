"""The fuzz of the broker's tables in short: every eighth, for a second; `make fuzz` does all, at length."""

from __future__ import annotations

import pytest

from tests.fuzz.fuzz_tables import fuzz_batch
from tests.fuzz.tables import tables
from tests.fuzz.world import world

SECONDS = 1.0
EVERY = 8

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_bad_rows_in_any_table_cost_themselves_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    with world(tmp_path_factory.mktemp("fuzz")) as fabric:
        outcomes = []
        for table in tables()[::EVERY]:
            outcomes.append(fuzz_batch(fabric, [table], SECONDS, seed=1))
            assert outcomes[-1].problems == [], "\n".join(map(str, outcomes))
    assert sum(rows.written for outcome in outcomes for rows in outcome.rows) > len(outcomes)
