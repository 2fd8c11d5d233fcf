"""Readers of the control plane's rows, which may hold anything: every user with write access can write there.

- An unreadable row that many read and many may write (workers, events, agreement) is shown as unreadable rather than
  refused: one bad row must not stop the controller, or every page. If it cannot be shown so, it is left out and noted
  (BadRows).
- An unreadable row that only its owner writes (the head) is refused as WireError.
- An unreadable setting of a serving team counts as "off": nothing is lent by mistake.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

from ..broker.clients.typed import is_wrong_type
from ..contract.agreement import Agreement, Alarm, AlarmRule
from ..contract.errors import ConfigError, InputError, WireError
from ..contract.fields import WHOLE_MAX
from ..contract.ids import check_name, group_of
from ..contract.lease_plan import LeasePlan, Sample
from ..contract.limits import GROUP_SIZE_MAX, SLOT_COUNT_MAX
from ..contract.records import DeadLetter, Lease, Rollout, RunConfig, TrajectoryJob, TurnJob, WorkerInfo
from ..contract.sharing import ALL, LendSetting, SharingReport
from ..contract.text import one_line
from ..contract.wire import MAGIC, load_json
from ..format.manifest import DAMAGE_CHUNK_COUNT_MAX, Damage, Head, Holder
from ..ports.queue import BAD_ROW_COUNT_MAX, BadRow
from ..rules.lending.terms import check_setting, setting_of
from ..rules.queue.curve import Curve, RewardBucket, read_curve
from ..rules.queue.keeping import KeptGroup
from ..rules.queue.retries import given_up
from ..rules.weights.chain import Link

UNREADABLE = "unreadable"
ENDINGS = ("all", "quorum", "deadline")
JOB_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(\.\d{1,9}){1,2}")
WHOLE = re.compile(rb"-?\d{1,18}")
SENDING = re.compile(r"(\d{1,16}):([a-z0-9-]+)\.(\d{1,16})")
CHUNK_COUNT_MAX = 1 << 22  # of a version: enough for terabytes

log = logging.getLogger(__name__)


class BadRows:
    """Collects the rows that a reading cannot read; each method returns a substitute for such a row."""

    def __init__(self) -> None:
        self.found: list[BadRow] = []

    def note(self, table: str, row: bytes | str, problem: object) -> None:
        """Note a row that is left out."""
        if len(self.found) < BAD_ROW_COUNT_MAX:
            self.found.append(BadRow(table, shown_name(row), one_line(str(problem))))

    def answer(self, table: str, answer: Any, nothing: Any) -> Any:
        """Return a pipeline's answer, or `nothing` if the key is of another type. Raise the broker's other errors."""
        if not isinstance(answer, Exception):
            return answer
        if not is_wrong_type(answer):
            raise answer
        self.note(table, "", "it is a key of another type than this table")
        return nothing

    def whole(self, table: str, row: bytes | str, raw: bytes | None, default: int) -> int:
        """Read a whole number below 10^18; `default` if there is none."""
        if raw is None:
            return default
        if WHOLE.fullmatch(raw):
            return int(raw)
        self.note(table, row, f"{raw[:40]!r} is no whole number")
        return default

    def wholes(self, table: str, rows: Mapping[bytes, bytes]) -> dict[str, int]:
        """Read counts by name; leave out values that are no count."""
        found = {}
        for name, raw in rows.items():
            if WHOLE.fullmatch(raw) and name.isascii():
                found[name.decode()] = int(raw)
            else:
                self.note(table, name, f"{raw[:40]!r} is no count")
        return found

    def runs(self, rows: Mapping[bytes, bytes]) -> dict[str, RunConfig]:
        """Read runs by name; leave out unreadable ones."""
        found = {}
        for name, raw in rows.items():
            try:
                config = run_row(name, raw)
                found[config.run_id] = config
            except WireError as error:
                self.note("runs", name, error)
        return found

    def curve(self, table: str, rows: Mapping[bytes, bytes]) -> Curve:
        """Read a shard's curve of rewards; leave out rows that do not belong to one."""
        width = self.whole(table, "width", rows.get(b"width"), 1)
        if not 1 <= width <= WHOLE_MAX:
            self.note(table, "width", f"{width} is no width")
            return ()
        found: list[RewardBucket] = []
        for name, raw in rows.items():
            try:
                found += reward_buckets(width, name, raw)
            except (ValueError, OverflowError) as error:
                self.note(table, name, error)
        return tuple(sorted(found, key=lambda bucket: bucket.version))


def reward_buckets(width: int, name: bytes, raw: bytes) -> Curve:
    """Read a row of a curve. Raise ValueError if it is none, or out of bounds."""
    found = read_curve({b"width": b"%d" % width, name: raw}) if name != b"width" else ()
    for bucket in found:
        wholes = (bucket.count, bucket.token_sum, bucket.version + 1)
        sums = (bucket.reward_sum, bucket.reward_square_sum)  # with large rewards they may be infinite
        has_numbers = isfinite(bucket.reward_min) and isfinite(bucket.reward_max) and not any(map(isnan, sums))
        if not all(0 <= each <= WHOLE_MAX for each in wholes) or not bucket.count or not has_numbers:
            raise ValueError(f"{raw[:80]!r} is out of bounds")
    return found


def shown_name(row: bytes | str) -> str:
    """Return a row's name for people, which tells it from every other."""
    return one_line(row if isinstance(row, str) else row.decode("utf-8", "backslashreplace"))


def run_row(name: bytes, raw: bytes) -> RunConfig:
    """Read a run.

    Raises:
        WireError: it cannot be read, is another run's, or has a name that no run may have.
    """
    config = RunConfig.decode(raw)
    if config.run_id.encode("utf-8", "replace") != name:
        raise WireError(f"it is run {config.run_id!r:.100}, under another one's name")
    try:
        check_name("run", config.run_id)
    except ConfigError as error:
        raise WireError(error.message) from error
    return config


def is_job_name(raw: bytes) -> bool:
    """Whether this may be the name of a trajectory or turn; any other was written over some table of jobs."""
    return JOB_NAME.fullmatch(raw) is not None


def job_row(name: bytes, raw: bytes | None) -> TrajectoryJob:
    """Read a trajectory's job.

    Raises:
        WireError: there is none, it cannot be read, or it belongs to another trajectory.
    """
    job = TrajectoryJob.decode(_there(raw))
    _check_own(name, job.trajectory_id)
    return job


def turn_row(name: bytes, raw: bytes | None) -> TurnJob:
    """Read a turn's job. Raises the same as job_row."""
    job = TurnJob.decode(_there(raw))
    _check_own(name, job.turn_id)
    return job


def text_rows(answer: Any) -> dict[str, str]:
    """Read a hash of texts; none, where another type of table stands there."""
    rows = answer if isinstance(answer, Mapping) else {}
    return {name.decode("utf-8", "replace"): raw.decode("utf-8", "replace") for name, raw in rows.items()}


def waited_s(entry_id: bytes | None, wall_ms: int) -> float | None:
    """Return how long a job waited, from the id of its entry; None: it had none, or somebody else gave it."""
    raw = entry_id.partition(b"-")[0] if entry_id else b""
    return max(0.0, (wall_ms - int(raw)) / 1000) if WHOLE.fullmatch(raw) else None


def _there(raw: bytes | None) -> bytes:
    if raw is None:
        raise WireError("its job is gone")
    return raw


def _check_own(name: bytes, job_id: str) -> None:
    if job_id.encode("utf-8", "replace") != name or not is_job_name(name):
        raise WireError(f"it is {job_id!r:.100}, under another one's name")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts of a group's hash; an unreadable fact counts as unknown."""

    size: int
    failed_count: int
    task_id: str
    ended_by: str

    @classmethod
    def of(cls, facts: Mapping[bytes, bytes]) -> GroupFacts:
        bad = BadRows()
        size, failed_count = (bad.whole("", name, facts.get(name.encode()), 0) for name in ("size", "failed"))
        try:
            task = load_json(facts.get(b"task", b""))
        except WireError:
            task = None
        task_id = task.get("task_id") if isinstance(task, dict) else None
        ended_by = facts.get(b"ended_by", b"").decode("utf-8", "replace")
        return cls(
            size=max(0, min(size, GROUP_SIZE_MAX)),
            failed_count=failed_count,
            task_id=task_id if isinstance(task_id, str) else UNREADABLE,
            ended_by=ended_by if ended_by in ENDINGS else "all",
        )


def rollout_rows(group_id: str, rows: Mapping[bytes, bytes]) -> tuple[dict[str, Rollout], dict[str, str]]:
    """Read a group's rollouts by trajectory, and say why others cannot be read; leave out rows of other groups."""
    found: dict[str, Rollout] = {}
    unread: dict[str, str] = {}
    for raw_name, raw in rows.items():
        if not is_job_name(raw_name) or group_of(raw_name.decode()) != group_id:
            continue
        name = raw_name.decode()
        try:
            found[name] = Rollout.decode(raw)
            if (found[name].trajectory_id, found[name].group_id) != (name, group_id):
                raise WireError("it is another one's")
        except WireError as error:
            found.pop(name, None)
            unread[name] = f"its rollout in the broker cannot be read: {error}"
    return found, unread


def letter_row(run_id: str, name: bytes, raw: bytes) -> DeadLetter:
    """Read a dead letter; an unreadable one says so."""
    try:
        return DeadLetter.decode(raw)
    except WireError as error:
        text = f"its dead letter cannot be read, so it cannot be tried again; discard it: {error}"
        return _jobless(run_id, "-", shown_name(name), text)


def given_up_row(run_id: str, worker_id: str, name: str, raw: bytes | None, reason: str) -> DeadLetter:
    """Make the dead letter of a trajectory that failed through no user's code, from its job in the broker."""
    try:
        return given_up(run_id, worker_id, TrajectoryJob.decode(raw or b""), reason)
    except WireError as error:
        return _jobless(run_id, worker_id, name, f"{reason}; and its job cannot be read: {error}")


def _jobless(run_id: str, worker_id: str, name: str, reason: str) -> DeadLetter:
    return DeadLetter(
        trajectory_id=name, run_id=run_id, worker_id=worker_id, reason=reason, traceback="", attempt=0, job={}
    )


def worker_row(name: bytes, raw: bytes) -> WorkerInfo:
    """Read a worker's info; an unreadable one shows as failed, in a role that nobody has."""
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
    """Read how workers and trainer agreed last; an unreadable row shows as an alarm."""
    if raw is None:
        return None
    try:
        return Agreement.decode(raw)
    except WireError as error:
        text = f"what the trainer said of its workers' log-probabilities cannot be read: {error}"
        alarm = Alarm(worker_id="", figure=UNREADABLE, value=0.0, limit=0.0, policy_version=-1, text=text)
        return Agreement(policy_version=-1, rule=AlarmRule(name=UNREADABLE), alarms=(alarm,))


def plan_row(raw: bytes | None) -> LeasePlan | None:
    """Read the capacity plan; None if unreadable: it is for people, and the next one comes soon."""
    try:
        return LeasePlan.decode(raw) if raw is not None else None
    except WireError:
        return None


def sample_row(raw: bytes) -> Sample | None:
    """Read a sample; None if unreadable: there are others."""
    try:
        return Sample.decode(raw)
    except WireError:
        return None


def event_row(entry_id: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, str, dict[str, Any]]:
    """Read an event as (id, kind, facts)."""
    try:
        with _reading("event"):
            facts = load_json(fields[b"facts"])
            if not isinstance(facts, dict):
                raise WireError(f"facts are {type(facts).__name__}, expected an object")
            return entry_id.decode(), fields[b"kind"].decode(), facts
    except WireError as error:
        return entry_id.decode(), UNREADABLE, {"error": str(error)}


def lease_row(worker_id: str, run_id: str, raw: bytes, now_ms: int) -> Lease:
    """Read a lease from "lease_epoch slot_count lease_until_ms" (0: standing), at the `now_ms` of its shard.

    What is left is counted here alone: every shard has a clock of its own, and they drift apart.

    Raises:
        WireError: it is not written so.
    """
    with _reading(f"the lease of worker {worker_id} on run {run_id}"):
        epoch, slots, last = (int(word) for word in raw[:64].split())
        if not (0 <= epoch <= WHOLE_MAX and 0 <= slots <= SLOT_COUNT_MAX and 0 <= last <= WHOLE_MAX):
            raise ValueError("a number is out of bounds")
    until_ms = last or None
    return Lease(
        worker_id=worker_id,
        run_id=run_id,
        lease_epoch=epoch,
        slot_count=slots,
        lease_until_ms=until_ms,
        remaining_ms=None if until_ms is None else max(0, until_ms - now_ms),
    )


def lend_word(raw: bytes) -> LendSetting:
    """Read a serving team's setting, a record or one word.

    Raises:
        WireError, InputError: it is neither.
    """
    with _reading("what a serving team said"):
        return check_setting(LendSetting.decode(raw)) if raw.startswith(MAGIC) else setting_of(ALL, raw.decode())


def lend_row(raw: bytes) -> LendSetting:
    """Read the same; "off" if unreadable."""
    try:
        return lend_word(raw)
    except (InputError, WireError) as error:
        return LendSetting(mode="off", reason=str(error))


def sharing_row(raw: bytes) -> SharingReport | None:
    """Read a serving worker's measurements; None if unreadable."""
    try:
        report = SharingReport.decode(raw)
    except WireError:
        return None
    figures = (*report.alone.values(), *report.shared.values())
    return report if all(type(figure) in (int, float) for figure in figures) else None


def kept_row(entry_id: bytes, fields: Mapping[bytes, bytes]) -> KeptGroup:
    """Read an entry of the groups that are kept; one that says no size counts as large, and goes first."""
    size = fields.get(b"bytes", b"")
    return KeptGroup(
        entry_id=entry_id.decode(),
        group_id=fields.get(b"group", b"").decode("utf-8", "replace"),
        ended_ms=int(entry_id.partition(b"-")[0]),
        size_bytes=int(size) if size.isdigit() and len(size) <= 16 else WHOLE_MAX,
    )


def head_row(run_id: str, values: Sequence[bytes | None]) -> Head:
    """Read the head of a run's weights from its version, epoch, kind and moved_by.

    Raises:
        WireError: it is not numbers and a word.
    """
    with _reading(f"the head of run {run_id}"):
        version, epoch, kind, moved_by = values
        return Head(int(version or -1), int(epoch or 0), (kind or b"").decode(), int(moved_by or 0))


def version_rows(run_id: str, fields: list[bytes]) -> list[tuple[int, str]]:
    """Read the versions held, as (version, kind), ascending, from "<version>:<kind>"; leave out any other field."""
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
    """Read the versions that are being sent, with their fields, from "<version>:<kind>.<epoch>" → chunk count.

    Leave out unreadable rows: their chunks expire by themselves.
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
    """Read a holder of weights from "[version, node, region]", and its address if it serves and we may read that.

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
    """Read a report of damage from "<version>:<kind>" and "[epoch, chunks, problem, reporter]".

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
