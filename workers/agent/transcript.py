"""One trajectory's tokens as they come, the spans that made them, and a digest of the context so far.

- The tokens are one growing sequence: the prompt, then turns (mask 1) and observations (mask 0) in their order.
- `digest` covers every token and every reward so far. A turn is asked for under it and its result carries it, so an
  agent that continues a trajectory can check that it came to the very context that each turn was made in.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from ...fabric.contract.records import Float32, Int32, Span, TurnResult, UInt8


class Transcript:
    """The conversation so far in one trajectory."""

    def __init__(self) -> None:
        self.prompt_ids: Int32 = np.zeros(0, np.int32)
        self.spans: list[Span] = []
        self.rewards: list[float] = []
        self._ids: list[Int32] = []
        self._logprobs: list[Float32] = []
        self._mask: list[UInt8] = []
        self._length = 0
        self._known_ids: Int32 | None = None  # the prompt and the first `_known_count` parts of `_ids`
        self._known_count = 0
        self._digest = xxhash.xxh3_64()

    def begin(self, prompt_ids: Int32) -> None:
        """Set the prompt: the tokens of the first observation."""
        self.prompt_ids = prompt_ids
        self._digest.update(prompt_ids.tobytes())

    def add_turn(self, result: TurnResult) -> None:
        """Add a turn's tokens, written by the policy."""
        start = self._length
        self._add(result.completion_ids, result.logprobs, 1)
        self.spans += [Span(start + s.start, start + s.end, s.worker_id, s.policy_version) for s in result.spans]

    def add_step(self, reward: float, ids: Int32) -> None:
        """Add the environment's reward for the turn, and the tokens of its observation, which may be empty."""
        self.rewards.append(reward)
        # Six digits tell another world's reward apart, and hide that another machine adds in another order.
        self._digest.update(struct.pack("<I", len(ids)) + f"{reward:.6g} ".encode())
        self._add(ids, np.zeros(len(ids), np.float32), 0)

    def context(self) -> Int32:
        """Return all tokens so far. Extends the array that it built for the last turn."""
        known, parts = self._known_ids, self._ids[self._known_count :]
        if known is None or parts:
            known = self._known_ids = np.concatenate((self.prompt_ids if known is None else known, *parts))
            self._known_count = len(self._ids)
        return known

    def digest(self) -> str:
        """Return the digest of all so far, as 16 hexadecimal digits."""
        return str(self._digest.hexdigest())

    def tokens(self) -> tuple[Int32, Float32, UInt8]:
        """Return all after the prompt: ids, logprobs and mask, each of shape (T,); logprobs are 0 where the mask is."""
        return _joined(self._ids, np.int32), _joined(self._logprobs, np.float32), _joined(self._mask, np.uint8)

    def _add(self, ids: Int32, logprobs: Float32, mask: int) -> None:
        self._digest.update(ids.tobytes())
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self._mask.append(np.full(len(ids), mask, np.uint8))
        self._length += len(ids)


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
