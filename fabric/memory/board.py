"""Runs, workers and leases in memory: the twin of queue/board.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..contract.agreement import Agreement
from ..contract.records import Lease, RunConfig, WorkerInfo
from ..contract.sharing import LendSetting, SharingReport
from ..ports.queue import BadRow, Consumer, RowSurvey, RunDetails, RunStatus, Survey
from ..rules.lending.lease import has_ended
from ..rules.lending.terms import (
    CLEAR,
    changed,
    check_subject,
    concerns,
    lent_by_name,
    setting_of,
    subjects_of,
    switch_facts,
)
from ..rules.queue.push import waiting
from ..rules.queue.runs import check_same_run
from .leases import MemoryLeases
from .state import RunState


class MemoryLeaseBoard(MemoryLeases):
    """LeaseBoard (see ports) in memory."""

    async def create_run(self, config: RunConfig) -> RunConfig:
        existing = self._broker.runs.get(config.run_id)
        if existing is None:
            self._broker.runs[config.run_id] = RunState(config=config)
        else:
            check_same_run(existing.config, config)
            existing.config = config
        return config

    async def runs(self) -> dict[str, RunConfig]:
        return {name: state.config for name, state in self._broker.runs.items()}

    async def delete_run(self, run_id: str) -> None:
        self._run(run_id)
        del self._broker.runs[run_id]
        self._broker.deleted[run_id] = self._broker.now_ms()

    async def survey_rows(self, tables: Sequence[str] = ()) -> RowSurvey:
        return RowSurvey()

    async def remove_row(self, row: BadRow) -> bool:
        return False  # what is here was never bytes

    async def run_status(self, run_id: str) -> RunStatus:
        run = self._run(run_id)
        running, claimed = sum(run.trajectories.held.values()), sum(run.turns.held.values())
        scoring = len(run.trajectories.deadlines) - running
        return RunStatus(
            config=run.config,
            head_version=run.head_version,
            depth=run.depth,
            memory_bytes=run.bytes_held,
            trajectories={
                "queued": waiting(run.trajectories.ready_count, run.depth - scoring, running),
                "running": running,
                "scoring": scoring,
            },
            turns={"ready": waiting(run.turns.ready_count, run.depth - scoring, claimed), "claimed": claimed},
            groups_waiting=len(run.completed) + len(run.pending),
            dead_count=len(run.dead),
            counters=dict(run.counters),
            agreement=run.agreement,
            rewards=run.rewards,
        )

    async def survey(self, *, has_rewards: bool = False) -> Survey:
        now = self._broker.now_ms()
        return Survey(
            workers={name: (info, int(now - beat)) for name, (info, beat) in self._broker.workers.items()},
            assignments=dict(self._broker.assignments),
            runs={name: await self.run_status(name) for name in self._broker.runs},
            leases={name: await self.leases(name) for name in self._broker.runs},
            wall_ms=self._broker.clock.wall_ms(),
            now_ms=int(now),
        )

    async def run_details(self, run: RunConfig) -> RunDetails:
        state, now_s = self._run(run.run_id), self._broker.clock.now_s()
        now_ms, found = self._broker.now_ms(), dict[str, Consumer]()
        for client, at_s in state.asked_at_s.items():
            name = client.rpartition("/")[0]
            before = found.get(name, Consumer(name=name, held_count=0, idle_s=float("inf")))
            found[name] = Consumer(
                name=name,
                held_count=before.held_count + list(state.pending.values()).count(client),
                idle_s=min(before.idle_s, now_s - at_s),
                is_live=before.is_live or state.consumers.get(client, 0.0) > now_ms,
            )
        reason = next((letter.reason for letter in state.dead.values()), None)
        return RunDetails(consumers=tuple(found.values()), dead_reason=reason)

    async def memory_bytes(self) -> tuple[int, int]:
        return sum(state.bytes_held for state in self._broker.runs.values()), 0

    async def set_agreement(self, run_id: str, agreement: Agreement) -> None:
        self._run(run_id).agreement = Agreement.decode(agreement.encode())

    async def heartbeat(self, info: WorkerInfo) -> Lease | None:
        self._broker.workers[info.worker_id] = (info, self._broker.now_ms())
        run_id = self._broker.assignments.get(info.worker_id)
        state = self._broker.runs.get(run_id) if run_id else None
        if state is None or info.worker_id not in state.leases:
            return None
        lease = self._lease(info.worker_id, state)
        return None if has_ended(lease) else lease

    async def workers(self) -> dict[str, tuple[WorkerInfo, int]]:
        now = self._broker.now_ms()
        return {name: (info, int(now - beat)) for name, (info, beat) in self._broker.workers.items()}

    async def forget_worker(self, worker_id: str) -> None:
        self._broker.workers.pop(worker_id, None)
        self._broker.assignments.pop(worker_id, None)
        self._broker.sharing.pop(worker_id, None)

    async def wait_lease(self, worker_id: str, timeout_s: float) -> None:
        await self._broker.wait(self._broker.lease_bell(worker_id), timeout_s)

    async def set_lend(self, subject: str, value: LendSetting | str) -> None:
        await self._say(subject, self._named(subject, setting_of(subject, value)))

    async def change_lend(self, subject: str, changes: Mapping[str, Any]) -> LendSetting:
        check_subject(subject)
        said = changed(self._broker.lends.get(subject), changes)
        if "mode" in changes:
            said = self._named(subject, said)
        return await self._say(subject, said)

    def _named(self, subject: str, said: LendSetting) -> LendSetting:
        return lent_by_name(subject, said, [info for info, _ in self._broker.workers.values()])

    async def _say(self, subject: str, said: LendSetting) -> LendSetting:
        """Nothing is awaited before it is written: nobody comes in between."""
        said = replace(said, said_at_ms=int(self._broker.now_ms()))
        if said.mode == CLEAR:
            self._broker.lends.pop(subject, None)
        else:
            self._broker.lends[subject] = said
        for name, (info, _) in self._broker.workers.items():
            if concerns(subject, info):
                self._broker.lease_bell(name).set()
        await self.add_event("lend.switched", switch_facts(subject, said))
        return said

    async def lends(self) -> dict[str, LendSetting]:
        return dict(self._broker.lends)

    async def lends_of(self, worker_id: str, pool: str) -> tuple[dict[str, LendSetting], int]:
        names = subjects_of(worker_id, pool)
        said = {name: self._broker.lends[name] for name in names if name in self._broker.lends}
        return said, self._broker.clock.wall_ms()

    async def wall_ms(self) -> int:
        return self._broker.clock.wall_ms()

    async def set_sharing(self, report: SharingReport) -> None:
        if report.worker_id in self._broker.workers:
            self._broker.sharing[report.worker_id] = SharingReport.decode(report.encode())

    async def sharing(self) -> dict[str, SharingReport]:
        return dict(self._broker.sharing)

    async def add_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        await self.add_events([(kind, facts)])

    async def events(self, after: str, count: int, timeout_s: float) -> list[tuple[str, str, dict[str, Any]]]:
        start = int(after.split("-")[0])
        if start >= len(self._broker.events):
            await self._broker.clock.sleep(timeout_s)
        return self._broker.events[start : start + count]

    async def newest_events(self, before: str, count: int) -> list[tuple[str, str, dict[str, Any]]]:
        end = int(before.split("-")[0]) - 1 if before else len(self._broker.events)  # they are numbered from 1
        return self._broker.events[max(0, end - count) : end][::-1]
