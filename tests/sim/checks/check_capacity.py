"""Leases, slots, weights and depth: nothing is used beyond what was lent, nothing is older than allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollfab.fabric.contract.lease_plan import EPOCHS_PER_TERM, LeaseChange
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.ports.queue import Exchange, RunStatus
from tests.sim.checks.check_turns import TurnChecker
from tests.sim.checks.checkers import Facts, require
from tests.sim.policy import tensors, weights_digest
from tests.sim.virtual_loop import Process

TAKEN_BACK = {"groups_completed", "trajectories_completed"}  # totals that a rerun of stale rollouts lowers
RETRIED = {"trajectories_failed", "groups_completed"}  # totals that a retry of dead letters lowers
FIRST_TOKEN_S = 4.0  # what the simulated workers are set to
NOTICE_S = 1.0  # within which a revoked worker must have stopped, when it can hear
STALL_S = FIRST_TOKEN_S + 1.5  # within which turns go on elsewhere when an engine makes no step
EXPIRY_S = 0.1  # within which a worker stops by itself when its lease runs out


@dataclass(slots=True)
class Lent:
    """A lease as the checkers know it."""

    epoch: int
    slot_count: int
    set_s: float
    until_s: float
    ended_s: float = math.inf


class CapacityChecker:
    """Promises 6 and 7, and the bounds on staleness."""

    def __init__(self, run_id: str, facts: Facts, turns: TurnChecker) -> None:
        self._run_id, self._strictest = run_id, facts.options
        self._facts = facts
        self._turns = turns
        self._leases: dict[str, Lent] = {}
        self._publisher_epoch = 0
        self._versions: dict[str, int] = {}  # of this run, by worker
        self._counters: dict[str, int] = {}

    # ---- leases

    def board_change_leases(
        self,
        process: Process,
        outcome: list[bool],
        term: int,
        changes: Sequence[LeaseChange],
        assigned: Mapping[str, str],
    ) -> None:
        ends = [(change, is_done) for change, is_done in zip(changes, outcome, strict=True) if change.is_end]
        sets = [(change, is_done) for change, is_done in zip(changes, outcome, strict=True) if not change.is_end]
        for change, is_done in (*ends, *sets):
            if is_done and change.lease.run_id == self._run_id:
                self._changed(process, change)

    def _changed(self, process: Process, change: LeaseChange) -> None:
        lease, now_s = change.lease, self._facts.now_s()
        held = self._leases.get(lease.worker_id)
        if change.is_end:
            if held is not None and held.epoch <= lease.lease_epoch and held.ended_s == math.inf:
                held.ended_s = now_s
                self._facts.note(process.name, "lease.end", lease.worker_id)
            return
        if held is not None:
            # Of one that has ended, only the term is remembered: an older leader grants nothing, whatever there was.
            has_ended = held.ended_s < math.inf
            newer = lease.lease_epoch >= (held.epoch - held.epoch % EPOCHS_PER_TERM if has_ended else held.epoch)
            require(newer, f"lease of {lease.worker_id}: epoch {lease.lease_epoch} set over {held.epoch}")
        until_s = now_s + change.duration_ms / 1000 if change.duration_ms else math.inf
        if held is None or held.epoch != lease.lease_epoch:
            self._facts.note(process.name, "lease.set", lease.worker_id, f"{lease.slot_count} slots")
        self._leases[lease.worker_id] = Lent(lease.lease_epoch, lease.slot_count, now_s, until_s)

    def turns_exchange(
        self,
        process: Process,
        outcome: Exchange,
        worker_id: str,
        **_: Any,
    ) -> None:
        if not outcome.claims:
            return
        lent = self._leases.get(worker_id)
        now_s = self._facts.now_s()
        require(lent is not None and lent.ended_s == math.inf, f"worker {worker_id}: given turns without a lease")
        assert lent is not None
        is_over = now_s > lent.until_s + EXPIRY_S and not self._is_odd_time(lent)
        require(not is_over, f"worker {worker_id}: given turns {now_s - lent.until_s:.2f} s after its lease ran out")
        count, limit = self._turns.held_count(worker_id), lent.slot_count
        if self._facts.options.shard_count > 1:
            return  # each shard counts its own: a call that comes late may take more than its worker has room for now
        require(count <= limit, f"worker {worker_id}: holds {count} turns, was lent {limit} slots")

    def stepped(self, process: Process, worker_id: str, requests: Sequence[str]) -> None:
        """An engine is about to make a token for each of these turns."""
        lent, now_s = self._leases.get(worker_id), self._facts.now_s()
        limit = self._facts.options.slot_count
        require(len(requests) <= limit, f"worker {worker_id}: runs {len(requests)} turns in {limit} slots")
        if lent is None or not any(name.endswith(f"@{self._run_id}") for name in requests):
            return
        is_over = (
            now_s > lent.until_s + EXPIRY_S
            and not self._is_odd_time(lent)
            and self._facts.was_well(process, lent.until_s - 0.1)
        )
        is_revoked = now_s > lent.ended_s + NOTICE_S and self._facts.was_well(process, lent.ended_s - 0.1)
        require(not is_over, f"worker {worker_id}: runs turns {now_s - lent.until_s:.2f} s after its lease ran out")
        require(not is_revoked, f"worker {worker_id}: runs turns {now_s - lent.ended_s:.2f} s after it was revoked")

    def _is_odd_time(self, lent: Lent) -> bool:
        """Whether a lease may last longer: the broker's clock counts no time in which the broker stood still."""
        return max(self._facts.broker.trouble_s, self._facts.clock_trouble_s) >= lent.set_s

    def check_standing(self, standing_s: dict[str, float]) -> None:
        """For how long each engine has had turns while it hung, looked at again and again."""
        late = {name: round(each, 1) for name, each in standing_s.items() if each > STALL_S}
        require(not late, f"turns were left in engines that hang, for {late} s")

    # ---- weights

    def weights_open_publisher(self, process: Process, epoch: int, run_id: str) -> None:
        require(epoch > self._publisher_epoch, f"publisher of {process.name}: epoch {epoch} was given before")
        self._publisher_epoch = epoch

    def weights_advance_head(self, process: Process, result: None, manifest: WeightManifest, shard_count: int) -> None:
        facts, version = self._facts, manifest.version
        if version <= facts.head_version:
            return
        is_last = manifest.epoch == self._publisher_epoch
        require(is_last, f"version {version}: published by {process.name}, which another publisher had replaced")
        facts.head_version = version
        facts.weights[version] = published_digest(version, process)
        facts.newest = version, life_of(process)
        facts.note(process.name, "head", str(version))

    def applied(self, process: Process, worker_id: str, facts: Facts, version: int, digest: int) -> None:
        """An engine holds other weights now, of the run that the facts are of."""
        if facts is self._facts:
            require(version >= self._versions.get(worker_id, -1), f"worker {worker_id}: went back to version {version}")
            self._versions[worker_id] = version
        else:
            self.forget(worker_id)
        is_right = facts.weights.get(version) == digest
        require(is_right, f"worker {worker_id}: holds other weights than were published as version {version}")
        self._facts.note(process.name, "weights", worker_id, version)

    def forget(self, worker_id: str) -> None:
        """An engine holds weights of another run: it comes back by what it has then, which may be our older version."""
        self._versions.pop(worker_id, None)

    # ---- bounds

    def check_status(self, status: RunStatus) -> None:
        """The run in numbers, looked at again and again."""
        limit = status.config.trajectory_count_max
        require(status.depth <= limit, f"depth is {status.depth}, its bound {limit}")
        numbers = {**status.trajectories, **status.turns, "groups_waiting": status.groups_waiting}
        require(min(numbers.values()) >= 0, f"a number is negative: {numbers}")
        for name, total in self._counters.items():
            now = status.counters.get(name, 0)
            is_rerun = name in TAKEN_BACK and self._strictest.when_stale == "rerun"
            is_taken_back = is_rerun or (name in RETRIED and self._facts.options.retries)
            require(now >= total or is_taken_back, f"total {name} went from {total} to {now}")
        self._counters = dict(status.counters)


def published_digest(version: int, process: Process) -> int:
    """The digest of what a trainer publishes: each life of it makes weights of its own."""
    return digest_of(version, life_of(process))


def digest_of(version: int, life: int) -> int:
    """The digest of the weights that a trainer's life makes as a version."""
    return weights_digest({name: values.reshape(-1).view("<u4") for name, values in tensors(version, life).items()})


def life_of(process: Process) -> int:
    """Which life of its role a process is: the number at the end of its name."""
    return int(process.name.rsplit("-", 1)[1])
