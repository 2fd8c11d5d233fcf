"""`rollfab status`: shows runs, workers and leases, and why each run does or does not move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

import typer
from rich.box import HEAVY_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.records import RunConfig
from ...fabric.contract.text import cleaned, counted, did_you_mean
from ...fabric.host.command import with_commands
from ...fabric.inspect.diagnosing import Cause, read_fabric
from ...fabric.inspect.diagnosis import is_well
from ...fabric.opened import RedisFabric
from ...fabric.ports.queue import BadRow, RunStatus
from ...fabric.rules.queue.curve import FINITE_MAX, RewardBucket
from ...fabric.rules.queue.push import no_such_run
from .options import AsJson, Url, need_url
from .printing import Console, show_json, spark

T = TypeVar("T")
CURVE_WIDTH = 40
AGREEMENT_ROW_COUNT = 8  # workers shown per run, the worst first; --json has all that are kept


def with_ports(url: str, work: Callable[[RedisFabric], Awaitable[T]]) -> T:
    """Open the broker, do one thing, close it."""

    async def main() -> T:
        async with await RedisFabric.open(url, client_name="cli", patience_s=2.0) as ports:
            return await work(ports)

    return asyncio.run(main())


async def find_run(ports: RedisFabric, run: str | None) -> RunConfig:
    """Return the run of that name; None: the only one there is.

    Raises:
        RunUnknown: there is none of that name. ConfigError: none was named, and there is not just one.
    """
    runs = await ports.board.runs()
    if run is not None and run not in runs:
        raise no_such_run(run, known=runs)
    if run is None and len(runs) != 1:
        raise ConfigError(f"say which run: --run RUN; {did_you_mean('', runs)}", option="--run")
    return runs[run] if run is not None else next(iter(runs.values()))


async def snapshot(ports: RedisFabric) -> dict[str, Any]:
    """Read everything the status shows, as plain values."""
    found = await read_fabric(ports.board, has_rewards=True)
    held = (lease for leases in found.survey.leases.values() for lease in leases.values())
    return {
        "runs": [_run_row(run, found.causes[name]) for name, run in found.survey.runs.items()],
        "workers": [{**asdict(info), "heartbeat_age_ms": max(0, age)} for info, age in found.survey.workers.values()],
        "leases": {lease.worker_id: asdict(lease) for lease in held},
        "lends": {name: asdict(said) for name, said in found.lends.items()},
        "bad_rows": [bad_row(row) for row in found.survey.bad_rows],
    }


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


def draw(seen: dict[str, Any], *, has_all: bool = False, within: Console | None = None) -> Group:
    """Draw the status as tables.

    has_all: every cause of every run, and not the first alone. within: the console that it may fill.
    """
    seen = with_commands(cleaned(seen))
    none = [Text(f"there are no {what}") for what in ("runs", "workers") if not seen[what]]
    workers = sorted(seen["workers"], key=lambda row: (row["role"], row["worker_id"]))
    causes = [lines for run in seen["runs"] if (lines := cause_lines(run, has_all=has_all))]
    parts = [
        Part("line", none, lambda lines, _: lines),
        Part("run", seen["runs"], _runs_table),
        Part("bad row", seen["bad_rows"], lambda rows, _: [line for row in rows for line in bad_row_lines(row)]),
        Part("reason", causes, lambda found, _: [line for lines in found for line in lines]),
        Part("worker", workers, lambda rows, is_dense: _workers_table(rows, seen["leases"], is_dense)),
        Part("table of rewards", _reward_lines(seen["runs"]), lambda tables, _: tables),
        Part("table of log-probabilities", _agreement_tables(seen["runs"]), lambda tables, _: tables),
    ]
    return fit(parts, within)


def _table(title: str, is_dense: bool) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=None if is_dense else HEAVY_HEAD)


def _runs_table(rows: Sequence[dict[str, Any]], is_dense: bool) -> list[Table]:
    runs = _table("runs", is_dense)
    for heading in ("run", "model", "environment", "head", "queued", "running", "turns", "waiting", "consumed", "dead"):
        runs.add_column(heading, justify="left" if heading in ("run", "model", "environment") else "right")
    for run in rows:
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
    return [runs]


def _workers_table(rows: Sequence[dict[str, Any]], leases: dict[str, Any], is_dense: bool) -> list[Table]:
    workers = _table("workers", is_dense)
    for heading in ("worker", "role", "state", "in use", "lease", "run", "version", "engine", "seen"):
        workers.add_column(heading, overflow="fold")
    for each in rows:
        lease = leases.get(each["worker_id"])
        workers.add_row(
            each["worker_id"],
            each["role"],
            _state(each),
            f"{each['running_count']}/{each['slot_count']}" if each["slot_count"] else "",
            counted(lease["slot_count"], "slot") if lease else "",
            each["run_id"] or "",
            str(each["active_version"]) if each["active_version"] >= 0 else "",
            _engine(each),
            f"{each['heartbeat_age_ms'] / 1000:.1f} s",
        )
    return [workers]


def bad_row_lines(row: dict[str, Any]) -> list[Text]:
    """Show a row that cannot be read, and how it is removed."""
    what = f"row {row['row']!r} of table {row['table']}" if row["row"] else f"table {row['table']}"
    return [
        Text(f"{what} cannot be read and is passed over: {row['problem']}", style="red"),
        Text(with_commands(f"  → `{row['step']}`")),
    ]


def cause_lines(run: dict[str, Any], *, has_all: bool) -> list[Text]:
    """Say why a run does or does not move, with the next steps."""
    lines = []
    for cause in run["causes"] if has_all else run["causes"][:1]:
        style = {"moves": "green", "waits": "default", "passing": "yellow"}.get(cause["kind"], "red")
        lines.append(Text.assemble((f"{run['run_id']}: ", "bold"), (cause["text"], style)))
        if cause["step"]:
            lines.append(Text(with_commands(f"  → {cause['step']}")))
    return lines


def _state(worker: dict[str, Any]) -> Text:
    if worker["error"]:
        return Text(f"{worker['state']}: {worker['error']}", style="red")
    return Text(f"{worker['state']}, waits for {worker['waits_for']}" if worker["waits_for"] else worker["state"])


def _reward_lines(runs: list[dict[str, Any]]) -> list[Table]:
    """Draw how each run's mean reward went, by policy version, where it has rollouts."""
    table = Table(title="rewards", title_justify="left", header_style="bold")
    for heading in ("run", "mean", "±", "lowest", "highest", "rollouts", "versions", "curve"):
        table.add_column(heading, justify="left" if heading in ("run", "curve") else "right")
    for run in runs:
        points = [point for point in run["rewards"] if point["reward_mean"] is not None]
        if not points:
            continue
        last = points[-1]
        figures = [last[f"reward_{name}"] for name in ("mean", "deviation", "min", "max")]
        shown = ["" if value is None else f"{value:.3g}" for value in figures]
        versions = f"{points[0]['version']}–{last['version'] + last['version_count'] - 1}"
        count = sum(point["rollout_count"] for point in points)
        means = [point["reward_mean"] for point in points]
        curve = spark(means[:: -(-len(means) // CURVE_WIDTH)], CURVE_WIDTH)
        table.add_row(run["run_id"], *shown, f"{count:,}", versions, curve)
    return [table] if table.row_count else []


def _engine(worker: dict[str, Any]) -> Text:
    """Name the engine, its share of cached prompts, and how it sleeps."""
    lines = [worker["engine"] or ""]
    if worker["prefix_hit_fraction"] is not None:
        lines.append(f"{worker['prefix_hit_fraction']:.0%} of prompts cached")
    if worker["wake_ms"] is not None:
        lines.append(f"woke in {worker['wake_ms'] / 1000:.1f} s")
    if worker["weights_note"] is not None:
        lines.append(worker["weights_note"])
    if worker["sleep_note"] is not None:
        lines.append(f"cannot sleep: {worker['sleep_note']}")
    return Text("\n".join(lines))


def _agreement_tables(runs: list[dict[str, Any]]) -> list[Table | Text]:
    """Draw log-probabilities of workers against the trainer's, where it compares them, and who is over a limit."""
    table = Table(title="log-probabilities, |trainer − worker|", title_justify="left", header_style="bold")
    for heading in ("run", "worker", "version", "tokens", "mean", "max", "ratio min", "mean", "max"):
        table.add_column(heading, justify="left" if heading in ("run", "worker") else "right", overflow="fold")
    alarms = []
    for run in runs:
        found = run["agreement"]
        if found is None:
            continue
        blamed = {alarm["worker_id"] for alarm in found["alarms"]}
        rows = [{**found["fresh"], "worker_id": "all", "policy_version": found["policy_version"]}, *found["workers"]]
        for row in rows[: 1 + AGREEMENT_ROW_COUNT]:
            table.add_row(run["run_id"], *_figures(row), style="red" if row["worker_id"] in blamed else None)
        alarms += [Text(alarm["text"], style="red") for alarm in found["alarms"][:AGREEMENT_ROW_COUNT]]
    return [table, *alarms] if table.row_count else []


def _figures(row: dict[str, Any]) -> list[str]:
    ratio = [f"{row[f'importance_sampling_ratio_{name}']:.3g}" for name in ("min", "mean", "max")]
    figures = [f"{row['logprob_difference_mean']:.2g}", f"{row['logprob_difference_max']:.2g}", *ratio]
    has_any = row["token_count"] > 0
    return [row["worker_id"], str(row["policy_version"]), str(row["token_count"]), *(figures if has_any else [""] * 5)]


def register(app: typer.Typer) -> None:
    """Add the command of this file."""

    @app.command()
    def status(
        url: Url = None,
        watch: Annotated[bool, typer.Option("--watch", help="Keep looking, once a second.")] = False,
        run: Annotated[
            str | None, typer.Option(help="One run, and all that keeps it from moving; exit code 1 if anything does.")
        ] = None,
        json: AsJson = False,
    ) -> None:
        """Show runs, workers and leases, and why each run does or does not move."""

        def chosen(seen: dict[str, Any]) -> dict[str, Any]:
            return seen if run is None else only_run(seen, run)

        if json or not watch:
            seen = chosen(with_ports(need_url(url), snapshot))
            show_json(seen) if json else Console().print(draw(seen, has_all=run is not None))
            if run is not None and not seen["runs"][0]["is_well"]:
                raise typer.Exit(1)
            return

        async def follow(ports: RedisFabric) -> None:
            console = Console()
            with Live(refresh_per_second=4, console=console) as live:
                while True:
                    within = console if console.is_terminal else None
                    live.update(draw(chosen(await snapshot(ports)), has_all=run is not None, within=within))
                    await asyncio.sleep(1.0)

        with_ports(need_url(url), follow)


# ---------------------------------------------------------------- fitting
#
# Several lists in the lines of one terminal: each gets its share, and says how much of it is left out.


@dataclass
class Part:
    """Items of one kind. draw: shows the first of them, densely where lines are short. what: one of them, in a word."""

    what: str
    items: Sequence[Any]
    draw: Callable[[Sequence[Any], bool], Sequence[RenderableType]]
    shown: int = field(init=False)

    def __post_init__(self) -> None:
        self.shown = len(self.items)

    def drawn(self, *, is_dense: bool) -> list[RenderableType]:
        """Draw the items shown, and say how many are not."""
        rows = list(self.draw(self.items[: self.shown], is_dense)) if self.shown else []
        left = len(self.items) - self.shown
        return [*rows, *([Text(f"… and {counted(left, f'more {self.what}')}", style="dim")] if left else [])]


def fit(parts: Sequence[Part], console: Console | None) -> Group:
    """Draw all parts whole, or what the lines of a console hold: the longest part gives way until all fit."""
    whole = [each for part in parts for each in part.drawn(is_dense=False)]
    if console is None or _height(whole, console) <= console.height:
        return Group(*whole)
    for part in parts:
        part.shown = min(part.shown, console.height)
    heights = [_height(part.drawn(is_dense=True), console) for part in parts]
    while sum(heights) > console.height and (longer := [at for at, part in enumerate(parts) if part.shown]):
        longest = max(longer, key=lambda at: heights[at])
        parts[longest].shown -= 1
        heights[longest] = _height(parts[longest].drawn(is_dense=True), console)
    return Group(*(each for part in parts for each in part.drawn(is_dense=True)))


def _height(drawn: Sequence[RenderableType], console: Console) -> int:
    return sum(len(console.render_lines(each, pad=False)) for each in drawn)
