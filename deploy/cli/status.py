"""`rollfab status`: shows runs, workers and leases, and why each run does or does not move."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from ...fabric.contract.records import WorkerInfo
from ...fabric.contract.sharing import LendSetting
from ...fabric.inspect.diagnosing import read_fabric
from ...fabric.inspect.diagnosis import Cause, is_well
from ...fabric.ports.queue import BadRow, RunStatus
from ...fabric.rules.lending.hours import minute_of_week
from ...fabric.rules.lending.terms import terms
from ...fabric.rules.queue.curve import FINITE_MAX, RewardBucket
from ...fabric.rules.queue.push import no_such_run
from .options import AsJson, Url, need_url, with_ports
from .printing import Console, show_json
from .status_view import draw
from .watch import LOOK_S, watch

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric


async def snapshot(ports: RedisFabric) -> dict[str, Any]:
    """Read everything the status shows, as plain values."""
    found = await read_fabric(ports.board, has_rewards=True)
    held = (lease for leases in found.survey.leases.values() for lease in leases.values())
    minute = minute_of_week(found.survey.wall_ms)
    return {
        "runs": [_run_row(run, found.causes[name]) for name, run in found.survey.runs.items()],
        "workers": [
            {**asdict(info), "heartbeat_age_ms": max(0, age), "lend": _lend_text(info, found.lends, minute)}
            for info, age in found.survey.workers.values()
        ],
        "leases": {lease.worker_id: asdict(lease) for lease in held},
        "lends": {name: asdict(said) for name, said in found.lends.items()},
        "bad_rows": [bad_row(row) for row in found.survey.bad_rows],
    }


def _lend_text(info: WorkerInfo, lends: Mapping[str, LendSetting], minute: int) -> str | None:
    """Tell how a serving worker may be lent now; None: it is none."""
    return terms(lends, info.worker_id, info.pool, minute).text if info.role == "serving" else None


def bad_row(row: BadRow) -> dict[str, Any]:
    """Turn a bad row into plain values."""
    return {**asdict(row), "step": row.step}


def only_run(seen: dict[str, Any], run_id: str) -> dict[str, Any]:
    """Return the status of one run, with the workers as they are.

    Raises:
        RunUnknown: there is none of that name.
    """
    runs = [run for run in seen["runs"] if run["run_id"] == run_id]
    if not runs:
        raise no_such_run(run_id, known=[run["run_id"] for run in seen["runs"]])
    return {**seen, "runs": runs}


def _run_row(run: RunStatus, causes: Sequence[Cause]) -> dict[str, Any]:
    return {
        "run_id": run.config.run_id,
        "model": run.config.model,
        "environment": run.config.environment,
        "head_version": run.head_version,
        "depth": run.depth,
        "memory_bytes": run.memory_bytes,
        "trajectories": dict(run.trajectories),
        "turns": dict(run.turns),
        "groups_waiting": run.groups_waiting,
        "dead_count": run.dead_count,
        "counters": dict(run.counters),
        "rewards": [_reward_row(bucket) for bucket in run.rewards],
        "agreement": None if run.agreement is None else asdict(run.agreement),
        "is_well": is_well(causes),
        "causes": [asdict(cause) for cause in causes],
    }


def _reward_row(bucket: RewardBucket) -> dict[str, Any]:
    row = {name: getattr(bucket, f"reward_{name}") for name in ("mean", "deviation", "min", "max")}
    finite = {f"reward_{name}": value if abs(value) <= FINITE_MAX else None for name, value in row.items()}
    place = {"version": bucket.version, "version_count": bucket.width, "rollout_count": bucket.count}
    return {**place, **finite, "completion_tokens_mean": bucket.token_mean}


def register(app: typer.Typer) -> None:
    """Add the command of this file."""

    @app.command()
    def status(
        run: Annotated[
            str | None,
            typer.Option(
                "--run",
                metavar="RUN",
                help="One run, and all that keeps it from moving; exit code 1 if anything does.",
            ),
        ] = None,
        is_watched: Annotated[
            bool, typer.Option("--watch", help="Keep looking, once a second: a screen to scroll in; q ends.")
        ] = False,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Show runs, workers and leases, and why each run does or does not move."""

        async def seen(ports: RedisFabric) -> dict[str, Any]:
            found = await snapshot(ports)
            return found if run is None else only_run(found, run)

        async def follow(ports: RedisFabric) -> None:
            async def look(console: Console) -> RenderableType:
                return draw(await seen(ports), width=console.width, has_all=run is not None)

            while json:
                show_json(await seen(ports), flush=True)
                await asyncio.sleep(LOOK_S)
            await watch(look, Console())

        if is_watched:
            with_ports(need_url(url), follow)
            return
        found, console = with_ports(need_url(url), seen), Console()
        if json:
            show_json(found)
        else:
            console.print(draw(found, width=console.width, has_all=run is not None))
        if run is not None and not found["runs"][0]["is_well"]:
            raise typer.Exit(1)
