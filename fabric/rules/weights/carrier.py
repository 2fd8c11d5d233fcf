"""Decides what carries a version's chunks: the broker, or a collective of the receivers that are there.

- The broker is the ordinary way: it serves whoever comes, whenever they come. A collective reaches only those who are
  there now, so it is chosen where the broker would be the dearer or no way, and never when nobody is there.
- With everything to send (a keyframe, or a dense change) the broker takes it in once and gives it out once per
  receiver, so from MEMBER_COUNT_MIN receivers on a fabric between them is the shorter way.
- A receiver that could not take part would be left without: as long as the broker has room, all must be able to.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...contract.records import BROKER, CARRIERS, COLLECTIVE
from .chain import KEYFRAME

DENSE_FRACTION = 0.3  # of the dense bytes; from there on a delta is dense for all that its transport can see
MEMBER_COUNT_MIN = 2  # one receiver takes as long either way (measured with gloo)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierFacts:
    """A version, and who could take it. room_bytes: at the broker; None: without limit, 0: its chunk store is gone.

    member_count: receivers that take part in collectives. receiver_count: all live ones, those among them.
    """

    kind: str
    payload_bytes: int
    dense_bytes: int
    room_bytes: int | None
    member_count: int
    receiver_count: int


def carrier(setting: str, facts: CarrierFacts) -> str:
    """Return BROKER or COLLECTIVE, for a setting of CARRIERS.

    A setting other than AUTO is followed, but for a collective of nobody.
    """
    assert setting in CARRIERS and facts.member_count <= facts.receiver_count
    if setting == BROKER or facts.member_count == 0:
        return BROKER
    if setting == COLLECTIVE:
        return COLLECTIVE
    if facts.room_bytes is not None and facts.payload_bytes > facts.room_bytes:
        return COLLECTIVE
    is_large = facts.kind == KEYFRAME or facts.payload_bytes >= DENSE_FRACTION * facts.dense_bytes
    is_for_all = facts.member_count == facts.receiver_count
    return COLLECTIVE if is_large and is_for_all and facts.member_count >= MEMBER_COUNT_MIN else BROKER
