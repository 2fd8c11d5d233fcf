"""A request on its way through the transformers engine, and how its tokens become a Generation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...fabric.contract.records import Sampling
from .base import Generation
from .stops import StopMatcher

Marks = list[tuple[int, int]]  # (first token, policy version) of each stretch, in order


@dataclass(slots=True, kw_only=True)
class Admission:
    """A request as the loop needs it.

    input_ids: prompt and prior tokens, at least one; the last `prior_count` of them are prior. token_count_max: new
    tokens it may make, at least one. stop_ids: all that end it. matcher: looks for its stop texts; has taken the prior
    tokens, and `fed_count` new ones. cache_salt: as the request's. arrived_at_s: when it was handed over. asked:
    fields of sampling that are not at their defaults.
    marks: which version began at which of its tokens; replaced as a whole, never changed in place, so that another
    thread may read it.
    """

    request_id: str
    input_ids: list[int]
    token_count_max: int
    sampling: Sampling
    prior_count: int = 0
    stop_ids: tuple[int, ...] = ()
    matcher: StopMatcher | None = None
    fed_count: int = 0
    cache_salt: str = ""
    arrived_at_s: float = 0.0
    marks: Marks = field(default_factory=list)
    asked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.asked = frozenset(self.sampling.row())

    @property
    def context_tokens(self) -> int:
        """The most it can come to hold."""
        return len(self.input_ids) + self.token_count_max

    def find_stop(self, tokens: list[int]) -> bool:
        """Whether the newest tokens end it by a text; `tokens` end with all that were not looked at."""
        return self.matcher is not None and self.matcher.feed(tokens) is not None

    def begin_version(self, token_count: int, version: int) -> None:
        """Tokens from `token_count` on are made by `version`."""
        self.marks = [mark for mark in self.marks if mark[0] < token_count] + [(token_count, version)]

    def generation(
        self, finish_reason: str, tokens: list[int], logprobs: list[float], error: str | None = None
    ) -> Generation:
        """What it has made, as it is handed out."""
        return Generation(
            request_id=self.request_id,
            finish_reason=finish_reason,
            completion_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=stretches(self.marks, len(tokens)),
            error=error,
        )


def stretches(marks: Marks, token_count: int) -> tuple[tuple[int, int, int], ...]:
    """(start, end, version) rows that cover tokens [0, token_count). Marks past the end are ignored.

    marks: ascending first tokens, the first of them 0; may be empty only if token_count is 0.
    """
    ends = [start for start, _ in marks[1:]] + [token_count]
    rows = [(start, min(end, token_count), version) for (start, version), end in zip(marks, ends, strict=False)]
    return tuple((start, end, version) for start, end, version in rows if start < end)
