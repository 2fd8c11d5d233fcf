"""Turns what serving teams said into what the api shows. Pure, as views.py."""

from __future__ import annotations

from collections.abc import Mapping

from ...fabric.contract.records import WorkerInfo
from ...fabric.contract.sharing import LendSetting
from ...fabric.rules.lending.terms import LendTerms, terms
from ..schemas.answers import WorkerView
from ..schemas.base import shown
from ..schemas.lending import LendingWorker


def terms_of(info: WorkerInfo, lends: Mapping[str, LendSetting], minute: int) -> LendTerms | None:
    """Return the terms of a worker at this minute of the week; None if it is no serving worker."""
    return terms(lends, info.worker_id, info.pool, minute) if info.role == "serving" else None


def value_of(setting: LendSetting) -> str:
    """Write a setting in one word: its mode, or the slots that it is limited to."""
    slots = setting.slot_count_max
    return str(slots) if setting.mode == "on" and slots is not None else setting.mode


def lending_worker(worker: WorkerView) -> LendingWorker:
    """Return the part of a serving worker that is about lending."""
    assert worker.lend_terms is not None
    slot_count = worker.lease.slot_count if worker.lease is not None else 0
    return shown(LendingWorker, worker, terms=worker.lend_terms, slot_count=slot_count)
