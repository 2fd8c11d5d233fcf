"""One lease by itself, as a controller of the term in its epoch would set or end it."""

from __future__ import annotations

from rollfab.fabric.contract.lease_plan import LeaseChange, term_of
from rollfab.fabric.contract.records import Lease
from rollfab.fabric.ports.queue import LeaseBoard


async def set_lease(board: LeaseBoard, lease: Lease, duration_ms: int | None) -> bool:
    assigned = (await board.survey()).assignments
    change = LeaseChange(lease=lease, duration_ms=duration_ms)
    return (await board.change_leases(term_of(lease), [change], assigned))[0]


async def end_lease(board: LeaseBoard, lease: Lease) -> None:
    await board.change_leases(term_of(lease), [LeaseChange(lease=lease, is_end=True)], {})
