"""Reading trajectories: what is under way, what waits for a trainer, what is kept of the past, and one in full."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import TypeAdapter

from ...fabric.contract.errors import BrokerError
from ...fabric.inspect.trace import GroupRow, TrajectoryRow, TrajectoryView, group_row, progress_row, row_of, view_of
from ...fabric.ports.reading import Counts, TrajectoryReader, place_of
from ..access.problems import Refused
from ..schemas.answers import Problem
from ..schemas.base import Model
from .context import Context

GROUPS_AT_ONCE = 4
PROBLEMS: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "The api's broker user may not read trajectories"},
    404: {"model": Problem, "description": "No such run or trajectory"},
}
UNREADABLE = (
    "this api's broker user may not read trajectories, which hold tasks and texts: start it with the URL of user "
    "rollfab-api-trajectories (`rollfab acl` writes it)"
)

Lists = Literal["open", "waiting", "finished"]
TrajectoryCount = Annotated[int, Query(ge=1, le=200)]
GroupCount = Annotated[int, Query(ge=1, le=100)]
Cursor = Annotated[str, Query(max_length=60, description="of the page before; empty: the first")]


class TrajectoryCounts(Model):
    """How many there are in each list."""

    open: int
    """Trajectories that agents are at."""
    waiting_groups: int
    """Groups that are complete, and that the trainer has not acknowledged."""
    finished_groups: int
    """Groups that are kept of those it has: the newest, and ever fewer older ones."""


class Trajectories(Model):
    """A page of trajectories."""

    trajectories: list[TrajectoryRow]
    """open: those that agents are at, the oldest first: they hold up a step. waiting: group by group, in the order in
    which they were complete. finished: group by group, the newest first. Groups are whole, so there may be more than
    were asked for."""
    counts: TrajectoryCounts
    cursor: str | None
    """What to pass for the next page; null: this is the last."""


class Groups(Model):
    """A page of groups, in the order of Trajectories."""

    groups: list[GroupRow]
    counts: TrajectoryCounts
    cursor: str | None


def router(context: Context) -> APIRouter:
    """Make the routes under /v1/runs/{run_id} that read trajectories."""
    routes = APIRouter(prefix="/v1/runs/{run_id}", tags=["read"], responses=PROBLEMS)
    whole = TypeAdapter(TrajectoryView)

    async def reader(run_id: str) -> TrajectoryReader:
        status = await context.ports.board.run_status(run_id)
        return context.ports.reading(status.config)

    @routes.get("/trajectories")
    async def trajectories(
        run_id: str, state: Lists = "open", count: TrajectoryCount = 50, cursor: Cursor = ""
    ) -> Trajectories:
        """List trajectories: those that agents are at, those that wait for the trainer, or those that are kept."""
        with _allowed():
            found = await reader(run_id)
            counts = await found.counts()
            if state == "open":
                first = place_of(cursor)
                rows = [progress_row(each) for each in await found.begun(first, count)]
                at = str(first + count) if len(rows) == count and counts.begun > first + count else ""
            else:
                rows, at = await _of_groups(found, state, count, cursor)
            return Trajectories(trajectories=rows, counts=_counts(counts), cursor=at or None)

    @routes.get("/groups")
    async def groups(run_id: str, state: Lists = "open", count: GroupCount = 20, cursor: Cursor = "") -> Groups:
        """List groups, with their trajectories side by side."""
        with _allowed():
            found = await reader(run_id)
            rows, at = await found.groups(state, count, cursor)
            shown = [group_row(each) for each in rows]
            return Groups(groups=shown, counts=_counts(await found.counts()), cursor=at or None)

    @routes.get("/trajectories/{trajectory_id}", response_model=TrajectoryView)
    async def trajectory(run_id: str, trajectory_id: str) -> Response:
        """Show one trajectory in full: its turns as text and tokens, who made them, and when."""
        with _allowed():
            status = await context.ports.board.run_status(run_id)
            seen = await context.ports.reading(status.config).find(trajectory_id)
        if seen is None:
            raise Refused(
                404,
                "TrajectoryUnknown",
                f"run {run_id} has no trajectory {trajectory_id!r:.100} now: it was never submitted, was cancelled, or "
                "is not kept any more (kept_bytes_max of the run)",
            )
        tokenizer, note = await context.tokenizers.of(status.config.model)
        body = await asyncio.to_thread(lambda: whole.dump_json(view_of(run_id, seen, tokenizer, note)))  # long
        return Response(body, media_type="application/json")

    return routes


async def _of_groups(
    reader: TrajectoryReader, state: Lists, count: int, cursor: str
) -> tuple[list[TrajectoryRow], str]:
    """List the trajectories of whole groups, until they are as many as wanted."""
    rows: list[TrajectoryRow] = []
    while True:
        groups, cursor = await reader.groups(state, GROUPS_AT_ONCE, cursor)
        rows += [row_of(each, f"{each.group_id}.{index}") for each in groups for index in range(each.size)]
        if len(rows) >= count or not cursor:
            return rows, cursor


def _counts(counts: Counts) -> TrajectoryCounts:
    return TrajectoryCounts(open=counts.begun, waiting_groups=counts.waiting, finished_groups=counts.finished)


@contextmanager
def _allowed() -> Iterator[None]:
    """Say what to do where the broker's user may not read trajectories."""
    try:
        yield
    except BrokerError as error:
        if error.facts.get("reason") != "permission":
            raise
        raise Refused(403, "NotAllowed", UNREADABLE) from error
