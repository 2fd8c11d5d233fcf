"""What an engine whose ranks are processes may offer: each rank stages its own part, beside its live weights.

- A version's chunks are fetched once for the node and gathered, encoded; each rank reads only the byte ranges that hold
  something of its own, and decodes them. No process holds the version decoded and whole.
- All ranks stage before any commits: what `stage` hands out is agreed on by every rank, and has the sums of its
  manifest (fabric/versions/vote.py). Where they do not agree, none has written anything.
- The commit itself is an engine's ordinary one: between two steps, with the same choices for turns in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ...fabric.format.manifest import Sums, WeightManifest
from ...fabric.versions.reader import ChunkSink
from .base import TurnsAtCommit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedByRanks:
    """A version that every rank has staged and all agree on.

    sums: uint64 (T,), of the whole state once it is committed. changed_count: elements that all ranks together write,
    copies counted. read_bytes: what each rank read, by rank. ticket: by which the ranks know it.
    """

    version: int
    sums: Sums
    changed_count: int
    read_bytes: tuple[int, ...]
    ticket: str


class Gathering(ChunkSink[None], Protocol):
    """Versions on their way to the ranks, oldest first."""

    @property
    def manifests(self) -> Sequence[WeightManifest]:
        """The manifests of the versions gathered so far."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Ranks(Protocol):
    """The ranks of one engine."""

    def gather(self) -> Gathering:
        """An empty one."""
        ...

    async def stage(self, gathering: Gathering, have: int | None) -> StagedByRanks:
        """Have every rank stage its part of what was gathered, and agree; one at a time, the newest counts.

        Args:
            have: the version that is live; None: not known, then the first version gathered is a keyframe.

        Raises:
            WeightError: a rank failed or is gone; nothing was written anywhere.
            DigestMismatch: what they staged is not what was published.
        """
        ...

    async def live_sums(self) -> Sums:
        """Sums of the whole live state, uint64 (T,), made by the ranks while the engine generates.

        Raises:
            DigestMismatch: ranks that hold the same do not hold it alike.
        """
        ...

    async def apply(
        self, staged: StagedByRanks, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False
    ) -> float:
        """Commit on all ranks, as Engine.apply."""
        ...


@runtime_checkable
class HasRanks(Protocol):
    """An engine that may have ranks to stage by."""

    @property
    def ranks(self) -> Ranks | None:
        """None: it takes whole versions only."""
        ...
