"""One trajectory's tokens as they come, the spans that made them, and a digest of the context so far.

- The tokens are one growing sequence: the prompt, then turns (mask 1) and observations (mask 0) in their order.
- `digest` covers every token and every reward so far. A turn is asked for under it and its result carries it, so an
  agent that continues a trajectory can check that it came to the very context that each turn was made in.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash

from ...fabric.contract.images import NO_FILES, ImagePlace
from ...fabric.contract.records import Float32, Int32, Side, Span, TurnResult
from ...fabric.contract.sides import WHEN_READ, joined
from ...fabric.model.tokenizer import Tokenizer


class Transcript:
    """The conversation so far in one trajectory."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Int32) -> None:
        """prompt_ids: the tokens of the first observation."""
        self._tokenizer = tokenizer
        self.prompt_ids = prompt_ids
        self.files = NO_FILES  # of images
        self.spans: list[Span] = []
        self.rewards: list[float] = []
        self._ids: list[Int32] = []
        self._logprobs: list[Float32] = []
        self._mask: list[int] = []  # of each part, alike for all of its tokens
        self._length = 0
        self._sides: list[Side] = []
        self._told = -len(prompt_ids)  # the end of the last turn: what follows was read by the next one
        self._ends: dict[str, int] = {}  # where side arrays end that tell of tokens once they were read
        self._known_ids: Int32 | None = None  # the prompt and the first `_known_count` parts of `_ids`
        self._known_count = 0
        self._digest = xxhash.xxh3_64(prompt_ids.tobytes())

    def add_turn(self, result: TurnResult) -> str:
        """Add a turn's tokens, written by the policy; return their text."""
        start = self._length
        self._add(result.completion_ids, result.logprobs, 1)
        self.spans += [Span(start + s.start, start + s.end, s.worker_id, s.policy_version) for s in result.spans]
        for side in result.sides:
            told = self._ends.get(side.name, self._told)
            part = side.part(told - start, self._length - start, start)
            self._sides += [part] if part else []
            if side.name in WHEN_READ:
                self._ends[side.name] = start + side.end
        self._told = self._length
        return self._tokenizer.decode(result.completion_ids)

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

    def images(self) -> tuple[ImagePlace, ...]:
        """Return none: a text has no images."""
        return ()

    def digest(self) -> str:
        """Return the digest of all so far, as 16 hexadecimal digits."""
        return str(self._digest.hexdigest())

    def state(self) -> dict[str, Any]:
        """Return what a snapshot keeps beside texts and rewards."""
        return {"prompt_ids": self.prompt_ids.tolist()}

    def record(self) -> dict[str, Any]:
        """Return the fields of a Rollout that hold its tokens."""
        return {
            "prompt_ids": self.prompt_ids,
            "completion_ids": _joined(self._ids, np.int32),
            "logprobs": _joined(self._logprobs, np.float32),
            "completion_mask": np.repeat(np.array(self._mask, np.uint8), [len(ids) for ids in self._ids]),
            "spans": tuple(self.spans),
            "sides": joined(self._sides),
        }

    def _add(self, ids: Int32, logprobs: Float32, mask: int) -> None:
        self._digest.update(ids.tobytes())
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self._mask.append(mask)
        self._length += len(ids)


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
