"""The scheduler page: a few words of shared memory between a worker and the vLLM scheduler that it limits.

- Each word has one writer. A write of eight aligned bytes is seen whole by the other side.
- The worker writes limits, which the scheduler reads at every step: no call, no queue, no lock in between.
- The scheduler writes what it does at every step.
- Behind the words lies a text of the guard (scheduler.py), written a few times a second. Its sequence number is odd
  while it is written; a reader that sees the number change, or odd, reads again later.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np

from ....serving.guarding.guard import GuardOrders
from ...base import EngineLimits
from ..common.backend import LifeSigns
from ..common.shared import SharedFile

WORDS = 24
NO_LIMIT = -1
RUNNING_MAX, KV_MAX, STEP_TOKENS_MAX, IS_HELD = 0, 1, 2, 3  # written by the worker
IS_GUARDED, IS_LENT, COMPUTE_MAX_PPM, POLICY = 4, 5, 6, 7  # the worker's orders to the guard
STEPS, RUNNING, KV_USED_PPM, SCHEDULED_TOKENS, STEP_AT_NS = 8, 9, 10, 11, 12  # written by the scheduler
TEXT_SEQ, TEXT_BYTES = 13, 14
LENT_UNTIL_NS = 15  # the worker's, too
KV_CAPACITY = 16  # tokens; the scheduler's
TEXT_BYTES_MAX = 8192
SIZE_BYTES = WORDS * 8 + TEXT_BYTES_MAX


class SchedulerPage:
    """One mapped page. int64 words; see the constants above."""

    def __init__(self, path: Path, file: SharedFile | None = None) -> None:
        with path.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), SIZE_BYTES)
        self._file = file
        self.path = path
        self.words = np.frombuffer(self._map, dtype=np.int64, count=WORDS)

    @classmethod
    def create(cls) -> SchedulerPage:
        """Make a new page without limits."""
        file = SharedFile("rollfab-page", SIZE_BYTES)
        page = cls(file.path, file)
        page.set_limits(EngineLimits())
        page.order(GuardOrders())
        return page

    def close(self) -> None:
        """Let go of the file that `create` made."""
        if self._file is not None:
            self._file.close()

    def set_limits(self, limits: EngineLimits) -> None:
        """Write the limits (the worker's side)."""
        rows = ((RUNNING_MAX, limits.running_count), (KV_MAX, limits.kv_tokens), (STEP_TOKENS_MAX, limits.step_tokens))
        for word, value in rows:
            self.words[word] = NO_LIMIT if value is None else value

    def hold(self, is_held: bool) -> None:
        """Write whether any step may begin (the worker's side)."""
        self.words[IS_HELD] = is_held

    def guard_from_now(self) -> None:
        """Write that the engine has started: what it computes from here on is under the guard (the worker's side)."""
        self.words[IS_GUARDED] = 1

    def order(self, orders: GuardOrders) -> None:
        """Write orders to the guard (the worker's side)."""
        cap = orders.compute_fraction_max
        self.words[LENT_UNTIL_NS] = NO_LIMIT if math.isinf(orders.until_s) else int(orders.until_s * 1e9)
        self.words[IS_LENT], self.words[POLICY] = orders.is_lent, orders.policy
        self.words[COMPUTE_MAX_PPM] = NO_LIMIT if cap is None else round(cap * 1e6)

    def orders(self) -> GuardOrders:
        """Read the orders to the guard (the scheduler's side)."""
        is_lent, cap, policy = self.words[IS_LENT : POLICY + 1].tolist()
        until_ns = int(self.words[LENT_UNTIL_NS])
        return GuardOrders(
            is_lent=bool(is_lent),
            until_s=math.inf if until_ns < 0 else until_ns / 1e9,
            compute_fraction_max=None if cap < 0 else cap / 1e6,
            policy=policy,
        )

    def say(self, text: bytes) -> None:
        """Write the guard's text (the scheduler's side)."""
        assert len(text) <= TEXT_BYTES_MAX
        self.words[TEXT_SEQ] += 1
        self._map[WORDS * 8 : WORDS * 8 + len(text)] = text
        self.words[TEXT_BYTES] = len(text)
        self.words[TEXT_SEQ] += 1

    def said(self) -> bytes | None:
        """Read the guard's text (the worker's side); None: there is none yet, or it is being written at this moment."""
        sequence = int(self.words[TEXT_SEQ])
        text = self._map[WORDS * 8 : WORDS * 8 + int(self.words[TEXT_BYTES])]
        return text if text and sequence % 2 == 0 and int(self.words[TEXT_SEQ]) == sequence else None

    def limits(self) -> EngineLimits:
        """Read the limits (the scheduler's side)."""
        running, kv, step = (int(self.words[word]) for word in (RUNNING_MAX, KV_MAX, STEP_TOKENS_MAX))
        return EngineLimits(
            running_count=None if running < 0 else running,
            kv_tokens=None if kv < 0 else kv,
            step_tokens=None if step < 0 else step,
        )

    def life_signs(self) -> LifeSigns:
        """Read what the scheduler does (the worker's side)."""
        words = self.words
        return LifeSigns(
            step_count=int(words[STEPS]),
            running_count=int(words[RUNNING]),
            kv_used_fraction=int(words[KV_USED_PPM]) / 1e6,
            kv_capacity_tokens=int(words[KV_CAPACITY]),
        )
