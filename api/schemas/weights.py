"""What the api says of weights."""

from __future__ import annotations

from .base import Model


class WeightVersion(Model):
    """One stored version."""

    version: int
    kind: str
    """keyframe, delta, or jump-8 or jump-64: several deltas as one."""
    base_version: int
    """What a delta or a jump is applied to; -1 for a keyframe."""
    payload_bytes: int
    """What travels."""
    dense_bytes: int
    """What the full weights take."""
    changed_count: int
    element_count: int
    chunk_count: int
    density: float | None
    """Changed elements as a fraction of all; null for a keyframe."""
    bytes_per_changed: float | None
    """Of the payload; null for a keyframe, or where nothing changed."""
    dense_over_payload: float | None
    """How many times smaller than the full weights; null where nothing travels."""
    of_entropy_floor: float | None
    """The entropy floor over the payload, as its publisher saw on a few blocks; null where it did not look."""
    carrier: str
    """What its chunks travelled by: broker or collective."""
    is_head: bool
    holder_count: int
    """Workers and relays that said they hold this version."""


class WeightsView(Model):
    """A run's weights on the broker."""

    run_id: str
    head_version: int
    epoch: int
    """Of the publisher in charge."""
    kind: str
    """Of the head; empty when there is none."""
    held_count: int
    """Manifests held on the broker."""
    held_bytes: int | None
    """Payloads of all of them; null while older manifests are still being read."""
    holder_count: int
    """Workers and relays that hold weights of the run, whatever their version."""
    published_bytes: int
    """Payloads, also of keyframes and jumps, that were published since this api began to look."""
    newest_by_kind: list[WeightVersion]
    """The newest of every kind, of the manifests read so far."""
    versions: list[WeightVersion]
    """The newest last: at most 8 in /v1/status, 64 in /v1/weights."""
