"""What the ranks of a vLLM are asked to stage, and what they answer, by files: generation is not held up for it.

An answer is one file in a directory of the one who asked, named by rank, and there only once it is complete.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from .....fabric.contract.errors import WeightError, WireError
from .....fabric.format.regions import Region
from .....fabric.versions.rank_stage import Vote

UNFINISHED = ".new"
DIRECTORY_PREFIX = "rollfab-answers-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """What every rank is asked. files: of MappedVersions; none: only tell your part. have: -1: no version is live.

    answers: a directory. ticket: by which the commit names what is staged.
    """

    ticket: str
    have: int
    files: Sequence[str]
    answers: str

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return {"ticket": self.ticket, "have": self.have, "files": list(self.files), "answers": self.answers}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> StageOrder:
        """The inverse."""
        return cls(ticket=str(row["ticket"]), have=int(row["have"]), files=row["files"], answers=str(row["answers"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one rank. fetched_bytes: what it read. changed_count: elements that it would write."""

    vote: Vote
    fetched_bytes: int = 0
    changed_count: int = 0


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


def give_answer(directory: Path, answer: Answer) -> None:
    """Raises OSError: nobody waits for it any more."""
    vote = answer.vote
    row = {
        "rank": vote.rank,
        "version": vote.version,
        "regions": vote.regions.tolist(),
        "sums": vote.sums.tolist(),
        "error": vote.error,
        "fetched_bytes": answer.fetched_bytes,
        "changed_count": answer.changed_count,
    }
    unfinished = directory / f"{vote.rank}{UNFINISHED}"
    unfinished.write_bytes(orjson.dumps(row))
    unfinished.rename(directory / str(vote.rank))


def answer_count(directory: Path) -> int:
    """How many are there."""
    return len(_paths(directory))


def read_answers(directory: Path) -> list[Answer]:
    """All that are there, by rank. Raises WireError: one is damaged."""
    return sorted(map(_read, _paths(directory)), key=lambda answer: answer.vote.rank)


def _paths(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.suffix != UNFINISHED]


def _read(path: Path) -> Answer:
    try:
        row = orjson.loads(path.read_bytes())
        vote = Vote(
            rank=int(row["rank"]),
            version=int(row["version"]),
            regions=np.array(row["regions"], dtype=np.int64).reshape(-1, len(Region._fields)),
            sums=np.array(row["sums"], dtype=np.uint64),
            error=str(row["error"]),
        )
        return Answer(vote=vote, fetched_bytes=int(row["fetched_bytes"]), changed_count=int(row["changed_count"]))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WireError(f"the answer of rank {path.name} cannot be read: {error}") from error
