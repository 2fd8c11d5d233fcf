"""Reading what happened over the last days, of which a controller keeps a sample a minute: how all went, and leases."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import TypeAdapter

from ...fabric.contract.fields import WHOLE_MAX
from ...fabric.contract.lease_plan import Sample
from ...fabric.inspect.history import HistoryPoint, LendingVerdict, between, lending_verdicts, steps
from ...fabric.inspect.lanes import WorkerLane, lane_names, lanes
from ..access.problems import Refused
from ..schemas.base import Model
from .context import Context

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
NAME_COUNT_MAX = 200

Since = Annotated[int | None, Query(ge=0, le=WHOLE_MAX, description="default: a day before the end")]
SinceHour = Annotated[int | None, Query(ge=0, le=WHOLE_MAX, description="default: an hour before the end")]
Until = Annotated[int | None, Query(ge=0, le=WHOLE_MAX, description="default: now")]
Names = Annotated[list[str], Query(max_length=NAME_COUNT_MAX, description="of workers, in order; none: all, by name")]


class History(Model):
    """What happened, coarse enough to draw."""

    points: list[HistoryPoint]
    """The oldest first: one a minute, as a controller takes samples; where they are too many, some together."""
    since_ms: int | None
    """When the oldest of them began, by the broker's wall clock; null: nothing is kept of that time."""
    lending: list[LendingVerdict]
    """Whether lending hurt anybody's users in that time, by serving worker, the worst first."""


class LeaseHistory(Model):
    """Which run held each worker's lease, when, and what its guard said."""

    lanes: list[WorkerLane]
    since_ms: int | None
    """When what is kept of that time begins, by the broker's wall clock; null: nothing is."""
    until_ms: int | None
    """When somebody looked last; null: nobody has."""
    cursor: str | None
    """What to pass for the next page; null: this is the last. There are pages where no names are given."""


def router(context: Context) -> APIRouter:
    """Make the routes /v1/history and /v1/leases/history."""
    routes = APIRouter(prefix="/v1", tags=["read"])
    point = TypeAdapter(HistoryPoint)

    async def samples(
        since_ms: int | None, until_ms: int | None, span_ms: int, before_ms: int = 0
    ) -> tuple[list[Sample], int]:
        """Read the samples of a time, and of `before_ms` before it; also returns its beginning."""
        end_ms = until_ms if until_ms is not None else await context.ports.board.wall_ms()
        start_ms = since_ms if since_ms is not None else end_ms - span_ms
        if start_ms > end_ms:
            raise Refused(422, "InputError", f"since_ms is {start_ms}, after until_ms, {end_ms}: exchange them")
        return await context.ports.board.samples(start_ms - before_ms, end_ms), start_ms

    @routes.get("/history", response_model=History)
    async def history(
        since_ms: Since = None,
        until_ms: Until = None,
        count: Annotated[int, Query(ge=1, le=1000, description="of points, at most")] = 300,
    ) -> Response:
        """Tell what happened over hours or days: rates, levels, and what serving users saw."""
        read, _ = await samples(since_ms, until_ms, DAY_MS)
        found, texts = [], []
        for before, after in steps(read, count):
            found.append(between(before, after))
            texts.append(point.dump_json(found[-1]))
            await asyncio.sleep(0)  # a point of 128 serving workers takes a millisecond: others are answered meanwhile
        since = read[0].time_ms if found else None
        lending = await asyncio.to_thread(lending_verdicts, found)
        rest = History(points=[], since_ms=since, lending=lending).model_dump_json().encode()
        return Response(rest.replace(b"[]", b"[" + b",".join(texts) + b"]", 1), media_type="application/json")

    @routes.get("/leases/history")
    async def lease_history(
        since_ms: SinceHour = None,
        until_ms: Until = None,
        worker: Names = [],  # noqa: B006  FastAPI copies it
        count: Annotated[int, Query(ge=1, le=NAME_COUNT_MAX, description="of workers, at most")] = 50,
        cursor: Annotated[str, Query(max_length=1000, description="of the page before; empty: the first")] = "",
    ) -> LeaseHistory:
        """Tell which run held each worker's lease, when, with how many slots, and what its guard said."""
        read, start_ms = await samples(since_ms, until_ms, HOUR_MS, before_ms=HOUR_MS)
        if not read or read[-1].time_ms < start_ms:  # nobody looked in that time
            read = []
        known = [] if worker else [name for name in lane_names(read, start_ms) if name > cursor]
        return LeaseHistory(
            lanes=await asyncio.to_thread(lanes, read, worker or known[:count], start_ms),
            since_ms=max(read[0].time_ms, start_ms) if read else None,
            until_ms=read[-1].time_ms if read else None,
            cursor=known[count - 1] if len(known) > count else None,
        )

    return routes
