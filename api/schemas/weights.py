"""The api's models of weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...fabric.inspect.inspection import VersionFigures
from .base import Model, Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion(Shown, VersionFigures):
    """One stored version."""

    is_head: bool
    holder_count: int
    """Workers and relays that said they hold this version."""


class WeightsView(Model):
    """A run's weights on the broker."""

    run_id: str
    head_version: int
    epoch: int
    """The epoch of the publisher in charge."""
    kind: str
    """The kind of the head; empty when there is none."""
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
