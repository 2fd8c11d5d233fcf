"""What is left of a lease."""

from __future__ import annotations

import dataclasses

from ..records import Lease


def lease_left(lease: Lease, now_ms: int) -> Lease | None:
    """The lease with its remaining time at the broker's `now_ms`; None when it has ended."""
    if lease.lease_until_ms is None:
        return lease
    remaining_ms = lease.lease_until_ms - now_ms
    return dataclasses.replace(lease, remaining_ms=remaining_ms) if remaining_ms > 0 else None
