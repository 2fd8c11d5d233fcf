"""Are the figures of a bucket of rewards those of its rewards, whatever sums are rounded to?"""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.queue.curve import RewardBucket, put_together


def bucket(rewards: list[float]) -> RewardBucket:
    """Count rewards one by one, as they come."""
    parts = [
        RewardBucket(
            version=0,
            width=1,
            count=1,
            reward_sum=each,
            reward_square_sum=each * each,
            reward_min=each,
            reward_max=each,
            token_sum=1,
        )
        for each in rewards
    ]
    (found,) = put_together(parts)
    return found


@given(st.floats(-1e6, 1e6), st.integers(1, 200))
def test_equal_rewards_do_not_deviate(reward: float, count: int) -> None:
    assert bucket([reward] * count).reward_deviation == 0


@given(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.7, 1.0]), min_size=1, max_size=50))
def test_the_deviation_is_that_of_the_rewards(rewards: list[float]) -> None:
    assert bucket(rewards).reward_deviation == pytest.approx(statistics.pstdev(rewards), abs=1e-7)
