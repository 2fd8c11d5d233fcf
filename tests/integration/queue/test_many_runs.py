"""Many runs on one broker, most of them idle: they keep nobody waiting."""

from __future__ import annotations

import pytest

from tests.support.processes.fabric_processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(150)]

IDLE_COUNT = 48  # an agent waits at more places than a client has connections by default


def test_idle_runs_keep_no_other_run_waiting(fabric: Processes) -> None:
    for index in range(IDLE_COUNT):
        fabric.new_run(f"idle{index}", "walk")

    run = fabric.new_run("busy", "walk", environment_options={"turns": 2, "pace_s": 0.0, "tokens": 10})
    for names in (["a", "b"], ["c", "d"], ["e", "f"]):
        run.submit([{"seed": 1}] * 2, group_size=4, group_ids=names)
        groups = fabric.collect(run, 2, 20.0)
        assert sorted(group.group_id for group in groups) == names
