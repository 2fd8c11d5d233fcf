"""Chaos' trainer: a process that submits, consumes, acknowledges and publishes, and writes down what it did first.

It is started again with the same arguments after every kill, finds in its journal how far it was, and repeats its last
submissions: a push that was answered must not be answered by the same group a second time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from rollfab.fabric.contract.errors import VersionConflict
from rollfab.fabric.contract.records import Group, Rollout
from rollfab.trainer.client import Run, connect

from .journal import Journal, Line, read_journal
from .worlds import LETTERS

RUN_ID = "chaos"
SUBMITTED_TOGETHER = 2
REPEATED_COUNT = 3  # submissions that a restarted trainer repeats, those without an answer not counted
TAKEN_COUNT = 4
TAKE_S = 0.25
THINKING_S = 0.3  # between receiving and acknowledging: where a kill leaves groups in doubt
PUBLISH_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """What one trainer does. The first one (index 0) publishes, too."""

    url: str = field(repr=False)
    index: int
    directory: Path
    """Holds journals, and the file `drain` once nothing new shall be submitted."""
    group_size: int
    turn_count: int
    depth: int
    """Trajectories of the run under way, above which nothing is submitted."""


def journal_path(directory: Path, index: int) -> Path:
    """Where a trainer writes."""
    return directory / f"trainer-{index}.journal"


def run_trainer(options: TrainerOptions) -> None:
    """Train nothing, until told to drain and nothing is left."""
    path = journal_path(options.directory, options.index)
    known = read_journal(path)
    journal = Journal(path)
    with connect(options.url) as fabric:
        trainer = _Trainer(options, fabric.run(RUN_ID), journal)
        journal.write("start", pid=os.getpid())
        for names in _unsure(known):
            trainer.submit(names)
        trainer.run(_next_number(known))


class _Trainer:
    def __init__(self, options: TrainerOptions, run: Run, journal: Journal) -> None:
        self._options = options
        self._run = run
        self._journal = journal
        self._weights: dict[str, Any] = {}
        self._publish_at_s = time.monotonic() + PUBLISH_S

    def run(self, number: int) -> None:
        while True:
            is_draining = (self._options.directory / "drain").exists()
            depth = self._run.status().depth
            if is_draining and not depth:
                self._journal.write("done")
                return
            if not is_draining and depth < self._options.depth:
                self.submit([f"t{self._options.index}-{number + n}" for n in range(SUBMITTED_TOGETHER)])
                number += SUBMITTED_TOGETHER
            self._consume()
            if self._options.index == 0 and time.monotonic() >= self._publish_at_s:
                self._publish()

    def submit(self, names: list[str]) -> None:
        """Push groups under these names, once or again."""
        tasks = [{"seed": _seed(name), "name": name} for name in names]
        self._journal.write("submitting", groups=names)
        self._run.submit(tasks, group_size=self._options.group_size, group_ids=names)
        self._journal.write("submitted", groups=names)

    def _consume(self) -> None:
        consumer = f"trainer-{self._options.index}"
        names = []
        with self._run.groups(timeout=TAKE_S, count=TAKEN_COUNT, consumer=consumer) as groups:
            for group in groups:
                self._journal.write("received", **self._facts(group))
                names.append(group.group_id)
            if names:
                time.sleep(THINKING_S)
                self._journal.write("acking", groups=names)
        if names:
            self._journal.write("acked", groups=names)

    def _facts(self, group: Group) -> Line:
        return {
            "group": group.group_id,
            "is_redelivered": group.redelivered,
            "flaw": flaw(group, self._options.group_size, self._options.turn_count),
            "seed": _seed(group.group_id),
            "token_count": sum(int(rollout.completion_mask.sum()) for rollout in group.rollouts),
            "turn_count": sum(rollout.turn_count for rollout in group.rollouts),
            "digests": [digest(rollout) for rollout in group.rollouts],
        }

    def _publish(self) -> None:
        """The same weights as a new version: everything moves, and greedy turns stay what they are."""
        self._weights = self._weights or self._run.weights()
        try:
            self._run.publish(self._weights, version=self._run.head_version() + 1)
        except VersionConflict:  # what was interrupted had gone through after all
            self._journal.write("conflict")
        self._publish_at_s = time.monotonic() + PUBLISH_S


def digest(rollout: Rollout) -> str:
    """Return 16 hexadecimal digits that are equal for the same tokens, in whatever order branches were made."""
    branches = sorted(branch.completion_ids.tobytes() for branch in rollout.branches())
    return str(xxhash.xxh64_hexdigest(b"|".join(branches)))


def flaw(group: Group, group_size: int, turn_count: int) -> str:
    """What is wrong with a delivered group; empty when nothing is."""
    if group.failures:
        return "dead letters " + ", ".join(f"{name}: {reason}" for name, reason in group.failures)
    names = [rollout.trajectory_id for rollout in group.rollouts]
    if names != [f"{group.group_id}.{index}" for index in range(group_size)]:
        return f"trajectories {', '.join(names)}"
    for rollout in group.rollouts:
        if rollout.turn_count != turn_count or rollout.reward != float(turn_count):
            return f"{rollout.trajectory_id} has {rollout.turn_count} turns and reward {rollout.reward}"
    return ""


def _seed(name: str) -> int:
    """Few enough that many rollouts share one and can be compared."""
    return int(name.rsplit("-", 1)[1]) % len(LETTERS)


def _unsure(known: list[Line]) -> list[list[str]]:
    """Submissions to repeat: those that were not answered, and some of the last that were."""
    answered = [line["groups"] for line in known if line["event"] == "submitted"]
    names = {name for groups in answered for name in groups}
    open_ones = [line["groups"] for line in known if line["event"] == "submitting" and not names & set(line["groups"])]
    return [*answered[-REPEATED_COUNT:], *open_ones]


def _next_number(known: list[Line]) -> int:
    numbers = [
        int(name.rsplit("-", 1)[1]) for line in known if line["event"] == "submitting" for name in line["groups"]
    ]
    return max(numbers, default=-1) + 1
