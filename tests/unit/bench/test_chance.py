"""Do the bench's tests of two samples tell what is alike from what is not?"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.bench.training.chance import chance, largest_gap, mean_distance


def test_the_chance_of_the_farthest_way_to_divide_is_its_share_of_all_ways() -> None:
    assert chance([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], mean_distance) == 2 / math.comb(10, 5)


def test_equal_samples_are_as_near_as_any_way_to_divide() -> None:
    assert chance([1, 2, 3], [1, 2, 3], mean_distance) == 1
    assert chance([5, 5], [5, 5], largest_gap) == 1


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([1, 2, 3], [4, 5], 1.0), ([1, 2], [1, 2], 0.0), ([1, 1, 3, 3], [1, 3, 3, 3], 0.25), ([1, 3], [2], 0.5)],
)
def test_the_largest_gap_of_cumulative_shares(one: list[float], other: list[float], expected: float) -> None:
    assert largest_gap(np.array(one, float), np.array(other, float)) == expected


def test_chances_of_like_samples_are_uniform_and_those_of_unlike_ones_are_small() -> None:
    dice = np.random.default_rng(5)
    like = [
        chance(dice.geometric(0.05, 60).tolist(), dice.geometric(0.05, 60).tolist(), largest_gap, seed)
        for seed in range(12)
    ]
    assert 0.3 < float(np.mean(like)) < 0.7
    unlike = chance(dice.geometric(0.05, 60).tolist(), dice.geometric(0.15, 60).tolist(), largest_gap)
    assert unlike < 0.001
