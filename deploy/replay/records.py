"""Records of a replay: one Arrival and one Outcome per request.

- Times are seconds since the replay began.
- An outcome of a request that was not answered in full names the kind of its error; what it has by then stays told.
- Outcomes survive JSON exactly: a replay may run in a process of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

INTERRUPTED = "interrupted"  # by the user: neither answered nor failed


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace. at_s: since its start; completion_tokens: how many it was answered with."""

    at_s: float
    prompt_tokens: int
    completion_tokens: int


def no_gaps() -> array[int]:
    """Make an empty array of microseconds, unsigned."""
    return array("I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one request.

    Attributes:
        arrival: when it was due and how long it is.
        sent_at_s: when the client sent it; later than `arrival.at_s` by the client's own lateness.
        ttft_s: from the scheduled arrival to the first token, so that a late client flatters nobody; None: no token.
        tpot_s: mean time of a token after the first; None: fewer than two tokens.
        ended_at_s: when its answer was complete, or its error known.
        token_count: as the server counts them, or else events that brought tokens.
        gaps_us: between events that brought tokens, microseconds.
        error: "", or the kind: connection, http 503, cut, server, short, unfinished, interrupted.
        detail: of an error, in the server's or the system's words.
    """

    arrival: Arrival
    sent_at_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    ended_at_s: float
    token_count: int = 0
    gaps_us: array[int] = field(default_factory=no_gaps)
    error: str = ""
    detail: str = ""

    @property
    def late_s(self) -> float:
        """The seconds by which the client was late."""
        return self.sent_at_s - self.arrival.at_s

    @property
    def ttft_from_send_s(self) -> float | None:
        """The time to the first token, without the client's lateness."""
        return None if self.ttft_s is None else self.ttft_s - self.late_s


def outcome_row(outcome: Outcome) -> dict[str, Any]:
    """Turn an outcome into a row for JSON."""
    row = {name: getattr(outcome, name) for name in Outcome.__slots__}
    arrival = outcome.arrival
    return {
        **row,
        "arrival": [arrival.at_s, arrival.prompt_tokens, arrival.completion_tokens],
        "gaps_us": outcome.gaps_us.tolist(),
    }


def dump_outcomes(outcomes: Iterable[Outcome]) -> bytes:
    """Write outcomes as JSON lines, one object each."""
    return b"".join(orjson.dumps(outcome_row(each)) + b"\n" for each in outcomes)
