"""`rollfab trace`: which trajectories hold up a step and where they are, and one in full, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...fabric.contract.errors import InputError
from ...fabric.contract.records import RunConfig
from ...fabric.contract.text import cleaned, counted
from ...fabric.inspect.trace import Piece, TrajectoryRow, TrajectoryView, kept_group, progress_row, row_of, view_of
from ...fabric.model.shown_tokens import load_shown
from ...fabric.ports.reading import Counts, GroupState, SeenGroup, SeenTrajectory
from ...fabric.rules.queue.push import no_such_run
from ...trainer.files import check_new, write_groups
from ..cli.options import AsJson, Url, find_run, need_url, with_ports
from ..cli.printing import Console, show_json, tell_written
from ..cli.speech import say_nothing

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric

LISTED_COUNT = 20
PAGE_COUNT = 16  # groups read at once
NEXT = {
    "open": "no trajectory is under way: `rollfab status` says why the runs move or not",
    "waiting": "no complete group waits for a trainer",
    "finished": "no consumed group is kept: none was consumed, or kept_bytes_max of the run is 0",
}
STYLES = {"turn": "bold", "observation": "dim", "prompt": "dim", "context": "dim"}
WIDTH, BAR_WIDTH, BRIEF = 80, 40, 24
TEXT_LENGTH_MAX = 2_000  # characters of a piece that are printed: --json has all


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What is listed of one run."""

    run_id: str
    rows: list[TrajectoryRow]
    counts: Counts


def register(app: typer.Typer) -> None:
    """Add the command of this file."""

    @app.command()
    def trace(
        trajectory: Annotated[
            str | None, typer.Argument(help="A trajectory; none: list them, the oldest first.", show_default=False)
        ] = None,
        run: Annotated[str | None, typer.Option(help="Of this run alone.", show_default=False)] = None,
        state: Annotated[
            Literal["open", "waiting", "finished"],
            typer.Option(help="List those under way; those that wait for a trainer; or those kept of the past."),
        ] = "open",
        count: Annotated[
            int | None,
            typer.Option(
                help="Trajectories listed of a run, at most (20); of --output: the newest groups (all).",
                min=1,
                max=1000,
                show_default=False,
            ),
        ] = None,
        output: Annotated[
            Path | None,
            typer.Option(
                help="Of --state finished: a new file, .jsonl or .parquet, of the groups that are kept of one run, in "
                "place of printing; as `rollfab consume --output` writes them.",
                dir_okay=False,
                show_default=False,
            ),
        ] = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Show which trajectories hold up a step and where they are; or one in full, turn by turn."""
        address = need_url(url)
        if output is not None:
            _write(address, output, None if trajectory is not None else state, run, count, json)
            return
        if trajectory is not None:
            view = with_ports(address, lambda ports: find(ports, trajectory, run))
            show_json(asdict(view)) if json else Console().print(draw(view), highlight=False)
            return
        found = with_ports(address, lambda ports: listed(ports, run, state, count or LISTED_COUNT))
        if json:
            show_json([asdict(each) for each in found])
        elif any(each.rows for each in found):
            Console().print(Group(*(part for each in found for part in _list(each, state))), highlight=False)
        else:
            say_nothing(NEXT[state])


def _write(url: str, output: Path, state: GroupState | None, run: str | None, count: int | None, json: bool) -> None:
    """Write the kept groups of one run to a file. state: None, where one trajectory was asked for."""
    if state != "finished":
        raise InputError(
            "--output writes whole groups that were consumed and are kept: add --state finished and name no trajectory "
            "(`rollfab consume --peek --output FILE` writes those that wait, `rollfab trace ID --json` prints one)"
        )
    check_new(output)
    groups = with_ports(url, lambda ports: kept(ports, run, count))
    if groups:
        tell_written(output, "group", write_groups(output, map(kept_group, groups)), json, "; they are still kept")
    else:
        say_nothing(f"{output} is not written: {NEXT['finished']}")


async def kept(ports: RedisFabric, run_id: str | None, count: int | None) -> list[SeenGroup]:
    """Return the kept groups of one run, the newest first; None: all, which is no more than its kept_bytes_max.

    Raises:
        RunUnknown, ConfigError: as find_run.
    """
    reader = ports.reading(await find_run(ports, run_id))
    found, cursor = await reader.groups("finished", PAGE_COUNT, "")
    while cursor and (count is None or len(found) < count):
        page, cursor = await reader.groups("finished", PAGE_COUNT, cursor)
        found += page
    return found[:count]


async def _runs(ports: RedisFabric, run_id: str | None) -> list[RunConfig]:
    """Return the run of a name, or all."""
    runs = await ports.board.runs()
    if run_id is not None and run_id not in runs:
        raise no_such_run(run_id, known=runs)
    return [config for name, config in sorted(runs.items()) if run_id in (None, name)]


async def listed(ports: RedisFabric, run_id: str | None, state: GroupState, count: int) -> list[Listed]:
    """List trajectories of one run or of all."""
    found = []
    for config in await _runs(ports, run_id):
        reader = ports.reading(config)
        if state == "open":
            rows = [progress_row(each) for each in await reader.begun(0, count)]
        else:
            groups, _ = await reader.groups(state, count, "")
            rows = [row_of(each, f"{each.group_id}.{index}") for each in groups for index in range(each.size)][:count]
        found.append(Listed(run_id=config.run_id, rows=rows, counts=await reader.counts()))
    return found


async def find(ports: RedisFabric, trajectory_id: str, run_id: str | None) -> TrajectoryView:
    """Find a trajectory, in one run or in all.

    Raises:
        InputError: there is none of that name.
    """
    runs = await _runs(ports, run_id)
    for config in runs:
        seen: SeenTrajectory | None = await ports.reading(config).find(trajectory_id)
        if seen is not None:
            return view_of(config.run_id, seen, *load_shown(config.model))
    held = f"{counted(len(runs), 'run')} of this broker {'has' if len(runs) == 1 else 'have'}"
    where = f"run {run_id!r} has" if run_id is not None else held
    raise InputError(
        f"{where} no trajectory {trajectory_id!r:.100} now: it was never submitted, was cancelled, or is not kept any "
        "more; `rollfab trace` and `rollfab trace --state finished` list those that are there"
    )


# ---- drawing


def _list(found: Listed, state: GroupState) -> list[RenderableType]:
    counts = found.counts
    number = {"open": counts.begun, "waiting": counts.waiting, "finished": counts.finished}[state]
    what = {"open": "trajectory", "waiting": "group", "finished": "group"}[state]
    words = {"open": "under way, the oldest first", "waiting": "for the trainer", "finished": "kept, the newest first"}
    title = Text.assemble((found.run_id, "bold"), f"  {counted(number, what)} {words[state]}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trajectory", no_wrap=True, overflow="ellipsis", max_width=30)
    table.add_column("turns", justify="right")
    table.add_column("age" if state == "open" else "reward", justify="right", no_wrap=True)
    table.add_column("where" if state == "open" else "how it ended", overflow="fold")
    for row in found.rows:
        plain = cleaned(asdict(row))
        told = _age(row.age_ms) if state == "open" else "–" if row.reward is None else f"{row.reward:.3g}"
        where = plain["place"] if state == "open" or row.finish_reason is None else _ending(plain)
        if row.attempt:
            where += f", attempt {row.attempt + 1}"
        table.add_row(plain["trajectory_id"], str(row.turn_count), told, where)
    return [title, Padding(table, (0, 0, 1, 2))]


def _ending(row: dict[str, Any]) -> str:
    workers = ", ".join(row["worker_ids"])
    tokens = counted(row["completion_token_count"] or 0, "token")
    return f"{row['finish_reason']}, {tokens}" + (f" by {workers}" if workers else "")


def draw(view: TrajectoryView) -> Group:
    """Draw a trajectory in full."""
    plain = cleaned(asdict(view))
    facts = [
        f"run {plain['run_id']}, group {plain['group_id']} of {len(view.sibling_ids)}, task {plain['task_id']}",
        f"{view.state}: {plain['place']}" + (f", for {_age(view.age_ms)}" if view.age_ms is not None else ""),
    ]
    if view.reward is not None:
        parts = " + ".join(f"{each:.3g}" for each in view.rewards) if len(view.rewards) > 1 else ""
        facts.append(f"reward {view.reward:.4g}" + (f" = {parts}" if parts and len(parts) < 50 else ""))
    facts.append(f"{counted(view.turn_count, 'turn')}, {counted(view.attempt, 'failed attempt')}")
    if view.policy_version is not None:
        facts.append(f"policy version {view.policy_version}, by {', '.join(plain['worker_ids'])}")
    if view.reason:
        facts.append(plain["reason"])
    lines: list[RenderableType] = [Text(plain["trajectory_id"], "bold"), *(Text(f"  {each}") for each in facts)]
    if view.timeline:
        lines += [Text(""), _times(view)]
    if view.text_note:
        lines += [Text(""), Text(plain["text_note"], "yellow")]
    lines += _pieces(view.pieces)
    if view.traceback:
        lines += [Text(""), Text(plain["traceback"], "red")]
    return Group(*lines)


def _times(view: TrajectoryView) -> Table:
    """Draw when its turns were, as bars over its whole time."""
    end_ms = max(1, max(bar.end_ms for bar in view.timeline))
    table = Table(box=None, pad_edge=False, show_header=False)
    for bar in view.timeline:
        low, high = (round(BAR_WIDTH * ms / end_ms) for ms in (bar.start_ms, bar.end_ms))
        drawn = " " * low + "█" * max(1, high - low)
        what = bar.kind if bar.turn is None else f"{bar.kind} {bar.turn}"
        style = "cyan" if bar.kind == "turn" else "dim"
        table.add_row(f"  {what}", Text(drawn[:BAR_WIDTH], style), f"{bar.end_ms - bar.start_ms:,} ms")
    return table


def _pieces(pieces: Sequence[Piece]) -> list[RenderableType]:
    """Draw the tokens, piece by piece; who made them where that is somebody else than before."""
    lines: list[RenderableType] = [Text("")]
    before: list[str] = []
    for index, piece in enumerate(pieces):
        facts = [counted(len(piece.ids), "token")]
        if piece.parent != index - 1 and piece.parent >= 0:
            facts.append(f"continues piece {piece.parent}")
        if known := [each for each in piece.logprobs or () if each is not None]:
            facts.append(f"{sum(known) / len(known):.3f} nats a token")
        makers = list(dict.fromkeys(f"{each.worker_id} at version {each.policy_version}" for each in piece.spans))
        facts += [f"by {each}" for each in makers if each not in before]
        before = makers[-1:] or before
        facts += ["still being made"] if piece.is_running else []
        lines += _piece(index, piece, cleaned(", ".join(facts)))
    return lines


def _piece(index: int, piece: Piece, facts: str) -> list[RenderableType]:
    name = piece.kind if piece.turn is None else f"{piece.kind} {piece.turn}"
    text = "".join(piece.tokens) if piece.tokens else " ".join(map(str, piece.ids))
    if len(text) > TEXT_LENGTH_MAX:
        text = f"{text[:TEXT_LENGTH_MAX]} … {len(text) - TEXT_LENGTH_MAX:,} more"
    head = Text(f"{index:>4}  {name:<15} {facts}", "cyan" if piece.kind == "turn" else "dim")
    shown = Text(text, STYLES[piece.kind])
    if len(text) <= BRIEF and "\n" not in text and len(head) + len(text) + 3 < WIDTH:
        return [Text.assemble(head, "   ", shown)]
    return [head, Padding(shown, (0, 0, 0, 6))]


def _age(age_ms: int | None) -> str:
    if age_ms is None:
        return "–"
    seconds = age_ms / 1000
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3600:.1f} h"
