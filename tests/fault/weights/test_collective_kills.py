"""Some of the faults of collective_kills.py, in the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from tests.fault.weights.collective_kills import run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.long, pytest.mark.redis, pytest.mark.timeout(600)]


def test_whatever_dies_or_freezes_in_a_round_no_other_process_does_and_the_version_is_live(tmp_path: Path) -> None:
    with EmbeddedBroker.start(tmp_path / "broker") as broker:
        tally = run(broker.url, tmp_path, kills=30, seed=1)

    assert sum(tally.faults.values()) == 30 and len(tally.faults) > 5
