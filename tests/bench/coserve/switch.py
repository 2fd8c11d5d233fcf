"""The switch between arms: shared memory that the bench writes, and the policy in the lent engine reads at every step.

- So one engine serves all arms, and no arm begins with a cold one.
- It also carries what an arm is told beforehand: a profile (for the rules that want one) and the arrivals to come (for
  the arm that knows the future); and back, when the policy shut after an arrival, and how much later.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from rollfab.deploy.replay.records import Arrival

ARM, ROUND, PREFILL_NS, STEP_NS, ARRIVAL_COUNT, RECLAIM_COUNT, STEP_TOKENS = range(7)
HEAD_WORDS, RECLAIMS_MAX, ARRIVALS_MAX = 16, 4096, 8192
WORDS = HEAD_WORDS + RECLAIMS_MAX + 2 * ARRIVALS_MAX


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured once, before anything is shared: seconds of prefill per prompt token, and of one decode step."""

    prefill_s_per_token: float
    step_s: float


class Switch:
    """One mapped file. int64 words; see the constants above."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), WORDS * 8)
        self.path = path
        self.words = np.frombuffer(self._map, dtype=np.int64)

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new one, at arm 0."""
        path.write_bytes(bytes(WORDS * 8))
        return cls(path)

    # ---- the bench's side

    def set_profile(self, profile: Profile) -> None:
        """For rules that want one."""
        self.words[PREFILL_NS] = int(1e9 * profile.prefill_s_per_token)
        self.words[STEP_NS] = int(1e9 * profile.step_s)

    def set_arm(self, index: int) -> None:
        """From the next step on."""
        self.words[ARRIVAL_COUNT] = 0
        self.words[ARM] = index
        self.words[ROUND] += 1

    def announce(self, arrivals: Sequence[Arrival], start_at_s: float) -> None:
        """What will come, for the arm that knows; reclaims count from here on."""
        rows = [(int(1e9 * (start_at_s + each.at_s)), each.prompt_tokens) for each in arrivals[:ARRIVALS_MAX]]
        begin = HEAD_WORDS + RECLAIMS_MAX
        self.words[begin : begin + 2 * len(rows)] = np.array(rows, dtype=np.int64).ravel()
        self.words[ARRIVAL_COUNT] = len(rows)
        self.words[RECLAIM_COUNT] = 0

    def reclaims_ms(self) -> tuple[float, ...]:
        """Since the last announcement: those while an arm was warming up are not of its round."""
        count = min(int(self.words[RECLAIM_COUNT]), RECLAIMS_MAX)
        return tuple(float(each) / 1e6 for each in self.words[HEAD_WORDS : HEAD_WORDS + count])

    # ---- the policy's side

    def profile(self) -> Profile:
        """As it was set."""
        return Profile(prefill_s_per_token=int(self.words[PREFILL_NS]) / 1e9, step_s=int(self.words[STEP_NS]) / 1e9)

    def arrivals(self) -> np.ndarray:
        """int64 (A, 2): when, in nanoseconds of the monotonic clock, and tokens of the prompt; by time."""
        begin, count = HEAD_WORDS + RECLAIMS_MAX, int(self.words[ARRIVAL_COUNT])
        return self.words[begin : begin + 2 * count].reshape(count, 2)

    def note_reclaim(self, passed_s: float) -> None:
        """Rollouts stood still so long after an arrival."""
        count = int(self.words[RECLAIM_COUNT])
        if count < RECLAIMS_MAX:
            self.words[HEAD_WORDS + count] = int(1e9 * passed_s)
            self.words[RECLAIM_COUNT] = count + 1
