"""What `rollfab bench affinity` makes of its rounds: hits, tokens saved, and ratios with their spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollfab.fabric.contract.records import Group
from tests.bench.affinity.cast import Read, read_so_far
from tests.bench.affinity.main import FIGURES, LONG, WORKERS, figures, ratio_over
from tests.bench.measure import Figure
from tests.bench.overhead.arms import Round
from tests.bench.witness import SharedCount
from tests.support.records import new_rollout


def test_what_all_workers_read_is_added_up_and_of_a_round_is_the_difference(tmp_path: Path) -> None:
    for pid, prompt_count, cached_count in ((1, 100, 40), (2, 300, 60)):
        for kind, count in (("prompt", prompt_count), ("cached", cached_count)):
            with SharedCount(tmp_path / f"{pid}.{kind}") as shared:
                shared.set(count)
    assert read_so_far(tmp_path) == Read(400, 100)
    assert Read(400, 100) - Read(200, 50) == Read(200, 50)
    assert Read(200, 50).hit_fraction == 0.25


def test_rounds_tell_hits_and_tokens_saved_beside_tokens_a_second() -> None:
    groups = [Group(group_id="g", task_id="t", rollouts=(new_rollout(),))]
    cpu_s = dict.fromkeys([*WORKERS, "broker"], 1.0)
    made = Round(duration_s=2.0, token_count=100, cpu_s=cpu_s, groups=groups)
    found = figures(replace(LONG, trajectory_count=4, turn_count=2), [(made, Read(200, 50)), (made, Read(200, 150))])
    assert set(found) == set(FIGURES)
    assert found["tokens_per_s"].rounds == (50.0, 50.0)
    assert found["hit_fraction"].rounds == (0.25, 0.75)
    assert found["saved_tokens"].rounds == (50.0, 150.0)
    assert found["read_tokens"].rounds == (150.0, 50.0)
    assert found["worker_cpu_ms_per_turn"].rounds == (250.0, 250.0)


def test_a_ratio_is_that_of_neighbours_and_an_arm_that_saved_nothing_is_divided_by_one() -> None:
    found = ratio_over(Figure((30.0, 40.0, 50.0)), Figure((10.0, 20.0, 0.0)))
    assert found == {"median": 3.0, "spread": (2.0, 50.0)}
