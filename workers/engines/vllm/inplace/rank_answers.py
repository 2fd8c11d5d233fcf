"""Writes and reads stage orders and the ranks' answers to them, as files: generation is not held up for them.

An answer is one file in the asker's directory, named by rank, and there only once it is complete.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from .....fabric.contract.errors import WeightError, WireError
from .....fabric.format.regions import Region
from .....fabric.versions.vote import Vote

UNFINISHED = ".new"
DIRECTORY_PREFIX = "rollfab-answers-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """The order that every rank is given.

    files: of VersionFiles; none: only tell your part, and the sums of what is live. have: the version that is live; -1:
    none. parcel: a commit's file, to stage in place of versions; `have` is then its name. answers: a directory. ticket:
    by which the commit names what is staged.
    """

    ticket: str
    have: int
    files: Sequence[str]
    answers: str
    parcel: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StageOrder:
        """Read an order from the row that asdict makes of it."""
        files, parcel = row["files"], str(row.get("parcel", ""))
        return cls(
            ticket=str(row["ticket"]), have=int(row["have"]), files=files, answers=str(row["answers"]), parcel=parcel
        )


def check_directory(directory: Path) -> None:
    """Require a directory that a worker of this user has made for answers.

    Raises:
        WeightError: it is another thing; nothing was written.
    """
    try:
        status = directory.lstat()
    except (OSError, ValueError) as error:
        raise WeightError(f"nobody waits for answers: {error}") from error
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not is_private or not directory.name.startswith(DIRECTORY_PREFIX):
        raise WeightError(f"{str(directory)[:100]!r} is no directory for answers of this user: nothing was done")


def give_answer(directory: Path, vote: Vote) -> None:
    """Write a rank's answer. Raises OSError: nobody waits for it any more."""
    row = asdict(vote) | {"regions": vote.regions.tolist(), "sums": vote.sums.tolist()}
    unfinished = directory / f"{vote.rank}{UNFINISHED}"
    unfinished.write_bytes(orjson.dumps(row))
    unfinished.rename(directory / str(vote.rank))


def answer_count(directory: Path) -> int:
    """Count the answers that are there."""
    return len(_paths(directory))


def read_answers(directory: Path) -> list[Vote]:
    """Read all answers that are there, by rank. Raises WireError: one is damaged."""
    return sorted(map(_read, _paths(directory)), key=lambda vote: vote.rank)


def _paths(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.suffix != UNFINISHED]


def _read(path: Path) -> Vote:
    try:
        row = orjson.loads(path.read_bytes())
        return Vote(
            rank=int(row["rank"]),
            version=int(row["version"]),
            regions=np.array(row["regions"], dtype=np.int64).reshape(-1, len(Region._fields)),
            sums=np.array(row["sums"], dtype=np.uint64),
            error=str(row["error"]),
            read_bytes=int(row["read_bytes"]),
            changed_count=int(row["changed_count"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WireError(f"the answer of rank {path.name} cannot be read: {error}") from error
