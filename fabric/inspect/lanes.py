"""Which run held each worker's lease, when, and what its guard said: samples in, stretches of time out. Pure.

- A row of a sample says what a worker held from a time on: it did until its next row, or the end of what is known.
- Between two samples that are further apart than GAP_MS nobody looked: that time has no stretch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..contract.lease_plan import LeaseSample, Sample

GAP_MS = 180_000  # three samples
STRETCH_COUNT_MAX = 300  # of a lane: more are no wider than a line


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStretch:
    """Time in which a worker held one lease, or none, and its guard said one thing."""

    start_ms: int
    """By the broker's wall clock, as `end_ms`."""
    end_ms: int
    run_id: str | None
    """Whose lease it was; null: it had none."""
    slot_count: int
    guard_state: str | None
    """open, narrow, shut or silent; null: it has no guard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLane:
    """One worker over a time. Where there is no stretch, there was no such worker, or nobody looked."""

    worker_id: str
    stretches: list[LeaseStretch]
    """In order. Where very many are short, those beside one another are one, which says what the largest lease was."""


def lane_names(samples: Sequence[Sample], since_ms: int = 0) -> list[str]:
    """Return the workers that the samples tell of, by name, but for those that left before `since_ms`."""
    last = {row.worker_id: row for sample in samples for row in sorted(sample.leases, key=lambda row: row.since_ms)}
    return sorted(name for name, row in last.items() if row.guard_state != "gone" or row.since_ms >= since_ms)


def lanes(samples: Sequence[Sample], names: Collection[str], since_ms: int) -> list[WorkerLane]:
    """Say what the named workers held from `since_ms` to the last sample.

    samples: the oldest first, from an hour before `since_ms` on, as what lasts is said once an hour. names: in the
    order that is wanted; one that no sample tells of has no stretch.
    """
    rows: dict[str, dict[int, LeaseSample]] = {name: {} for name in names}
    for sample in samples:
        for row in sample.leases:
            if row.worker_id in rows:
                rows[row.worker_id][row.since_ms] = row
    times = [sample.time_ms for sample in samples]
    gaps = [(before, after) for before, after in pairwise([since_ms, *times]) if after - before > GAP_MS]
    window = (since_ms, times[-1] if times else since_ms)
    width_ms = (window[1] - window[0]) / STRETCH_COUNT_MAX
    found = {name: _stretches(sorted(each.items()), gaps, window) for name, each in rows.items()}
    return [WorkerLane(worker_id=name, stretches=list(_joined(each, width_ms))) for name, each in found.items()]


def _stretches(
    rows: Sequence[tuple[int, LeaseSample]], gaps: Sequence[tuple[int, int]], window: tuple[int, int]
) -> Iterator[LeaseStretch]:
    ends = [*(since_ms for since_ms, _ in rows[1:]), window[1]]
    for (since_ms, row), end_ms in zip(rows, ends, strict=False):
        if row.guard_state == "gone":
            continue
        for low, high in _outside(gaps, max(since_ms, window[0]), min(end_ms, window[1])):
            yield LeaseStretch(
                start_ms=low,
                end_ms=high,
                run_id=row.run_id or None,
                slot_count=row.slot_count,
                guard_state=row.guard_state or None,
            )


def _outside(gaps: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Cut the gaps, which are in order, out of a stretch of time."""
    for start, end in gaps:
        if low < start < high:
            yield low, start
        if start < high and end > low:
            low = max(low, end)
    if low < high:
        yield low, high


def _joined(stretches: Iterator[LeaseStretch], width_ms: float) -> Iterator[LeaseStretch]:
    """Join stretches that are too short to be seen, and those that say the same."""
    held: LeaseStretch | None = None
    for each in stretches:
        if held is None or held.end_ms != each.start_ms:
            if held is not None:
                yield held
            held = each
            continue
        is_same = (held.run_id, held.slot_count, held.guard_state) == (each.run_id, each.slot_count, each.guard_state)
        if is_same or each.end_ms - held.start_ms <= width_ms:
            largest = max(held, each, key=lambda stretch: stretch.slot_count)
            held = replace(largest, start_ms=held.start_ms, end_ms=each.end_ms)
            continue
        yield held
        held = each
    if held is not None:
        yield held
