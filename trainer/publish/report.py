"""What publishing a version took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What publishing a version took. density: changed elements as a fraction of all. keyframe_bytes, jump_bytes: of
    what was published beside it, 0 without."""

    version: int
    kind: str
    payload_bytes: int
    dense_bytes: int
    changed_count: int
    density: float
    encode_s: float
    keyframe_bytes: int = 0
    jump_bytes: int = 0
