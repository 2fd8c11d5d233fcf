"""The spans of one claim of a turn, made of what was measured when it ends: its wait, its prefill, its decoding."""

from __future__ import annotations

from ...fabric.ports.queue import TurnClaim
from ...fabric.tracing.spans import Spans, place_of
from ..engines.base import Generation


def trace_claim(
    spans: Spans,
    claim: TurnClaim,
    worker_id: str,
    made: Generation | None,
    *,
    begun_s: float,
    now_s: float,
    outcome: str,
) -> None:
    """Add the spans of a claim that ends now, if its turn is traced.

    made: what it made; None: not known. outcome: stop, length, error, refused, or given_back: it goes on elsewhere.
    """
    parent = place_of(claim.job.traceparent) if spans.is_on else None
    if parent is None:
        return
    place = parent.child(worker_id, claim.fence)
    if claim.waited_s is not None:
        waiting, is_again = place.child("queue"), claim.is_handed_over
        spans.add("turn_queue", waiting, parent, begun_s - claim.waited_s, begun_s, is_handed_over=is_again)
    prior, count = 0 if claim.log is None else len(claim.log.completion_ids), 0
    first_s = begun_s
    if made is not None:
        count = len(made.completion_ids)
        if made.first_token_s is not None:
            first_s = min(now_s, begun_s + made.first_token_s)
            tokens = len(claim.job.prompt_ids) + prior
            spans.add("prefill", place.child("prefill"), parent, begun_s, first_s, input_tokens=tokens)
    spans.add(
        "decode",
        place.child("decode"),
        parent,
        first_s,
        now_s,
        outcome=outcome,
        generated_tokens=count,
        prior_tokens=prior,
        error=outcome if outcome in ("error", "refused") else "",
    )
