"""The agreement of all ranks that have staged a version, before any of them commits.

- Each rank votes with the sums of its slices (stage.py). A version is committed only when every rank has staged it, all
  holders of a region have it alike, and together the regions have the sums that the manifest promises: a wrong base, a
  codec fault or a spoiled block on one rank keeps all ranks at their version.
- Several versions are agreed on once, by the sums of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import DigestMismatch, WeightError
from ..format.layout import Layout
from ..format.manifest import NAMES_SHOWN_MAX, Sums, WeightManifest
from ..format.regions import Region
from .commit import Staged
from .rank_parts import ShardMap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vote:
    """One rank's staged version. regions: int64 (P, 5); sums: uint64 (P,), of their new values. error: why it failed.

    read_bytes: encoded blocks that it read. changed_count: elements that it would write.
    """

    rank: int
    version: int
    regions: NDArray[np.int64]
    sums: Sums
    error: str = ""
    read_bytes: int = 0
    changed_count: int = 0

    @classmethod
    def of_none(cls, rank: int, version: int, error: str = "") -> Vote:
        """Make a vote that says nothing of sums."""
        regions = np.zeros((0, len(Region._fields)), dtype=np.int64)
        return cls(rank=rank, version=version, regions=regions, sums=np.zeros(0, dtype=np.uint64), error=error)


def vote(rank: int, part: ShardMap, staged: Staged, read_bytes: int = 0) -> Vote:
    return Vote(
        rank=rank,
        version=staged.version,
        regions=part.regions,
        sums=staged.sums,
        read_bytes=read_bytes,
        changed_count=staged.changed_count,
    )


def failed_vote(rank: int, error: Exception) -> Vote:
    """Make the vote of a rank that could not stage."""
    return Vote.of_none(rank, -1, f"{type(error).__name__}: {error}")


def check_staged(votes: Sequence[Vote], version: int, rank_count: int) -> None:
    """Require that all ranks have staged this version, whatever it is.

    Raises:
        WeightError: names the ranks that are missing, failed, or staged another version.
    """
    absent = sorted(set(range(rank_count)) - {one.rank for one in votes})
    bad = sorted((one for one in votes if one.error or one.version != version), key=lambda one: one.rank)
    if absent or bad:
        parts = [f"rank {rank} gave no answer" for rank in absent]
        parts += [f"rank {one.rank} {one.error or f'staged version {one.version}'}" for one in bad]
        raise WeightError(
            f"version {version} was not committed on any rank: {'; '.join(parts)}",
            version=version,
            ranks=[*absent, *(one.rank for one in bad)],
        )


def state_of(votes: Sequence[Vote], layout: Layout) -> Sums:
    """Add up the sums of the whole state, uint64 (T,), of which each rank has told its part.

    Raises:
        DigestMismatch: holders of one region do not have it alike; names tensors and, if it can, the rank.
    """
    regions = np.concatenate([one.regions for one in votes])
    sums = np.concatenate([one.sums for one in votes])
    ranks = np.concatenate([np.full(len(one.sums), one.rank) for one in votes])
    distinct, first, group = np.unique(regions, axis=0, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    differing = np.flatnonzero(sums != sums[first][group])
    if len(differing):
        names = sorted({layout.tensors[tensor].name for tensor in regions[differing, 0].tolist()})
        differ = sorted(set(ranks[differing].tolist()))
        raise DigestMismatch(
            f"other values on rank {', '.join(map(str, differ))} than on another that holds the same, in"
            f" {', '.join(names[:NAMES_SHOWN_MAX])}",
            names=names,
            ranks=differ,
        )
    totals = np.zeros(len(layout.tensors), dtype=np.uint64)
    np.add.at(totals, distinct[:, 0], sums[first])
    return totals


def agree(votes: Sequence[Vote], manifest: WeightManifest, rank_count: int) -> None:
    """Require that all ranks may commit this version.

    Args:
        votes: one of each rank, in any order.
        manifest: of the version staged last.

    Raises:
        WeightError: a rank is missing, failed, or staged another version.
        DigestMismatch: the staged values are not the published ones; names tensors and, if it can, the rank.
    """
    check_staged(votes, manifest.version, rank_count)
    try:
        sums = state_of(votes, manifest.tensors)
    except DigestMismatch as error:
        raise DigestMismatch(
            f"version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r} was staged to {error.message}:"
            " no rank committed. Fetch a keyframe",
            **error.facts,
        ) from error
    manifest.check_sums(sums)
