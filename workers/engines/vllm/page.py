"""The page: a few words of shared memory between a worker and the vLLM scheduler that it limits.

- Each word has one writer. A write of eight aligned bytes is seen whole by the other side.
- The worker writes limits, which the scheduler reads at every step: no call, no queue, no lock in between.
- The scheduler writes what it does at every step.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from ..base import EngineLimits
from .door import Pulse
from .shared import SharedFile

WORDS = 16
NO_LIMIT = -1
RUNNING_MAX, KV_MAX, STEP_TOKENS_MAX, IS_HELD = 0, 1, 2, 3  # written by the worker
STEPS, RUNNING, KV_USED_PPM, SCHEDULED_TOKENS, STEP_AT_NS = 8, 9, 10, 11, 12  # written by the scheduler


class Page:
    """One mapped page. int64 words; see the constants above."""

    def __init__(self, path: Path, file: SharedFile | None = None) -> None:
        with path.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), WORDS * 8)
        self._file = file
        self.path = path
        self.words = np.frombuffer(self._map, dtype=np.int64)

    @classmethod
    def create(cls) -> Page:
        """A new page without limits."""
        file = SharedFile("rollfab-page", WORDS * 8)
        page = cls(file.path, file)
        page.set_limits(EngineLimits())
        return page

    def close(self) -> None:
        """Let go of the file that `create` made."""
        if self._file is not None:
            self._file.close()

    def set_limits(self, limits: EngineLimits) -> None:
        """The worker's side."""
        rows = ((RUNNING_MAX, limits.running_count), (KV_MAX, limits.kv_tokens), (STEP_TOKENS_MAX, limits.step_tokens))
        for word, value in rows:
            self.words[word] = NO_LIMIT if value is None else value

    def hold(self, is_held: bool) -> None:
        """The worker's side: whether any step may begin."""
        self.words[IS_HELD] = is_held

    def limits(self) -> EngineLimits:
        """The scheduler's side."""
        running, kv, step = (int(self.words[word]) for word in (RUNNING_MAX, KV_MAX, STEP_TOKENS_MAX))
        return EngineLimits(
            running_count=None if running < 0 else running,
            kv_tokens=None if kv < 0 else kv,
            step_tokens=None if step < 0 else step,
        )

    def pulse(self) -> Pulse:
        """The worker's side."""
        words = self.words
        return Pulse(
            step_count=int(words[STEPS]),
            running_count=int(words[RUNNING]),
            kv_used_fraction=int(words[KV_USED_PPM]) / 1e6,
        )
