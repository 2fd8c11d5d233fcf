"""Places in a trace, as W3C's `traceparent` carries them, and what takes the spans that a role has measured.

- A span is made once what it tells of has been measured; nothing is wrapped. So the ids must be known before: they
  follow from their parent's and a name (`Place.child`). A trajectory that another agent takes over, or a turn that goes
  on elsewhere, keeps its place, and whoever ends it sends its span.
- Who gets no traceparent makes no span: the trainer decides, once a group.
- Pure: export.py sends them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xxhash import xxh3_64_hexdigest

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
SAMPLED = 1
Fact = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A span's place. trace_id: 32 hexadecimal digits. span_id: 16 of them."""

    trace_id: str
    span_id: str

    @property
    def traceparent(self) -> str:
        """Return it as a job carries it to those who make its children."""
        return f"00-{self.trace_id}-{self.span_id}-{SAMPLED:02x}"

    def child(self, *names: str | int) -> Place:
        """Return the place of a span below this one: the same for the same names, wherever it is made."""
        parts = (self.trace_id, self.span_id, *map(str, names))
        return Place(self.trace_id, xxh3_64_hexdigest("/".join(parts).encode()))


def place_of(traceparent: str) -> Place | None:
    """Read a traceparent; None: there is none, nobody wants its spans, or it is none of W3C's version 00."""
    match = TRACEPARENT.fullmatch(traceparent) if traceparent else None
    if match is None or not int(match[3], 16) & SAMPLED or not int(match[1], 16) or not int(match[2], 16):
        return None
    return Place(match[1], match[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """What took a time. what: a key of names.SPANS. Times: seconds of this process's monotonic clock.

    facts: by the keys of names.ATTRIBUTES. error: its class; empty: it went well.
    """

    what: str
    place: Place
    parent: Place | None
    begun_s: float
    ended_s: float
    facts: dict[str, Fact] = field(default_factory=dict)
    links: tuple[Place, ...] = ()
    error: str = ""


class Spans:
    """Takes the spans of a process, from any thread, and never waits. This one is off, and drops them."""

    is_on = False

    def add(
        self,
        what: str,
        place: Place | None,
        parent: Place | None,
        begun_s: float,
        ended_s: float,
        *,
        links: Iterable[Place] = (),
        error: str = "",
        **facts: Fact | None,
    ) -> None:
        """Take a span, if its place is known and anybody wants it; leave out facts that are None."""
        if self.is_on and place is not None:
            known = {name: fact for name, fact in facts.items() if fact is not None}
            self.take(
                TraceSpan(
                    what=what,
                    place=place,
                    parent=parent,
                    begun_s=begun_s,
                    ended_s=max(begun_s, ended_s),
                    facts=known,
                    links=tuple(links),
                    error=error,
                )
            )

    def root(self) -> Place | None:
        """Begin a trace; None: nobody wants it."""
        return None

    def take(self, span: TraceSpan) -> None:
        """Keep a span to be sent."""

    def close(self) -> None:
        """Send what waits; for a moment."""
