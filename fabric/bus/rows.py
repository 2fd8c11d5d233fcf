"""Rows of the control plane, read: whoever may write to the broker may have written anything there.

- What many look at, and many may write (workers, events, agreement), is shown as unreadable rather than refused: one
  bad row must not stop the controller, or every page.
- What only its owner writes (leases, the head) is refused as WireError.
- A serving team's word that cannot be read is "off": nothing is lent by mistake.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..agreement import Agreement, Alarm, AlarmRule
from ..errors import InputError, WireError
from ..lease_plan import LeasePlan
from ..records import Lease, WorkerInfo
from ..rules.chain import Link
from ..rules.lease import time_left
from ..rules.lending import check_setting, setting_of
from ..sharing import ALL, LendSetting, SharingReport
from ..weights.manifest import DAMAGE_CHUNK_COUNT_MAX, Damage, Head, Holder
from ..wire import MAGIC, load_json

__all__ = [
    "agreement_row",
    "damage_row",
    "event_row",
    "head_row",
    "holder_row",
    "lease_row",
    "lend_row",
    "plan_row",
    "sending_rows",
    "sharing_row",
    "version_rows",
    "worker_row",
]

UNREADABLE = "unreadable"
SENDING = re.compile(r"(\d{1,16}):([a-z0-9-]+)\.(\d{1,16})")
CHUNK_COUNT_MAX = 1 << 22  # of a version: terabytes

log = logging.getLogger(__name__)


def worker_row(name: bytes, raw: bytes) -> WorkerInfo:
    """What a worker says of itself; one that cannot be read shows as failed, in a role that nobody has."""
    worker_id = name.decode("utf-8", "replace")
    try:
        info = WorkerInfo.decode(raw)
        if info.worker_id != worker_id:
            raise WireError(f"it is of a worker {info.worker_id!r}, under another one's name")
        return info
    except WireError as error:
        text = f"what it says of itself cannot be read: {error}"
        return WorkerInfo(worker_id=worker_id, role=UNREADABLE, pid=0, host="", state="failed", error=text)


def agreement_row(raw: bytes | None) -> Agreement | None:
    """How workers and trainer agreed last; what cannot be read shows as an alarm."""
    if raw is None:
        return None
    try:
        return Agreement.decode(raw)
    except WireError as error:
        text = f"what the trainer said of its workers' log-probabilities cannot be read: {error}"
        alarm = Alarm(worker_id="", figure=UNREADABLE, value=0.0, limit=0.0, policy_version=-1, text=text)
        return Agreement(policy_version=-1, rule=AlarmRule(name=UNREADABLE), alarms=(alarm,))


def plan_row(raw: bytes | None) -> LeasePlan | None:
    """The capacity plan; None where it cannot be read: it is for people, and the next one comes soon."""
    try:
        return LeasePlan.decode(raw) if raw is not None else None
    except WireError:
        return None


def event_row(entry_id: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, str, dict[str, Any]]:
    """An event as (id, kind, facts)."""
    try:
        with _reading("event"):
            facts = load_json(fields[b"facts"])
            if not isinstance(facts, dict):
                raise WireError(f"facts are {type(facts).__name__}, expected an object")
            return entry_id.decode(), fields[b"kind"].decode(), facts
    except WireError as error:
        return entry_id.decode(), UNREADABLE, {"error": str(error)}


def lease_row(worker_id: str, run_id: str, raw: bytes, now_ms: int) -> Lease:
    """A lease from "lease_epoch slot_count lease_until_ms" (0: standing), at the `now_ms` of the shard that had it.

    Raises:
        WireError: it is not written so.
    """
    with _reading(f"the lease of worker {worker_id} on run {run_id}"):
        epoch, slots, last = (int(word) for word in raw.split())
    until_ms = last or None
    return Lease(
        worker_id=worker_id,
        run_id=run_id,
        lease_epoch=epoch,
        slot_count=slots,
        lease_until_ms=until_ms,
        remaining_ms=time_left(until_ms, now_ms),
    )


def lend_row(raw: bytes) -> LendSetting:
    """What a serving team said, as a record or as one word."""
    try:
        with _reading("what a serving team said"):
            return check_setting(LendSetting.decode(raw)) if raw.startswith(MAGIC) else setting_of(ALL, raw.decode())
    except (InputError, WireError) as error:
        return LendSetting(mode="off", reason=str(error))


def sharing_row(raw: bytes) -> SharingReport | None:
    """What a serving worker measured, or None where it cannot be read."""
    try:
        report = SharingReport.decode(raw)
    except WireError:
        return None
    figures = (*report.alone.values(), *report.shared.values())
    return report if all(type(figure) in (int, float) for figure in figures) else None


def head_row(run_id: str, values: Sequence[bytes | None]) -> Head:
    """The head of a run's weights, of its version, epoch, kind and moved_by.

    Raises:
        WireError: it is not numbers and a word.
    """
    with _reading(f"the head of run {run_id}"):
        version, epoch, kind, moved_by = values
        return Head(int(version or -1), int(epoch or 0), (kind or b"").decode(), int(moved_by or 0))


def version_rows(run_id: str, fields: list[bytes]) -> list[tuple[int, str]]:
    """Versions held, as (version, kind), ascending, from "<version>:<kind>"; what is not written so is none."""
    found = []
    for field in fields:
        try:
            with _reading(f"a version of run {run_id}, {field[:40]!r},"):
                version, kind = field.decode().split(":", 1)
                found.append((int(version), kind))
        except WireError as error:
            log.warning("weights.version_unreadable", extra={"run_id": run_id, "error": str(error)})
    return sorted(found)


def sending_rows(run_id: str, rows: Mapping[bytes, bytes]) -> list[tuple[Link, str]]:
    """Versions that are being sent, with their fields, from "<version>:<kind>.<epoch>" → chunk count.

    What cannot be read is left out: its chunks go by themselves.
    """
    found = []
    for field, count in rows.items():
        match = SENDING.fullmatch(field.decode("utf-8", "replace"))
        if match and count.isdigit() and int(count) <= CHUNK_COUNT_MAX:
            version, kind, epoch = match.groups()
            place = Link(
                version=int(version),
                base_version=-1,
                kind=kind,
                epoch=int(epoch),
                payload_bytes=0,
                chunk_count=int(count),
            )
            found.append((place, match.string))
    return found


def holder_row(holder_id: bytes, raw: bytes | None, address: bytes | None = None) -> Holder:
    """Who holds weights, from "[version, node, region]", and where it serves them, if it does and one may know.

    Raises:
        WireError: it is not written so.
    """
    name = holder_id.decode("utf-8", "replace")
    with _reading(f"what {name} says that it holds"):
        version, *texts = load_json(raw or b"")
        if type(version) is not int or len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise ValueError("it is not a version and two texts")
        return Holder(name, version, (address or b"").decode(), *texts)


def damage_row(field: bytes, raw: bytes) -> Damage:
    """What somebody could not read, from "<version>:<kind>" and "[epoch, chunks, problem, reporter]".

    Raises:
        WireError: it is not written so.
    """
    with _reading(f"the report of damage to {field[:40]!r}"):
        version, kind = field.decode().split(":", 1)
        epoch, chunks, problem, reporter = load_json(raw)
        numbers = [epoch, *chunks[:DAMAGE_CHUNK_COUNT_MAX]]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("it does not name chunks by whole numbers")
        if not (isinstance(problem, str) and isinstance(reporter, str)):
            raise ValueError("it does not end with two texts")
        return Damage(int(version), kind, epoch, tuple(numbers[1:]), problem[:40], reporter[:80])


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except WireError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"{what} cannot be read: {error}") from error
