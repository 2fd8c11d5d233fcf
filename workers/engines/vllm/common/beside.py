"""What a vLLM tells beside tokens, as side arrays (fabric/contract/sides.py), and what it does not tell.

Letters: T tokens, k likeliest tokens beside each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .....fabric.contract.limits import LOGPROB_COUNT_MAX
from .....fabric.contract.records import Float32, Int32
from .....fabric.contract.sides import Side

CANNOT = {
    "kept_tokens": (
        f"vLLM tells the likeliest tokens alone: with top_k of at most {LOGPROB_COUNT_MAX}, logprobs="
        f"{LOGPROB_COUNT_MAX} gives all that were left, as id -1 marks what was cut"
    ),
    "routed_experts": (
        "vLLM tells them by its second model runner alone, which needs Triton, which its build for CPUs has not: not"
        " tried on a GPU, and so not taken from there"
    ),
}
NEVER = np.float32(-np.inf)

Likeliest = tuple[Int32, Float32]  # ids and log-probabilities, (T, k), likeliest first


def top_sides(likeliest: Likeliest, start: int = 0, prefix: str = "") -> tuple[Side, Side]:
    """Return the arrays for the likeliest tokens beside those from place `start` on.

    likeliest: where its log-probability is -inf, there were fewer: the id becomes -1.
    """
    ids, logprobs = likeliest
    end = start + len(ids)
    left = np.where(np.isneginf(logprobs), np.int32(-1), ids)
    return (
        Side(name=f"{prefix}top_ids", start=start, end=end, array=left),
        Side(name=f"{prefix}top_logprobs", start=start, end=end, array=logprobs),
    )


def made_sides(found: Any, count: int) -> tuple[Side, ...]:
    """Return what vLLM tells beside tokens that it has made. found: its FlatLogprobs. count: k, at least 1."""
    rows = [
        likeliest_of(found.token_ids[start:end], found.logprobs[start:end], count)
        for start, end in zip(found.start_indices, found.end_indices, strict=True)
    ]
    return top_sides(table(rows, count))


def prompt_sides(found: Any, count: int) -> tuple[Side, ...]:
    """Return what vLLM tells of tokens that it has read: (T,), and the likeliest there, all before place 0.

    Args:
        found: its FlatLogprobs, whose first place is empty; then each token, and the likeliest there.
        count: k; 0: of the tokens alone.
    """
    token_count = len(found)
    ids = np.full((token_count, count + 1), -1, dtype=np.int32)
    logprobs = np.full((token_count, count + 1), NEVER)
    ids[1:] = np.array(found.token_ids, dtype=np.int32).reshape(token_count - 1, count + 1)
    logprobs[1:] = np.array(found.logprobs, dtype=np.float32).reshape(token_count - 1, count + 1)
    own = logprobs[:, 0].copy()
    own[0] = np.nan
    told = Side(name="prompt_logprobs", start=-token_count, end=0, array=own)
    return (told, *top_sides((ids[:, 1:], logprobs[:, 1:]), -token_count, "prompt_")) if count else (told,)


def likeliest_of(ids: Sequence[int], logprobs: Sequence[float], count: int) -> tuple[Sequence[int], Sequence[float]]:
    """Return the `count` likeliest, likeliest first, of what vLLM tells beside one token.

    That is the drawn token, then the likeliest. A drawn one that is among them may be there once: not where it belongs.
    """
    if len(ids) > count:
        return ids[1 : count + 1], logprobs[1 : count + 1]
    order = sorted(range(len(ids)), key=lambda place: -logprobs[place])
    return [ids[place] for place in order], [logprobs[place] for place in order]


def table(rows: Sequence[tuple[Sequence[int], Sequence[float]]], count: int) -> Likeliest:
    """Return rows of ids and log-probabilities as arrays. Raises ValueError: they are not all `count` long."""
    shape = len(rows), count
    ids = np.array([row[0] for row in rows], dtype=np.int32).reshape(shape)
    return ids, np.array([row[1] for row in rows], dtype=np.float32).reshape(shape)
