"""How long things take: one histogram per run, role and thing, of buckets that double from a millisecond to an hour.

- A role counts in plain lists. One thread writes them and another may read: nothing is locked, and a note costs well
  under a microsecond.
- With its heartbeats a role reports what was added since. The broker adds reports up (queue/lua/board/add_timings.lua),
  so nothing is forgotten when a role ends but what it measured since its last report. A report whose answer was lost
  is sent again as it was, under its number, and counts once.
- Groups are counted by the broker itself, as it completes them (queue/lua/use/close.lua).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...contract.fields import WHOLE_MAX
from ...tracing.spans import Spans

TIMINGS = {
    "trajectory_queue": "From a trajectory's being ready to an agent's claim.",
    "trajectory": "From an agent's claim of a trajectory to its being handed in.",
    "turn": "From an agent's asking for a turn to its result.",
    "turn_queue": "From a turn's being ready to its first claim by a worker.",
    "ttft": "From a worker's beginning with a turn to its first token.",
    "tpot": "Per token of a turn after the first.",
    "handover": "From a turn's being given or taken back to its first token on the next worker.",
    "environment_step": "A step of an environment.",
    "reward": "A call of a reward function.",
    "weights_stage": "Fetching and checking a version of the weights, while the engine generates.",
    "weights_switch": "Writing a version of the weights, while the engine does not generate.",
    "group": "From a group's being taken in to its being complete.",
}
BOUNDS_MS = tuple(1 << place for place in range(23))  # 1 ms to 70 minutes
BOUNDS_S = tuple(bound / 1000 for bound in BOUNDS_MS)
BUCKET_COUNT = len(BOUNDS_S) + 1  # the last: above all bounds
SECONDS_MAX = 1e8  # three years; more is no duration
RUN_COUNT_MAX = 1024  # that a role counts for: of more, those that it began with first are forgotten
SUM = BUCKET_COUNT  # where a row has its sum, in microseconds


Counts = Mapping[tuple[str, int], int]  # by name and bucket, or SUM
Latest = Mapping[tuple[str, int], tuple[float, str]]  # by name and bucket: seconds, trajectory_id


class RunTimings:
    """The durations of one run that one role has measured. One thread notes; one, perhaps another, reads.

    spans: takes when they were, of trajectories that are traced.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self.spans = spans or Spans()
        self._rows = {name: [0] * (BUCKET_COUNT + 1) for name in TIMINGS}
        self._latest: dict[tuple[str, int], tuple[float, str]] = {}
        self._read = {name: row[:] for name, row in self._rows.items()}  # the reader's own

    def note(self, name: str, seconds: float, trajectory_id: str = "") -> None:
        """Count a duration; leave out what is none: below 0, infinite or NaN."""
        if not 0 <= seconds <= SECONDS_MAX:
            return
        row, place = self._rows[name], bisect_left(BOUNDS_S, seconds)
        row[place] += 1
        row[SUM] += int(seconds * 1e6)
        if trajectory_id:
            self._latest[name, place] = seconds, trajectory_id

    def read(self) -> tuple[Counts, Latest]:
        """Return what was added since the last reading, and the latest durations of each bucket since then."""
        counts: dict[tuple[str, int], int] = {}
        for name, row in self._rows.items():
            now, before = row[:], self._read[name]
            if now != before:
                self._read[name] = now
                grown = enumerate(zip(now, before, strict=True))
                counts |= {(name, place): new - old for place, (new, old) in grown if new != old}
        latest, self._latest = self._latest, {}
        return counts, dict(latest)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingReport:
    """What a role has measured of a run since its last report. number: no other report of the role has it."""

    run_id: str
    number: str
    counts: Counts
    latest: Latest


class Timings:
    """The durations of all runs that a role serves, and how much of them it has reported."""

    def __init__(self, process_id: str, spans: Spans | None = None) -> None:
        """process_id: tells this process from others of its name. spans: takes the process's."""
        self._spans = spans or Spans()
        self._process_id = process_id
        self._runs: dict[str, RunTimings] = {}
        self._number = 0
        self._pending: list[TimingReport] = []

    def of(self, run_id: str) -> RunTimings:
        """Return the durations of a run, for whoever measures."""
        found = self._runs.pop(run_id, None) or RunTimings(self._spans)
        while len(self._runs) >= RUN_COUNT_MAX:
            self._runs.pop(next(iter(self._runs)))
        self._runs[run_id] = found
        return found

    def reports(self) -> list[TimingReport]:
        """Return what is to be reported, one report a run: once more what was not heard, or else what is new."""
        if not self._pending:
            for run_id, run in list(self._runs.items()):
                counts, latest = run.read()
                if counts:
                    self._number += 1
                    number = f"{self._process_id}.{self._number}"
                    self._pending.append(TimingReport(run_id=run_id, number=number, counts=counts, latest=latest))
        return self._pending

    def heard(self) -> None:
        """Forget the reports: they were counted."""
        self._pending = []


# ---------------------------------------------------------------- as the broker has them
#
# A table of a run: "name role place" → count, or the sum at the place SUM; "name role ~place" → the latest one there,
# as "wall_ms seconds trajectory_id".


@dataclass(slots=True)
class Histogram:
    """How often something took how long. counts: by bucket. latest: by bucket, (wall_ms, seconds, trajectory_id)."""

    counts: list[int] = field(default_factory=lambda: [0] * BUCKET_COUNT)
    sum_s: float = 0.0
    latest: dict[int, tuple[int, float, str]] = field(default_factory=dict)


ROLES = ("agent", "broker", "dedicated", "reward", "serving")
TRAJECTORY = re.compile(r"[A-Za-z0-9][\w.-]{0,89}", re.ASCII)
Histograms = Mapping[tuple[str, str], Histogram]  # by name and role


def field_of(name: str, role: str, place: int) -> str:
    """Return the field of the table that counts a bucket, or (place SUM) the sum."""
    return f"{name} {role} {place}"


def latest_field_of(name: str, role: str, place: int) -> str:
    """Return the field of the table that has a bucket's latest duration."""
    return f"{name} {role} ~{place}"


def read_timings(tables: Iterable[Mapping[str, str]]) -> Histograms:
    """Add up the tables of a run's shards; leave out rows that cannot be read."""
    found: dict[tuple[str, str], Histogram] = {}
    for table in tables:
        for row, value in table.items():
            try:
                _add(found, row, value)
            except ValueError:
                continue
    return found


def check_timing(row: str, value: str) -> None:
    """Require that a row of the table can be read. Raises ValueError."""
    _add({}, row, value)


def _add(found: dict[tuple[str, str], Histogram], row: str, value: str) -> None:
    name, role, where = row.split(" ")
    place = int(where.removeprefix("~"))
    if name not in TIMINGS or role not in ROLES or not 0 <= place <= SUM:
        raise ValueError(f"{row!r:.80} is no histogram of ours")
    if where.startswith("~"):
        new = _latest(value, place)
        histogram = found.setdefault((name, role), Histogram())
        histogram.latest[place] = max(new, histogram.latest.get(place, new))
        return
    count = int(value)
    if not 0 <= count <= WHOLE_MAX:
        raise ValueError(f"{value!r:.40} is no count")
    histogram = found.setdefault((name, role), Histogram())
    if place == SUM:
        histogram.sum_s += count / 1e6
    else:
        histogram.counts[place] += count


def _latest(value: str, place: int) -> tuple[int, float, str]:
    wall, seconds, trajectory_id = value.split(" ")
    found = int(wall), float(seconds), trajectory_id
    is_time = 0 <= found[0] <= WHOLE_MAX and 0 <= found[1] <= SECONDS_MAX and bisect_left(BOUNDS_S, found[1]) == place
    if not is_time or not TRAJECTORY.fullmatch(trajectory_id):
        raise ValueError(f"{value!r:.80} is no duration of this bucket")
    return found
