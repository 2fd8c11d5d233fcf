"""The main job, as a newcomer starts it: it learns, a worker is killed, nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.until import PATIENCE

KEYS = {
    "steps",
    "reward_first",
    "reward_last",
    "rollouts",
    "turns",
    "lost",
    "duplicated",
    "resumed_turns",
    "delta_ratio",
    "seconds",
}


def demo(output: Path, *words: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "rollfab", "demo", "--json", "--output", str(output), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE * 480,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_frozenlake_is_learnt_through_the_whole_fabric_in_spite_of_a_kill(tmp_path: Path) -> None:
    summary = demo(tmp_path)
    assert set(summary) >= KEYS
    assert summary["kills"] == 1
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
    assert summary["reward_first"] <= 0.2
    assert summary["reward_last"] >= 0.9
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(500)
def test_guess_the_number_is_played_too(tmp_path: Path) -> None:
    # Learning it takes seven minutes of a CPU; FrozenLake shows that the fabric learns
    summary = demo(tmp_path, "--environment", "guess-the-number", "--steps", "8")
    assert summary["steps"] == 8
    assert (summary["lost"], summary["duplicated"]) == (0, 0)
    assert summary["turns"] > summary["rollouts"] > 0
