"""A request on its way through the transformers engine, and how its tokens become a Generation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...fabric.contract.limits import KEPT_ID_COUNT_MAX
from ...fabric.contract.records import Float32, Int32, Sampling, Side
from ...fabric.contract.sampling import RECORDED
from .base import Generation
from .stops import StopMatcher

Marks = list[tuple[int, int]]  # (first token, policy version) of each stretch, in order


@dataclass(slots=True, kw_only=True)
class Admission:
    """A request as the loop needs it.

    input_ids: prompt and prior tokens, at least one; the last `prior_count` of them are prior. token_count_max: new
    tokens it may make, at least one. stop_ids: all that end it. matcher: looks for its stop texts; has taken the prior
    tokens, and `fed_count` new ones. cache_salt: as the request's. arrived_at_s: when it was handed over;
    first_token_s: from there to its first token; cached_token_count: of input_ids, found in the prefix cache.
    asked: fields of sampling that are not at their defaults.
    marks: which version began at which of its tokens; replaced as a whole, never changed in place, so that another
    thread may read it. told: what is recorded beside tokens; None: nothing is asked for.
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
    first_token_s: float | None = None
    cached_token_count: int = 0
    marks: Marks = field(default_factory=list)
    asked: frozenset[str] = frozenset()
    told: Told | None = None

    def __post_init__(self) -> None:
        self.asked = frozenset(self.sampling.row())
        self.begin_anew()

    @property
    def keeps_too_many(self) -> bool:
        """True if what is left to draw from is more than a turn may record."""
        return self.told is not None and self.told.kept_count > KEPT_ID_COUNT_MAX

    @property
    def reads_all(self) -> bool:
        """True if all of its prompt has to be read, and nothing of it taken from the prefix cache."""
        return self.sampling.prompt_logprobs is not None or self.sampling.routed_experts

    def begin_anew(self) -> None:
        """Forget what was noted beside tokens: they are made from the first one on."""
        self.told = None if RECORDED.isdisjoint(self.asked) else Told(self.sampling, len(self.input_ids))

    def find_stop(self, tokens: list[int]) -> bool:
        """Tell whether the newest tokens end it by a text; `tokens` end with all that were not looked at."""
        return self.matcher is not None and self.matcher.feed(tokens) is not None

    def begin_version(self, token_count: int, version: int) -> None:
        """Tokens from `token_count` on are made by `version`."""
        self.marks = [mark for mark in self.marks if mark[0] < token_count] + [(token_count, version)]

    def generation(
        self, finish_reason: str, tokens: list[int], logprobs: list[float], error: str | None = None
    ) -> Generation:
        """Return what it has made, as it is handed out."""
        return Generation(
            request_id=self.request_id,
            finish_reason=finish_reason,
            completion_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=stretches(self.marks, len(tokens)),
            error=error,
            sides=() if self.told is None else self.told.sides(len(tokens)),
            first_token_s=self.first_token_s,
            cached_token_count=self.cached_token_count,
        )


class Told:
    """What was noted beside the tokens of one request (fabric/contract/sides.py).

    kept_count: ids in all that were left to draw from.
    """

    def __init__(self, sampling: Sampling, input_count: int) -> None:
        """input_count: prompt and prior tokens."""
        self.kept_count = 0
        self._input_count = input_count
        self._top: list[tuple[Int32, Float32]] = []
        self._kept: list[Int32] = []
        self._experts: list[Any] = []
        self._read_count = 0  # tokens whose experts are noted
        self._prompt: dict[str, Any] = {}
        count = sampling.prompt_logprobs
        if count is not None:
            self._prompt["prompt_logprobs"] = np.full(input_count, np.nan, np.float32)
        if count:
            self._prompt["prompt_top_ids"] = np.full((input_count, count), -1, np.int32)
            self._prompt["prompt_top_logprobs"] = np.full((input_count, count), -np.inf, np.float32)

    def note_top(self, place: int, ids: Int32, logprobs: Float32) -> None:
        """Note the likeliest tokens beside the made one at `place`: int32 and float32 (k,)."""
        self._top[place:] = [(ids, logprobs)]

    def note_kept(self, place: int, ids: Int32) -> None:
        """Note all tokens that could be drawn at `place`: int32 (n,); none: nothing was cut off."""
        self.kept_count += len(ids) - sum(map(len, self._kept[place:]))
        self._kept[place:] = [ids]

    def note_prompt(self, start: int, own: Float32, ids: Int32, logprobs: Float32) -> None:
        """Note tokens of the input from `start` on: float32 (n,), and the likeliest, int32 and float32 (n, k)."""
        for name, rows in zip(self._prompt, (own, ids, logprobs), strict=False):
            self._prompt[name][start : start + len(rows)] = rows

    def note_experts(self, start: int, chosen: Any) -> None:
        """Note the experts of tokens of input and turn from `start` on, (n, L, C); what is known already stays."""
        assert start <= self._read_count, "no token is passed over"
        chosen = chosen[self._read_count - start :]
        self._experts += [chosen] if len(chosen) else []
        self._read_count += len(chosen)

    def sides(self, count: int) -> tuple[Side, ...]:
        """Return it for the first `count` tokens made, and the input before them."""
        top, kept, found = self._top[:count], self._kept[:count], list[Side]()
        if top:
            ids, logprobs = (np.stack(column) for column in zip(*top, strict=True))
            found += [Side(name="top_ids", start=0, end=count, array=ids)]
            found += [Side(name="top_logprobs", start=0, end=count, array=logprobs)]
        if kept:
            counts = np.array(list(map(len, kept)), np.int32)
            found += [Side(name="kept_ids", start=0, end=count, array=np.concatenate(kept), counts=counts)]
        if self._experts:  # also read while a step adds to it: what came first is whole
            rows = np.concatenate(self._experts[:])[: self._input_count + count]
            start = -self._input_count
            found += [Side(name="routed_experts", start=start, end=start + len(rows), array=rows)]
        for name, each in self._prompt.items():
            found += [Side(name=name, start=-self._input_count, end=0, array=each)]
        return tuple(found)


def stretches(marks: Marks, token_count: int) -> tuple[tuple[int, int, int], ...]:
    """(start, end, version) rows that cover tokens [0, token_count). Marks past the end are ignored.

    marks: ascending first tokens, the first of them 0; may be empty only if token_count is 0.
    """
    ends = [start for start, _ in marks[1:]] + [token_count]
    rows = [(start, min(end, token_count), version) for (start, version), end in zip(marks, ends, strict=False)]
    return tuple((start, end, version) for start, end, version in rows if start < end)
