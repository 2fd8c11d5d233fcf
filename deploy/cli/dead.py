"""`rollfab dead`: trajectories that were given up, by their causes; one of them whole; run again, or forgotten.

What will become of how many is said before it happens; whatever is interrupted may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...fabric.contract.errors import ConfigError, InputError
from ...fabric.contract.ids import group_of
from ...fabric.contract.records import DeadLetter
from ...fabric.contract.text import counted, did_you_mean, one_line
from ...fabric.contract.wire import dump_json
from ...fabric.host.command import with_commands
from ...fabric.inspect.dead_letters import DeadAction, all_dead, deal_with_dead
from ...fabric.rules.queue.dead import WHY, DeadOutcome, cause_of, causes_of, of_cause
from .options import AsJson, Run, Url, find_run, need_url, with_ports
from .printing import Console, show, show_json
from .speech import say, say_nothing

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric

Names = Annotated[list[str] | None, typer.Argument(metavar="[TRAJECTORY]...", help="Which, as `dead ls` names them.")]
All = Annotated[bool, typer.Option("--all", help="All of the run.")]
OfCause = Annotated[str | None, typer.Option("--cause", help="Of all, those whose reason has this text in it.")]
IsSure = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]
WORDS: Mapping[DeadAction, tuple[str, str, str]] = {
    "retry": (
        "to run again in their groups",
        "running again",
        "Let trajectories run again in their own groups, each once; those whose group went on without them are kept.",
    ),
    "discard": ("to be forgotten", "forgotten", "Forget dead letters; their groups are as they were."),
}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    dead = typer.Typer(no_args_is_help=True, help="Trajectories that were given up: why, run again, forgotten.")
    app.add_typer(dead, name="dead")
    dead.command("ls")(_list)
    dead.command("show")(_show)
    for action, (_, _, told) in WORDS.items():
        dead.command(action, help=told)(_dealing(action))


def _list(run: Run = None, cause: OfCause = None, url: Url = None, json: AsJson = False) -> None:
    """List dead letters by cause, the most frequent first."""
    run_id, letters = with_ports(need_url(url), lambda ports: _letters(ports, run))
    letters = sorted(of_cause(letters, cause), key=lambda each: each.trajectory_id)
    if json:
        show_json([_row(each) for each in letters])
        return
    if not letters:
        of = f" whose reason has {cause!r} in it" if cause is not None else ""
        say_nothing(f"run {run_id} has no dead letters{of}: none of its trajectories was given up")
        return
    console = Console()
    for row in causes_of(letters):
        console.print(f"{_many(row.trajectory_count, row.group_count)}:", style="bold", highlight=False)
        say(console, f"  {row.cause}")
        say(console, with_commands(f"  → `rollfab dead show {row.example} --run {run_id}`\n"))
    many = _many(len(letters), len({group_of(each.trajectory_id) for each in letters}))
    told = f"{many} in all. Run again, or forget, those of one cause: "
    say(console, with_commands(f"{told}`rollfab dead retry --all --cause TEXT --run {run_id}`, or discard"))


def _show(
    trajectory: Annotated[str, typer.Argument(help="Which, as `dead ls` names it.", show_default=False)],
    run: Run = None,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Show one dead letter with its task and traceback."""
    run_id, letters = with_ports(need_url(url), lambda ports: _letters(ports, run))
    letter = next((each for each in letters if each.trajectory_id == trajectory), None)
    if letter is None:
        raise _no_letter(trajectory, run_id, letters)
    if json:
        show_json({**_row(letter), "worker_id": letter.worker_id, "traceback": letter.traceback, "job": letter.job})
        return
    say(Console(), f"{one_line(letter.trajectory_id)}: {one_line(letter.reason)}")
    show(f"attempt {letter.attempt + 1}, on {one_line(letter.worker_id)}")
    show(f"task: {one_line(dump_json(letter.job.get('task')).decode())}\n{letter.traceback}")


def _dealing(action: DeadAction) -> Callable[..., None]:
    """Make the command that deals with dead letters in one way."""

    def deal(
        trajectories: Names = None,
        everything: All = False,
        cause: OfCause = None,
        run: Run = None,
        dry_run: DryRun = False,
        yes: IsSure = False,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        chosen = _chosen(action, trajectories, everything, cause)
        _deal(action, chosen, cause, run, need_url(url), is_dry=dry_run, is_sure=yes, json=json)

    return deal


def _chosen(action: DeadAction, names: list[str] | None, is_all: bool, cause: str | None) -> list[str] | None:
    """Return the names that were typed; None: all."""
    if bool(names) == is_all or (cause is not None and not is_all):
        raise ConfigError(
            f"dead {action}: say which: names of trajectories, or --all, or --all --cause TEXT; "
            "`rollfab dead ls` lists them by cause"
        )
    return names or None


def _deal(
    action: DeadAction,
    names: Sequence[str] | None,
    cause: str | None,
    run: str | None,
    url: str,
    *,
    is_dry: bool,
    is_sure: bool,
    json: bool,
) -> None:
    """Say what will happen, ask where it is about all, do it, and say what became of it."""

    async def work(ports: RedisFabric, *, is_dry: bool) -> tuple[str, DeadOutcome]:
        config = await find_run(ports, run)
        stream = ports.rollouts(config)
        return config.run_id, await deal_with_dead(stream, config, action, names, cause=cause, is_dry=is_dry)

    run_id, found = with_ports(url, lambda ports: work(ports, is_dry=True))
    if names is not None and any(each.code == "unknown" for each in found.refused):
        _, letters = with_ports(url, lambda ports: _letters(ports, run))
        known = {each.trajectory_id for each in letters}
        raise _no_letter(next(each for each in names if each not in known), run_id, letters)
    console = Console(stderr=True)
    if not json:
        _tell(console, found, f"run {run_id}", WORDS[action][0])
    if not is_dry and found.trajectory_count:
        if names is None and not is_sure and not typer.confirm("go on?", err=True):
            raise ConfigError("nothing was changed: say yes, or give --yes")
        _, found = with_ports(url, lambda ports: work(ports, is_dry=False))
    if json:
        show_json({"run_id": run_id, "is_dry_run": is_dry, **asdict(found)})
    elif not is_dry and found.trajectory_count:
        show(f"{WORDS[action][1]}: {_many(found.trajectory_count, found.group_count)}")
    if not found.trajectory_count and found.refused:
        raise typer.Exit(1)


def _tell(console: Console, found: DeadOutcome, where: str, does: str) -> None:
    if found.trajectory_count or not found.refused:
        say(console, f"{where}, {does}: {_many(found.trajectory_count, found.group_count)}")
    for each in found.refused:
        say(console, f"not {_many(each.trajectory_count, each.group_count)}: {WHY[each.code]}", "warning")


def _many(trajectory_count: int, group_count: int) -> str:
    return f"{counted(trajectory_count, 'trajectory')} of {counted(group_count, 'group')}"


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "trajectory_id": letter.trajectory_id,
        "group_id": group_of(letter.trajectory_id),
        "attempt": letter.attempt,
        "cause": cause_of(letter.reason),
        "reason": letter.reason,
        "task": letter.job.get("task"),
    }


def _no_letter(name: str, run_id: str, letters: Sequence[DeadLetter]) -> InputError:
    hint = did_you_mean(name, [each.trajectory_id for each in letters])
    return InputError(
        f"no dead letter {name!r:.100} in run {run_id!r}: {hint}; `rollfab dead ls --run {run_id}` lists them"
    )


async def _letters(ports: RedisFabric, run: str | None) -> tuple[str, list[DeadLetter]]:
    config = await find_run(ports, run)
    return config.run_id, await all_dead(ports.rollouts(config), config)
