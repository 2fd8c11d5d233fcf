"""Saves the tokens of a running turn in three parts, so that a save writes what is new, and not all that was made.

A turn of 32,000 tokens that is saved twice a second would otherwise be written more than a thousand times, and each of
its tokens some hundred times.

- The first part begins with the turn, the second where the first ends, the third where the second ends. A save writes
  one of them, up to the newest token: the third while that is short; else the second, which takes the third in; else
  the first, which takes in both.
- The first part has a name of its own (`base`); the others name it too, and say where they begin. A part that does not
  fit is left out when they are read: it is of an earlier claim, or one before it never arrived. So what is read is
  always what was made up to some token.
- A part but the first is written only where those before it are what the worker believes. Where they are not, since an
  answer was lost, a call came late, or a replica knew less, the worker writes all of them anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...contract.fields import WHOLE_MAX
from ...contract.records import Span, TokenLog
from ...contract.sides import continued, parts, size_bytes

SECOND_TOKENS_MAX, THIRD_TOKENS_MAX = 4096, 256  # the part before takes in what is longer
PART_COUNT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What the broker has of one claim's tokens. base: of its first part; empty: nothing yet. ends: tokens in the first
    part, and in the first two. context_bytes: what the first part says of the tokens before the turn's."""

    base: str = ""
    ends: tuple[int, int] = (0, 0)
    context_bytes: int = 0

    @property
    def text(self) -> str:
        """Which parts these are, in one word."""
        return f"{self.base}:{self.ends[0]}:{self.ends[1]}"


NOTHING_SAVED = Saved()


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A part to write, in place 0, 1 or 2. saved: what the broker has then."""

    place: int
    log: TokenLog
    saved: Saved


def next_save(log: TokenLog, saved: Saved, name: str) -> Save:
    """Choose which part to write of all that a turn has made so far.

    Args:
        log: all of it; as much as was saved, or more.
        name: for the first part, if it is written: no other one of this turn has it.
    """
    count, (first, second) = len(log.completion_ids), saved.ends
    context_bytes = size_bytes(parts(log.sides, -WHOLE_MAX, 0)) if log.sides else 0
    if not saved.base or context_bytes != saved.context_bytes or count - first > SECOND_TOKENS_MAX:
        whole = Saved(base=name, ends=(count, count), context_bytes=context_bytes)
        return Save(place=0, log=replace(log, base=name), saved=whole)
    if count - second > THIRD_TOKENS_MAX:
        return Save(place=1, log=_from(log, first, saved.base), saved=replace(saved, ends=(first, count)))
    return Save(place=2, log=_from(log, second, saved.base), saved=saved)


def _from(log: TokenLog, start: int, base: str) -> TokenLog:
    """Return the tokens from `start` on. What was known of the one before only when it was read is told with them."""
    count = len(log.completion_ids)
    return TokenLog(
        spans=tuple(_moved(each, -start) for each in log.spans if each.end > start),
        completion_ids=log.completion_ids[start:],
        logprobs=log.logprobs[start:],
        sides=parts(log.sides, start - 1, count, -start) if log.sides else (),
        start=start,
        base=base,
    )


def whole(found: Sequence[TokenLog | None]) -> TokenLog | None:
    """Put together what a turn has made, from its parts in order; None: there is nothing to begin with."""
    first, *rest = found
    if first is None:
        return None
    made = replace(first, start=0, base="")
    for part in rest:
        if part is not None and (part.base, part.start) == (first.base, len(made.completion_ids)) and first.base:
            made = followed(made, part)
    return made


def followed(before: TokenLog, made: TokenLog) -> TokenLog:
    """Join tokens with those made after them."""
    offset = len(before.completion_ids)
    return TokenLog(
        spans=tuple(joined([*before.spans, *(_moved(each, offset) for each in made.spans)])),
        completion_ids=np.concatenate((before.completion_ids, made.completion_ids)),
        logprobs=np.concatenate((before.logprobs, made.logprobs)),
        sides=continued(before.sides, made.sides, offset) if before.sides or made.sides else (),
    )


def _moved(span: Span, by: int) -> Span:
    return Span(max(0, span.start + by), span.end + by, span.worker_id, span.policy_version)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Join neighbouring spans of the same worker and version."""
    out: list[Span] = []
    for span in spans:
        last = out[-1] if out else None
        is_same = last is not None and (last.end, last.worker_id, last.policy_version) == (
            span.start,
            span.worker_id,
            span.policy_version,
        )
        if last is not None and is_same:
            out[-1] = Span(last.start, span.end, last.worker_id, last.policy_version)
        else:
            out.append(span)
    return out
