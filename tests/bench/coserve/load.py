"""Serving traffic of the pair: requests of a recorded chat service, at a rate of our own and as bursty as it, replayed
by a client in a process of its own (bench/remote.py): what measures must not wait for what the bench does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from rollfab.deploy.replay.client import Manner, replay
from rollfab.deploy.replay.records import Arrival, Outcome
from rollfab.deploy.replay.scale import Load, at_rate, bursty, fitted, with_lengths
from rollfab.deploy.replay.traces import read_trace

from .server import MODEL_NAME

TRACE = "azure-conv"
LENGTHS = 0.15  # of the trace's: its contexts are those of a far larger model
COMPLETION_TOKENS_MIN = 8  # of fewer the mean is one or two gaps, and its P99 that of a single step
DRAIN_S = 120.0


def traffic(seed: int, *, rate_per_s: float, count: int, context_tokens: int) -> list[Arrival]:
    """`count` arrivals at a mean rate, the same for the same arguments."""
    trace = read_trace(TRACE)
    span_s = count / rate_per_s
    drawn = at_rate(trace.arrivals, count / trace.span_s, span_s=trace.span_s, seed=seed)
    squeezed = [replace(each, at_s=each.at_s * span_s / trace.span_s) for each in drawn]
    scaled = with_lengths(squeezed, LENGTHS)
    spoken = [replace(each, completion_tokens=max(COMPLETION_TOKENS_MIN, each.completion_tokens)) for each in scaled]
    short, _ = fitted(spoken, context_tokens)
    return bursty(short, span_s=span_s, seed=seed)


def burstiness(arrivals: Sequence[Arrival], rate_per_s: float) -> float:
    """The busiest second over the mean."""
    return Load.of(arrivals, len(arrivals) / rate_per_s).max_over_mean


class Client:
    """Replays arrivals against one server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def replay(self, arrivals: Sequence[Arrival], start_at_s: float) -> list[Outcome]:
        """Send every request when it is due, from a time of the monotonic clock on; returns when all have ended.

        No prompt comes twice: an arm must not find in the prefix cache what the arm before it has computed.
        """
        return asyncio.run(
            replay(arrivals, self._url, MODEL_NAME, manner=Manner(drain_s=DRAIN_S), start_at_s=start_at_s)
        )
