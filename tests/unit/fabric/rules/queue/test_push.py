"""What a refused push is told."""

from __future__ import annotations

import pytest

from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.rules.queue.push import too_many_bytes, too_many_open


@pytest.mark.parametrize(
    ("shard_count", "holder", "rest"),
    [
        (1, "run 'r1' holds 18 trajectories", "raise trajectory_count_max"),
        (3, "run 'r1' in one of its 3 shards holds 18", "trajectory_count_max (it is 60, for all shards together)"),
    ],
)
def test_a_run_that_is_full_says_whose_numbers_it_tells(shard_count: int, holder: str, rest: str) -> None:
    """A shard is full at its part of the limit, which nobody has set."""
    run = RunConfig(run_id="r1", model="tiny", environment="e", shard_count=shard_count, trajectory_count_max=60)
    text = str(too_many_open(run, 18, 60 // shard_count, 4))
    assert text.startswith(holder) and f"its limit is {60 // shard_count}" in text and text.endswith(rest)
    assert str(too_many_bytes(run, 9, 9, 4)).startswith(holder.partition(" 18")[0])
