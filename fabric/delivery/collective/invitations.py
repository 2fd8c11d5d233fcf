"""The messages of publisher and receivers to one another on the broker's board, and the settings both have.

A round, in the order of what is said:

    publisher   Offer, state "open"      a version, its size and digest; who wants it?
    receivers   Answer                   I do, and this is where I am
    publisher   Offer, state "closed"    these are the members, by rank; build the group now
    all         Answer, with `keys`      this is how the other members connect to me
    publisher   Offer, state "over"      do not answer this one any more

- A round has a name of its own, so an answer to an older round is never taken for an answer to this one.
- Everything that is large travels through the group; the board carries some hundred bytes per member.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...contract.errors import WeightError
from ...contract.records import BACKENDS, GLOO
from ...contract.wire import Record

OPEN, CLOSED, OVER = "open", "closed", "over"
PUBLISHER = "publisher"  # its name among the answers of a round; receivers' names are worker ids

Watch = Callable[[int, NDArray[np.uint8]], None]  # called with each message of a pass: its number, its bytes


class CollectiveFailed(WeightError):
    """A round did not succeed. Stays inside this room: publishers report it, receivers stay as they are."""


@dataclass(frozen=True, kw_only=True)
class Offer(Record):
    """A round of one version. members: receivers by rank, from rank 1 on; empty while the round is open.

    host: an address of the publisher. node: its machine and network (addresses.py). is_local: all members are on that
    node. stall_s: the longest that one message may take; a group that stands still for longer is given up.
    """

    KIND: ClassVar[int] = 41
    IGNORES_UNKNOWN: ClassVar[bool] = True

    run_id: str
    round_id: str
    state: str
    epoch: int
    version: int
    kind: str
    payload_bytes: int
    manifest_digest: str
    backend: str
    host: str
    node: str
    members: list[str]
    is_local: bool
    answer_s: float
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class Answer(Record):
    """A receiver's word that it takes part; `keys`: the keys that it sets for the others, name → hex."""

    KIND: ClassVar[int] = 42
    IGNORES_UNKNOWN: ClassVar[bool] = True

    member: str
    host: str
    node: str
    keys: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions:
    """How rounds are held. The publisher's backend, answer_s and stall_s count for all: they go with its offer."""

    backend: str = GLOO
    """One of BACKENDS. Members of an NCCL group need a GPU each: receivers without one do not answer."""
    host: str = ""
    """Address of this process that the others can reach; empty: found by the route to them."""
    answer_s: float = 2.0
    """Longest wait for receivers to say that they take part."""
    stall_s: float = 10.0
    """Longest time that building the group, or one message, may take before the group is given up."""
    attempt_count: int = 2
    """Rounds per version: the first, and one without the members that failed."""

    def __post_init__(self) -> None:
        assert self.backend in BACKENDS and self.attempt_count >= 1
        assert self.answer_s > 0 and self.stall_s > 0


def manifest_digest(data: bytes) -> str:
    """xxh3-128, hex, of an encoded manifest."""
    return xxhash.xxh3_128_hexdigest(data)
