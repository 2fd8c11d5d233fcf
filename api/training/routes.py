"""The routes for trainers, under /v1/runs/{run_id}: what `rollfab.connect()` gives to Python, in any language."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from ...fabric.contract.errors import FabricError, QueueFull, RunUnknown
from ...fabric.contract.ids import check_name
from ...fabric.contract.text import one_line
from ...fabric.contract.wire import dump_json
from ..access.problems import problem, status_of
from ..schemas.answers import Problem
from ..schemas.training import (
    Cancelled,
    Dropped,
    EvaluationRequest,
    Published,
    PublishRequest,
    ReceiptsAnswer,
    ReceiptsRequest,
    Received,
    ReceiveRequest,
    RenewRequest,
    RunOpened,
    RunRequest,
    SubmitRequest,
    Submitted,
    Uploaded,
    Version,
)
from .ports import Run, Runs
from .uploads import WeightFiles
from .words import TRAINING

UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "No such run"}}
FULL: dict[int | str, dict[str, Any]] = {429: {"model": Problem, "description": "The run is full"}}
CONFLICT: dict[int | str, dict[str, Any]] = {409: {"model": Problem, "description": "Not newer than the head"}}
STREAMED = "Each message of type group is a ReceivedGroup; one of type error is a Problem, and the last"
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}, "description": STREAMED}}
LOOK_S = 5.0  # a stream says after so long why no group comes, and that it is still there
ANSWER_COUNT_MAX = 256
ACKNOWLEDGED_S = 0.2  # how often it looks whether groups were acknowledged, where its client has as many as it may
PIECE = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}


def router(runs: Runs, files: WeightFiles) -> APIRouter:
    routes = APIRouter(prefix="/v1/runs/{run_id}", tags=["train"], responses=UNKNOWN)
    _add_runs(routes, runs)
    _add_groups(routes, runs)
    _add_receipts(routes, runs)
    _add_weights(routes, runs, files)
    return routes


@asynccontextmanager
async def _using(runs: Runs, run_id: str) -> AsyncIterator[Run]:
    """Give a run; forget it where it turns out to be gone."""
    check_name("run", run_id)
    try:
        yield await runs.find(run_id)
    except RunUnknown:
        await runs.forget(run_id)
        raise


def _add_runs(routes: APIRouter, runs: Runs) -> None:
    @routes.put("")
    async def set_run(run_id: str, body: RunRequest) -> RunOpened:
        """Create a run, or change its settings; a repeated call changes nothing."""
        check_name("run", run_id)
        return await _opened(await runs.set(run_id, body.model, body.environment, body.settings))

    @routes.put("/evaluation", responses=CONFLICT)
    async def evaluate(run_id: str, body: EvaluationRequest) -> RunOpened:
        """Open a run beside this one, pinned to a version of its weights; a repeated call changes nothing."""
        check_name("run", run_id)
        run = await runs.evaluate(run_id, body.version, body.name, body.settings)
        return await _opened(run)


async def _opened(run: Run) -> RunOpened:
    config, head = run.config, await run.head_version()
    return RunOpened(run_id=config.run_id, model=config.model, environment=config.environment, head_version=head)


def _add_groups(routes: APIRouter, runs: Runs) -> None:
    @routes.post("/groups", responses=FULL)
    async def submit(run_id: str, body: SubmitRequest) -> Submitted:
        """Push a group of trajectories for each task. A refusal names the groups that were taken in before it."""
        wishes = body.model_dump(exclude={"tasks", "deadline_s", "wait_s"})
        async with _using(runs, run_id) as run:
            taken = await run.submit(body.tasks, **wishes, deadline=body.deadline_s, timeout=body.wait_s)
        return Submitted(group_ids=taken)

    @routes.delete("/groups/{group_id}")
    async def cancel(run_id: str, group_id: str) -> Cancelled:
        """Drop a group that is not needed any more; its slots are free within a second."""
        check_name("group", group_id)
        async with _using(runs, run_id) as run:
            return Cancelled(is_cancelled=await run.cancel(group_id))

    @routes.post("/groups/receive", response_model=Received, responses=FULL)
    async def receive(run_id: str, body: ReceiveRequest, request: Request) -> Response:
        """Wait for completed groups. Each is in the caller's hands until it is acknowledged, or its time ends."""
        async with _using(runs, run_id) as run:
            found, why = await _several(request, run, body)
        return _json({"groups": found, "why": "" if found else TRAINING.say(why, run_id)})

    @routes.post("/groups/stream", response_class=StreamingResponse, responses=STREAM)
    async def stream(run_id: str, body: ReceiveRequest) -> StreamingResponse:
        """Stream completed groups as server-sent events, as long as fewer than `count` are unacknowledged."""
        async with _using(runs, run_id) as run:
            await run.head_version()
        return StreamingResponse(
            _events(run, body), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )


def _add_receipts(routes: APIRouter, runs: Runs) -> None:
    async def answer(run_id: str, names: list[str], do: Callable[[Run], Awaitable[list[str]]]) -> ReceiptsAnswer:
        async with _using(runs, run_id) as run:
            done = await do(run)
        return ReceiptsAnswer(done=done, lost=[name for name in names if name not in done])

    @routes.post("/groups/acknowledge")
    async def acknowledge(run_id: str, body: ReceiptsRequest) -> ReceiptsAnswer:
        """Say that groups are used: they never come again. Acknowledge after the step that they were used in."""
        return await answer(run_id, body.receipts, lambda run: run.receipts.acknowledge(body.receipts))

    @routes.post("/groups/renew")
    async def renew(run_id: str, body: RenewRequest) -> ReceiptsAnswer:
        """Keep groups for longer."""

        async def do(run: Run) -> list[str]:
            return run.receipts.renew(body.receipts, body.hold_s)

        return await answer(run_id, body.receipts, do)

    @routes.post("/groups/give-back")
    async def give_back(run_id: str, body: ReceiptsRequest) -> ReceiptsAnswer:
        """Give groups back unused: they come again, to whoever asks next."""

        async def do(run: Run) -> list[str]:
            return run.receipts.give_back(body.receipts)

        return await answer(run_id, body.receipts, do)


def _add_weights(routes: APIRouter, runs: Runs, files: WeightFiles) -> None:
    published: OrderedDict[tuple[str, int], Published] = OrderedDict()  # from uploads, for who lost the answer

    @routes.put("/uploads/{version}/{file}", openapi_extra=PIECE)
    async def upload(
        run_id: str,
        version: Version,
        file: str,
        request: Request,
        offset: Annotated[int, Query(ge=0)] = 0,
    ) -> Uploaded:
        """Send a piece of a safetensors file, of at most 8 MiB, that begins at `offset`. Publish the version then."""
        data = await request.body()  # bounded, as every body here
        async with _using(runs, run_id):
            size = await asyncio.to_thread(files.add, run_id, version, file, offset, data)
        return Uploaded(size_bytes=size)

    @routes.get("/uploads/{version}/{file}")
    async def uploaded(run_id: str, version: Version, file: str) -> Uploaded:
        """Tell how many bytes of a file are here, to go on from there."""
        check_name("run", run_id)
        return Uploaded(size_bytes=await asyncio.to_thread(files.size, run_id, version, file))

    @routes.delete("/uploads/{version}")
    async def drop(run_id: str, version: Version) -> Dropped:
        """Remove what was uploaded for a version, to begin anew."""
        check_name("run", run_id)
        return Dropped(is_dropped=await asyncio.to_thread(files.drop, run_id, version))

    @routes.post("/versions", responses=CONFLICT)
    async def publish(run_id: str, body: PublishRequest) -> Published:
        """Publish weights: a keyframe first, deltas later, bit-exact. Workers follow while they generate.

        A call whose answer was lost may be repeated: it gets that answer.
        """
        name, version = (run_id, body.version), body.version
        wishes: dict[str, Any] = {
            "version": version,
            "keyframe": body.keyframe,
            "allow_nonfinite": body.allow_nonfinite,
        }
        async with _using(runs, run_id) as run:
            with files.told_below():
                if body.directory is not None:
                    path = await asyncio.to_thread(files.find, body.directory)
                    return Published(**asdict(await run.publish(path, **wishes)))
                if name in published and not files.has(run_id, version) and await run.head_version() >= version:
                    return published[name]
                with files.sealed(run_id, version) as path:
                    report = await run.publish(path, **wishes)
        published[name] = Published(**asdict(report))
        while len(published) > ANSWER_COUNT_MAX:
            published.popitem(last=False)
        return published[name]


async def _several(request: Request, run: Run, body: ReceiveRequest) -> tuple[list[dict[str, Any]], str]:
    """Wait for a group, and take others that are there; or say why none came.

    What the client does not hear of goes back at once: it has gone, or is answered with an error.
    """
    found: list[dict[str, Any]] = []
    why = ""
    try:
        while len(found) < body.count and not why:
            got = await run.receipts.receive(body.consumer, 0.0 if found else body.wait_s, body.hold_s)
            why, found = (got, found) if isinstance(got, str) else ("", [*found, _row(*got)])
    except QueueFull:
        if not found:
            raise
    except BaseException:
        run.receipts.give_back([row["receipt"] for row in found])
        raise
    if found and await request.is_disconnected():
        run.receipts.give_back([row["receipt"] for row in found])
        return [], "the client has gone"
    return found, why


async def _events(run: Run, body: ReceiveRequest) -> AsyncIterator[bytes]:
    """Write groups as they come, while fewer than `count` of this stream are in hand; give back the rest at its end."""
    sent: list[str] = []
    yield b": rollfab groups\n\n"
    try:
        for wait in itertools.count():
            sent = run.receipts.renew(sent, body.hold_s)  # a stream that lives keeps what it has sent
            if len(sent) < body.count:
                got = await run.receipts.receive(body.consumer, LOOK_S, body.hold_s)
                if isinstance(got, str):
                    yield _comment(TRAINING.say(got, run.config.run_id))
                else:
                    sent.append(got[0])
                    yield b"event: group\ndata: " + dump_json(_row(*got)) + b"\n\n"
            else:
                if wait % round(LOOK_S / ACKNOWLEDGED_S) == 0:
                    yield _comment(f"{len(sent)} groups are in your hands: acknowledge some to get more")
                await asyncio.sleep(ACKNOWLEDGED_S)
    except FabricError as error:  # its status is out already
        said = TRAINING.say(error.message, run.config.run_id)
        yield (
            b"event: error\ndata: " + problem(status_of(error), type(error).__name__, said, error.facts).body + b"\n\n"
        )
    finally:
        run.receipts.give_back(sent)


def _comment(text: str) -> bytes:
    return f": {one_line(text)}\n\n".encode()


def _row(receipt: str, group: dict[str, Any]) -> dict[str, Any]:
    return {"receipt": receipt, "group": group}


def _json(answer: dict[str, Any]) -> Response:
    return Response(dump_json(answer), media_type="application/json")
