"""What becomes of a comparison: kept on the broker for all to see, and said aloud where a worker is over a limit.

- The newest comparison of a run replaces the one before. A worker whose alarm is open stays in it until its tokens
  agree again: a batch in which it made none says nothing in its favour.
- An alarm is one event and one warning when it opens; `agreement.settled` is the event when it closes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..fabric.contract.agreement import Agreement, Alarm, AlarmRule, WorkerFigures
from ..fabric.contract.records import Group
from ..fabric.ports.queue import LeaseBoard
from ..fabric.ports.weights import WeightStore
from .agreement import WORKER_COUNT_MAX, compare, rule_for, worst_first
from .publish.borrowing import in_thread

log = logging.getLogger(__name__)


class AgreementReporter:
    """Compares batches of one run. Owns its open alarms."""

    def __init__(self, board: LeaseBoard, weights: WeightStore, run_id: str) -> None:
        self._board = board
        self._weights = weights
        self._run_id = run_id
        self._rule: AlarmRule | None = None
        self._open: dict[str, tuple[Alarm, WorkerFigures | None]] = {}

    async def report(
        self, groups: Sequence[Group], logprobs: Sequence[Any], version: int | None, rule: AlarmRule | None
    ) -> Agreement:
        """Compare a batch, keep the outcome on the broker, raise and close alarms.

        Args:
            version: None: the head.
            rule: None: the default one for the dtypes of the weights that are published.

        Raises:
            InputError: see `compare`.
        """
        if version is None:
            version = (await self._weights.head(self._run_id)).version
        rule = rule or await self._default_rule()
        agreement = await in_thread(lambda _: compare(groups, logprobs, version=version, rule=rule))
        opened, settled = self._take(agreement)
        agreement = self._with_open(agreement)
        await self._board.set_agreement(self._run_id, agreement)
        for alarm in opened:
            log.warning("agreement.alarm: %s", alarm.text, extra={"run_id": self._run_id, **asdict(alarm)})
            await self._board.add_event("agreement.alarm", {"run_id": self._run_id, **asdict(alarm)})
        for worker_id in settled:
            facts = {"run_id": self._run_id, "worker_id": worker_id, "policy_version": version}
            log.info("agreement.settled", extra=facts)
            await self._board.add_event("agreement.settled", facts)
        return agreement

    async def _default_rule(self) -> AlarmRule:
        """By what is published; a run's dtypes never change, so they are read once."""
        if self._rule is None:
            held = await self._weights.held(self._run_id)
            manifests = await self._weights.manifests(self._run_id, held[-1:])
            dtypes = {spec.dtype for found in manifests if found is not None for spec in found.tensors.tensors}
            if not dtypes:
                return rule_for(set())
            self._rule = rule_for(dtypes)
        return self._rule

    def _take(self, agreement: Agreement) -> tuple[list[Alarm], list[str]]:
        """Update what is open; returns alarms that opened and workers whose alarm closed."""
        rows = {row.worker_id: row for row in agreement.workers}
        now = {alarm.worker_id: (alarm, rows.get(alarm.worker_id)) for alarm in agreement.alarms}
        opened = [alarm for name, (alarm, _) in now.items() if name not in self._open]
        least = max(1, agreement.rule.token_count_min)  # fewer say nothing in its favour
        is_calm = {row.worker_id: row.token_count >= least for row in agreement.workers}
        is_calm[""] = agreement.fresh.token_count + agreement.stale.token_count > 0
        settled = [name for name in self._open if name not in now and is_calm.get(name)]
        self._open = {name: entry for name, entry in self._open.items() if name not in settled} | now
        while len(self._open) > WORKER_COUNT_MAX:
            del self._open[next(iter(self._open))]
        return opened, [name for name in settled if name]

    def _with_open(self, agreement: Agreement) -> Agreement:
        """The agreement with alarms that are open although their workers made no token of this batch, or too few."""
        alarmed = {alarm.worker_id for alarm in agreement.alarms}
        seen = {row.worker_id for row in agreement.workers}
        older = {name: entry for name, entry in self._open.items() if name not in alarmed}
        if not older:
            return agreement
        absent = [row for name, (_, row) in older.items() if name not in seen and row is not None]
        alarms = [*agreement.alarms, *(alarm for alarm, _ in older.values())]
        rows = [*agreement.workers, *absent]
        return replace(
            agreement,
            worker_count=agreement.worker_count + len(absent),
            workers=worst_first(rows, alarms),
            alarms=tuple(alarms[:WORKER_COUNT_MAX]),
        )
