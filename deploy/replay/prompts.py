"""Makes bodies of requests: prompts of the right length that no prefix cache knows, with completions not cut short.

- Every prompt begins with its own number, so no two of a replay share a cache block. A replay's dice are fresh unless
  told otherwise: a second replay at the same server finds nothing of the first in its cache.
- No seed is sent: sampling is greedy, and vLLM on a CPU fails seeded requests whose prompt is computed in chunks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from .records import Arrival

POOL_TOKENS = 1 << 16
STRIDE = 7919  # prime: neighbours in time begin far apart in the pool
MARK_TOKENS = 4

Endpoint = Literal["completions", "chat"]


class Bodies(Protocol):
    """Makes requests."""

    @property
    def path(self) -> str:
        """The path that they go to."""
        ...

    @property
    def opens_empty(self) -> bool:
        """True if the first event of an answer may bring no token."""
        ...

    def body(self, index: int, arrival: Arrival) -> bytes:
        """Make the body of the request with that number."""
        ...


def _common(model: str, arrival: Arrival) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": arrival.completion_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True)
class TokenPrompts:
    """/v1/completions with token ids: exact lengths, no tokenizer at the server. pool: ids to take prompts from."""

    model: str
    pool: list[int]
    vocabulary_size: int
    path: str = "/v1/completions"
    opens_empty: bool = False

    def body(self, index: int, arrival: Arrival) -> bytes:
        """Make the body of the request with that number."""
        start = index * STRIDE % POOL_TOKENS
        marks = [index // self.vocabulary_size**place % self.vocabulary_size for place in range(MARK_TOKENS)]
        ids = (marks + self.pool[start : start + arrival.prompt_tokens])[: arrival.prompt_tokens]
        return orjson.dumps({"prompt": ids, **_common(self.model, arrival)})


@dataclass(frozen=True)
class ChatPrompts:
    """/v1/chat/completions: as many short words as the prompt has tokens, so its length is right to a few per cent."""

    model: str
    words: list[str]
    path: str = "/v1/chat/completions"
    opens_empty: bool = True

    def body(self, index: int, arrival: Arrival) -> bytes:
        """Make the body of the request with that number."""
        start = index * STRIDE % POOL_TOKENS
        text = f"{index} {' '.join(self.words[start : start + arrival.prompt_tokens])}"
        return orjson.dumps({"messages": [{"role": "user", "content": text}], **_common(self.model, arrival)})


def new_bodies(
    model: str, *, endpoint: Endpoint, vocabulary_size: int, prompt_tokens_max: int, seed: int | None
) -> Bodies:
    """Choose what makes the bodies. seed: of what prompts are made of; None: fresh dice."""
    dice = random.Random(seed)
    count = POOL_TOKENS + prompt_tokens_max
    if endpoint == "chat":
        return ChatPrompts(model, dice.choices("a in it of on or so to we at".split(), k=count))
    return TokenPrompts(model, dice.choices(range(vocabulary_size), k=count), vocabulary_size)
