"""What chaos' trainers write down, and the verdict over it: what was lost, what came twice.

A trainer writes one JSON line per event, on disk before it goes on, stamped with the machine's monotonic clock, which
all processes of one machine share:

    start pid         submitting ids → submitted ids        received group …       acking ids → acked ids        done

- *lost*: submitted with an answer, and never acknowledged by anybody. A group whose trainer died between `acking` and
  `acked` may have been acknowledged: it counts as consumed, unless it came again and was left there.
- *duplicated*: received again after an acknowledgement that the broker had confirmed; or received twice without the
  mark `redelivered`. To be killed between use and acknowledgement, and to get the group again with its mark, is what
  is promised, and is no duplicate.
- *malformed*: not the trajectories, rewards and turns that were asked for, each once.
- *diverged*: tokens other than most rollouts of the same seed have. Turns are greedy and weights never change, so an
  interruption that is not resumed exactly shows here.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

Line = dict[str, Any]


class Journal:
    """An append-only file that survives the kill of its writer up to the last line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **facts: Any) -> None:
        """One line, on disk when this returns."""
        line = orjson.dumps({"at_ns": time.monotonic_ns(), "event": event, **facts}) + b"\n"
        written = os.write(self._file, line)
        assert written == len(line)
        os.fsync(self._file)


def read_journal(path: Path) -> list[Line]:
    """All whole lines, in order; none where there is no file yet."""
    if not path.exists():
        return []
    return [orjson.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@dataclass(kw_only=True)
class Verdict:
    """What became of every group. Counts are of groups, unless their name says otherwise."""

    submitted: set[str] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    diverged_rollout_count: int = 0
    rollout_count: int = 0
    redelivered_count: int = 0
    resubmitted_count: int = 0
    token_count: int = 0
    turn_count: int = 0
    rollouts: list[tuple[str, int, str]] = field(default_factory=list)
    """Of every rollout: its group, its seed, the digest of its tokens."""

    @property
    def is_clean(self) -> bool:
        """Nothing lost, nothing twice, nothing wrong."""
        return not (self.lost or self.duplicated or self.malformed or self.diverged_rollout_count)


@dataclass
class _Fate:
    """What is known of one group so far."""

    is_submitted: bool = False
    fresh_count: int = 0
    is_received: bool = False
    is_acknowledged: bool = False
    may_be_acknowledged: bool = False
    digests: list[tuple[int, str]] = field(default_factory=list)
    token_count: int = 0
    turn_count: int = 0


def judge(journals: Iterable[Sequence[Line]]) -> Verdict:
    """The verdict over all trainers' journals, once nothing is under way any more."""
    verdict = Verdict()
    fates: dict[str, _Fate] = defaultdict(_Fate)
    for line in sorted((line for journal in journals for line in journal), key=lambda line: line["at_ns"]):
        if line["event"] == "received":
            _receive(line, fates[line["group"]], verdict)
        for name in line.get("groups", ()):
            _mark(line["event"], fates[name], verdict)
    for name, fate in fates.items():
        if fate.is_submitted:
            verdict.submitted.add(name)
            if not (fate.is_acknowledged or fate.may_be_acknowledged):
                verdict.lost.append(name)
        verdict.rollout_count += len(fate.digests)
        verdict.token_count += fate.token_count
        verdict.turn_count += fate.turn_count
        verdict.rollouts += [(name, seed, digest) for seed, digest in fate.digests]
    verdict.diverged_rollout_count = _diverged(fates.values())
    return verdict


def _mark(event: str, fate: _Fate, verdict: Verdict) -> None:
    if event == "submitted":
        verdict.resubmitted_count += fate.is_submitted
        fate.is_submitted = True
    elif event == "acking":
        fate.may_be_acknowledged = True
    elif event == "acked":
        fate.is_acknowledged = True


def _receive(line: Line, fate: _Fate, verdict: Verdict) -> None:
    name, is_fresh = line["group"], not line["is_redelivered"]
    verdict.redelivered_count += not is_fresh
    fate.fresh_count += is_fresh
    if fate.is_acknowledged or (is_fresh and fate.fresh_count > 1):
        verdict.duplicated.append(name)
    if line["flaw"]:
        verdict.malformed.append(f"{name}: {line['flaw']}")
    fate.may_be_acknowledged = False  # it is here again, so the acknowledgement in doubt was none
    fate.digests = [(line["seed"], digest) for digest in line["digests"]]
    fate.token_count = line["token_count"]
    fate.turn_count = line["turn_count"]


def _diverged(fates: Iterable[_Fate]) -> int:
    by_seed: dict[int, Counter[str]] = defaultdict(Counter)
    for fate in fates:
        for seed, digest in fate.digests:
            by_seed[seed][digest] += 1
    return sum(counts.total() - max(counts.values()) for counts in by_seed.values())
