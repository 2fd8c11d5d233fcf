"""The curve of a run's rewards: what its rollouts earned, by the policy version that made them, in a bounded table.

- A bucket covers `width` versions; widths are powers of two, and a bucket's number is its first version // width.
- When there would be more than BUCKET_COUNT_MAX, the width doubles until half as many are left. So a rollout costs the
  same however long the run has lasted, and parts that were kept apart (shards) can be put together.

Twin of queue/lua/jobs/use/curve.lua.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BUCKET_COUNT_MAX = 256
FINITE_MAX = 1e300  # what is made of larger rewards may be no number that JSON knows


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBucket:
    """Rollouts whose oldest tokens are of policy versions [version, version + width); version -1: of none."""

    version: int
    width: int
    count: int
    reward_sum: float
    reward_square_sum: float
    reward_min: float
    reward_max: float
    token_sum: int
    """Tokens of completions, observations included."""

    @property
    def reward_mean(self) -> float:
        """The mean reward of its rollouts."""
        return self.reward_sum / self.count

    @property
    def reward_deviation(self) -> float:
        """Standard deviation of its rollouts' rewards, 0 where they are all alike.

        It is at most half of what lies between the least and the most: what the rounding of the sums adds is cut off.
        """
        variance = self.reward_square_sum / self.count - self.reward_mean * self.reward_mean
        return min(math.sqrt(max(0.0, variance)), (self.reward_max - self.reward_min) / 2)

    @property
    def token_mean(self) -> float:
        """Tokens of a completion."""
        return self.token_sum / self.count


Curve = tuple[RewardBucket, ...]


def put_together(parts: Iterable[RewardBucket], count_max: int = BUCKET_COUNT_MAX) -> Curve:
    """Put buckets of any widths together into one curve, by version, of at most `count_max` (2 or more) buckets."""
    parts = tuple(parts)
    width = max((part.width for part in parts), default=1)
    found = _merged(parts, width)
    if len(found) > count_max:
        while len(found) > max(2, count_max // 2):
            width *= 2
            found = _merged(found.values(), width)
    return tuple(found[number] for number in sorted(found))


def _merged(parts: Iterable[RewardBucket], width: int) -> dict[int, RewardBucket]:
    found: dict[int, RewardBucket] = {}
    for part in parts:
        number = part.version // width
        known = found.get(number)
        found[number] = RewardBucket(
            version=max(-1, number * width),
            width=width,
            count=part.count + (known.count if known else 0),
            reward_sum=part.reward_sum + (known.reward_sum if known else 0.0),
            reward_square_sum=part.reward_square_sum + (known.reward_square_sum if known else 0.0),
            reward_min=min(part.reward_min, known.reward_min) if known else part.reward_min,
            reward_max=max(part.reward_max, known.reward_max) if known else part.reward_max,
            token_sum=part.token_sum + (known.token_sum if known else 0),
        )
    return found


def read_curve(rows: Mapping[bytes, bytes]) -> Curve:
    """Read a shard's curve as the broker keeps it: number → "count sum squares min max tokens", and "width"."""
    width = int(rows.get(b"width", b"1"))
    found = []
    for number, row in rows.items():
        if number == b"width":
            continue
        count, total, squares, least, most, tokens = row.split()
        found.append(
            RewardBucket(
                version=max(-1, int(number) * width),
                width=width,
                count=int(count),
                reward_sum=float(total),
                reward_square_sum=float(squares),
                reward_min=float(least),
                reward_max=float(most),
                token_sum=int(tokens),
            )
        )
    return tuple(sorted(found, key=lambda bucket: bucket.version))
