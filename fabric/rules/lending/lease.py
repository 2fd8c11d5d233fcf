"""Counts how much is left of a lease.

Every shard has a clock of its own, and they drift apart: what is left is counted once, where a lease is read, by the
clock of the shard that it was read from.
"""

from __future__ import annotations

from ...contract.records import Lease


def time_left(lease_until_ms: int | None, now_ms: int) -> int | None:
    """Return the milliseconds left at its shard's `now_ms`; 0: it has ended, None: it is standing."""
    return None if lease_until_ms is None else max(0, lease_until_ms - now_ms)


def has_ended(lease: Lease) -> bool:
    """Tell whether a lease was over when it was read."""
    return lease.remaining_ms == 0
