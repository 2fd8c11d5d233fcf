"""Putting a turn's tokens together from the claims that made them."""

from __future__ import annotations

import numpy as np

from ...fabric.contract.records import Span, TokenLog
from ..engines.base import Generation

EMPTY = TokenLog()


def merge(prior: TokenLog | None, made: Generation | None, worker_id: str) -> TokenLog:
    """Tokens of earlier claims followed by those made now; spans say who made which, at which version."""
    before = prior or EMPTY
    if made is None or not len(made.completion_ids):
        return before
    offset = len(before.completion_ids)
    if not offset:  # almost always: nothing to put before it
        spans = [Span(s, e, worker_id, version) for s, e, version in made.versions]
        return TokenLog(spans=tuple(joined(spans)), completion_ids=made.completion_ids, logprobs=made.logprobs)
    spans = [*before.spans, *(Span(offset + s, offset + e, worker_id, version) for s, e, version in made.versions)]
    return TokenLog(
        spans=tuple(joined(spans)),
        completion_ids=np.concatenate((before.completion_ids, made.completion_ids)),
        logprobs=np.concatenate((before.logprobs, made.logprobs)),
    )


def joined(spans: list[Span]) -> list[Span]:
    """Spans with neighbours of one worker and version made one."""
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
