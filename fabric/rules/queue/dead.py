"""Groups dead letters by their cause, and words what becomes of those that are retried or discarded.

A trajectory that is retried ends in its own group, or not at all: advantages are centred in a group, and whoever waits
for this group has no use for a rollout in another one. Once its group was received, its task is to be submitted anew.
queue/lua/rollouts/retry_dead.lua decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...contract.ids import group_of
from ...contract.records import DeadLetter
from ...contract.text import one_line

RefusalCode = Literal["unknown", "consumed", "received", "quorum", "deadline"]
DeadVerdict = Literal["done"] | RefusalCode
VERDICTS: Mapping[int, DeadVerdict] = {
    1: "done",
    0: "unknown",
    -1: "consumed",
    -2: "received",
    -3: "quorum",
    -4: "deadline",
}
WHY: Mapping[RefusalCode, str] = {
    "unknown": "there is no dead letter of that name: it was retried or discarded before",
    "consumed": "the trainer has done with its group, without it: submit its task anew, or discard it",
    "received": "a trainer has its group in hand, without it: submit its task anew, or discard it",
    "quorum": "its group is complete without it, by its quorum: discard it",
    "deadline": "the deadline of its group has passed: submit its task anew, or discard it",
}
CAUSE_LENGTH_MAX = 200
# what differs between two letters of one cause: names with digits in them, and numbers
PARTICULAR = re.compile(r"(?<![\w.])(0x)?[0-9a-fA-F]{16,}(\.\d+)*|\d+(\.\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseCount:
    """Dead letters of one cause."""

    cause: str
    """Their reason, with # for what is particular to each."""
    trajectory_count: int
    group_count: int
    example: str
    """One of them, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Dead letters of which one reason keeps what was asked for."""

    code: RefusalCode
    reason: str
    """Why, and what to do, in words."""
    trajectory_count: int
    group_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadOutcome:
    """The number of dead letters for which it is done, or would be, and of their groups; the others, by reason."""

    trajectory_count: int
    group_count: int
    refused: tuple[Refusal, ...]


def cause_of(reason: str) -> str:
    """Return a reason without what is particular to its trajectory: of reasons that differ in numbers, one cause."""
    line = one_line(reason.strip().split("\n", 1)[0])[:CAUSE_LENGTH_MAX]
    return PARTICULAR.sub("#", line) or "(no reason was given)"


def causes_of(letters: Iterable[DeadLetter]) -> list[CauseCount]:
    """Count letters by cause, the most frequent first."""
    found: dict[str, list[str]] = {}
    for letter in letters:
        found.setdefault(cause_of(letter.reason), []).append(letter.trajectory_id)
    rows = [
        CauseCount(cause=cause, trajectory_count=len(names), group_count=_group_count(names), example=min(names))
        for cause, names in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.trajectory_count, row.cause))


def of_cause(letters: Iterable[DeadLetter], text: str | None) -> list[DeadLetter]:
    """Return the letters whose reason or cause has a text in it, in any case of letters; None: all of them."""
    wanted = (text or "").casefold()
    return [each for each in letters if wanted in f"{one_line(each.reason)}\n{cause_of(each.reason)}".casefold()]


def outcome_of(verdicts: Mapping[str, DeadVerdict]) -> DeadOutcome:
    """Sum up what became of dead letters."""
    done: list[str] = []
    names: dict[RefusalCode, list[str]] = {}
    for name, verdict in verdicts.items():
        (done if verdict == "done" else names.setdefault(verdict, [])).append(name)
    refused = (
        Refusal(code=code, reason=WHY[code], trajectory_count=len(each), group_count=_group_count(each))
        for code, each in sorted(names.items(), key=lambda row: -len(row[1]))
    )
    return DeadOutcome(trajectory_count=len(done), group_count=_group_count(done), refused=tuple(refused))


def _group_count(names: Sequence[str]) -> int:
    return len(set(map(group_of, names)))
