"""A tiny model learns a game that needs a tool, played by an agent that is written against `openai` alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.examples import doors

from tests.support.processes.fabric_processes import processes

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.redis, pytest.mark.timeout(900)]


READS = 0.55  # who never looks has 0.2, who looks and does not read what the tool says 0.4


def test_a_tool_is_learnt_through_openai_s_api(tmp_path: Path) -> None:
    """That the policy comes to look and to read; whether it plays well within 100 steps is luck of its exploring."""
    with processes(tmp_path) as fabric:
        fabric.start_roles(agent=("--environment", "doors=docs.examples.doors:play"))
        rewards = doors.train(tmp_path / "training", url=fabric.url, enough=READS)
    assert rewards[0] <= 0.3
    assert sum(rewards[-3:]) / 3 >= READS
