"""What the simulated model says: a pure function of the tokens before and of the weights. The checkers' yardstick.

The next token follows from a checksum of the whole context and one of the weights, so a token that was lost, doubled,
moved or made with other weights than its span says changes every token after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rollfab.fabric.contract.records import Int32, Sampling
from rollfab.fabric.model.tokenizer import CharTokenizer

TEXT = CharTokenizer()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
IDS: list[int] = TEXT.encode(LETTERS).tolist()
SHAPES = {"body.lora_A": (12, 8), "head.lora_A": (16,)}  # an adapter's names: of no model


def tensors(version: int, publisher: int) -> dict[str, NDArray[np.float32]]:
    """Weights of a version as a trainer's `publisher`-th life makes them; a third changes from one to the next."""
    made = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        places = np.arange(int(np.prod(shape)), dtype=np.float32)
        moved = (places % 3 == 0) * (version * 13 + publisher * 101 + 1)
        made[name] = ((places * 7 + moved + index) % 251).astype(np.float32).reshape(shape)
    return made


def weights_digest(bits: Mapping[str, NDArray[Any]]) -> int:
    """A checksum of weights, by name."""
    digest = 0
    for name in sorted(bits):
        digest = crc32(np.ascontiguousarray(bits[name]).tobytes(), digest)
    return digest


def context_of(*parts: Int32) -> int:
    """A checksum of tokens."""
    state = 0
    for part in parts:
        state = crc32(part.astype("<i4").tobytes(), state)
    return state


def extend(context: int, token: int) -> int:
    """The checksum with one more token."""
    return crc32(token.to_bytes(4, "little"), context)


def next_token(context: int, digest: int) -> tuple[int, np.float32]:
    """The token that follows, and its log-probability."""
    number = crc32(digest.to_bytes(4, "little"), context)
    return IDS[number % len(IDS)], np.float32(-(number >> 8) % 1000 / 1000 - 1)


def ending(sampling: Sampling, count: int, last: int | None) -> str:
    """Why a turn of `count` tokens ends: stop, length, or "" when it does not."""
    if last is not None and (last in sampling.stop_ids or TEXT.decode([last]) in sampling.stop):
        return "stop"
    return "length" if count >= sampling.max_tokens else ""
