"""`rollfab submit` and `consume`: work in and out, from the shell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...fabric.contract.errors import ConfigError, InputError, NothingMoves, WireError
from ...fabric.contract.ids import new_group_id
from ...fabric.contract.records import Group
from ...fabric.contract.text import counted
from ...fabric.contract.wire import load_json
from ...trainer.checks import make_groups
from ...trainer.files import check_new, group_row, write_groups
from ...trainer.groups import TAKEOVER_S
from .options import AsJson, Run, Url, find_run, need_url, with_ports
from .printing import show, show_json, tell_written
from .progress import Tell, progress
from .speech import say_nothing

if TYPE_CHECKING:
    from ...trainer.client import Fabric

PEEK_COUNT = 10
TASK_BYTES_MAX = 1 << 30
PUSH_COUNT = 256  # groups pushed at once
OUTPUT_COUNT = 1000  # groups of a file: its reader and its writer hold them in hand until it is whole


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    _register_submit(app)
    _register_consume(app)


def _register_submit(app: typer.Typer) -> None:
    @app.command()
    def submit(
        file: Annotated[Path, typer.Argument(help="One task (a JSON object) per line.", exists=True, dir_okay=False)],
        run: Run = None,
        group_size: Annotated[int, typer.Option(help="Trajectories per task.", min=1)] = 8,
        quorum: Annotated[
            int | None, typer.Option(help="Rollouts that complete a group; the rest are cancelled.", min=1)
        ] = None,
        priority: Annotated[int, typer.Option(help="0 first, 1, 2 last.", min=0, max=2)] = 1,
        deadline: Annotated[
            float | None, typer.Option(help="Seconds after which a group is complete with what it has.")
        ] = None,
        name: Annotated[
            str | None,
            typer.Option(help="Names the groups NAME-0, NAME-1, …: a call that is repeated pushes none twice."),
        ] = None,
        model: Annotated[str | None, typer.Option(help="To create the run.")] = None,
        environment: Annotated[str | None, typer.Option(help="To create the run.")] = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Push the tasks of a file, one group each."""
        tasks = read_tasks(_bytes_of(file), str(file))
        if not tasks:
            raise InputError(f'{file} holds no task: write one JSON object per line, such as {{"seed": 1}}')
        ids = [new_group_id() if name is None else f"{name}-{number}" for number in range(len(tasks))]
        wishes: dict[str, Any] = {"quorum": quorum, "priority": priority}
        make_groups(tasks, group_size, ids, **wishes, deadline_s=deadline)  # refuses all before any is pushed
        run_id = run or with_ports(need_url(url), lambda ports: find_run(ports, None)).run_id
        with _connected(url) as fabric, progress("pushing", unit="count", total=len(tasks)) as tell:
            opened = fabric.run(run_id, model=model, environment=environment)
            for first in range(0, len(tasks), PUSH_COUNT):
                part = slice(first, first + PUSH_COUNT)
                with _telling(first, len(tasks), name):
                    opened.submit(tasks[part], group_size=group_size, deadline=deadline, group_ids=ids[part], **wishes)
                tell(min(part.stop, len(tasks)), len(tasks))
        show_json({"run_id": run_id, "group_ids": ids}) if json else show(
            f"{counted(len(ids), 'group')} pushed to run {run_id}"
        )


def _connected(url: str | None) -> Fabric:
    from ...trainer.client import connect  # brings redis and all that a trainer needs

    return connect(need_url(url))


@contextmanager
def _telling(done: int, total: int, name: str | None) -> Iterator[None]:
    """Say how far a push of several parts had come, if it ends before its time."""
    try:
        yield
    except BaseException:
        if done or name is not None:
            how = "" if name is None else "; the same call again pushes the rest"
            say_nothing(f"{done:,} of {total:,} tasks were pushed before, from the first on{how}")
        raise


def _register_consume(app: typer.Typer) -> None:
    @app.command()
    def consume(
        context: typer.Context,
        run: Run = None,
        count: Annotated[int | None, typer.Option(help="Stop after this many groups.", min=0)] = None,
        timeout: Annotated[float, typer.Option(help="Stop after this many seconds without a group.", min=0)] = 60.0,
        consumer: Annotated[str, typer.Option(help="Who consumes.")] = "trainer",
        keep: Annotated[str | None, typer.Option(help='"varied": drop groups whose rewards are all equal.')] = None,
        takeover: Annotated[
            float, typer.Option(help="Seconds of silence after which another consumer's groups are taken over.")
        ] = TAKEOVER_S,
        output: Annotated[
            Path | None,
            typer.Option(
                help="A new file, .jsonl or .parquet, in place of printing: at most 1000 groups if --count does not "
                "say, acknowledged together once it is whole.",
                dir_okay=False,
            ),
        ] = None,
        peek: Annotated[
            bool, typer.Option("--peek", help="Only look: print the oldest (10, or --count), and take none of them.")
        ] = False,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Print completed groups as JSON lines, acknowledging each; or write them to a file; or only look."""
        if peek:
            _refuse_beside_peek(context)
        if output is not None:
            check_new(output)
        run_id = with_ports(need_url(url), lambda ports: find_run(ports, run)).run_id
        if peek:
            _peek(need_url(url), run_id, PEEK_COUNT if count is None else count, output, json)
            return
        if output is not None:
            count = OUTPUT_COUNT if count is None else count
        with _connected(url) as fabric:
            groups = fabric.run(run_id).groups(
                timeout=timeout, count=count, consumer=consumer, keep=keep, takeover=takeover
            )
            stuck: list[NothingMoves] = []
            if output is None:
                for group in groups:
                    show_json(group_row(group), flush=True)
            else:
                with groups, progress("groups", unit="count", total=count) as tell:
                    written = write_groups(output, _counting(until_stuck(groups, stuck), tell, count or 0))
                tell_written(output, "group", written, json)
            if stuck:
                raise stuck[0]
            say_nothing(f"stopped: {groups.ended_why}")


def _counting(groups: Iterable[Group], tell: Tell, total: int) -> Iterator[Group]:
    for number, group in enumerate(groups, 1):
        tell(number, total)
        yield group


def _refuse_beside_peek(context: typer.Context) -> None:
    """Refuse options of who takes groups: nobody does. Raises ConfigError."""
    sources = {name: context.get_parameter_source(name) for name in ("timeout", "consumer", "keep", "takeover")}
    given = [f"--{name}" for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise ConfigError(f"--peek takes no group, so {', '.join(given)} would do nothing: leave one or the other out")


def _peek(url: str, run: str, count: int, output: Path | None, json: bool) -> None:
    """Print groups that are not acknowledged, or write them to a file, and leave them where they are."""
    with _connected(url) as fabric:
        groups = fabric.run(run).peek(count)
    if output is None:
        for group in groups:
            show_json(group_row(group))
    elif groups:
        tell_written(output, "group", write_groups(output, groups), json, "; all of them are still in the run")
    if not groups:
        say_nothing(
            f"run {run} has no complete group that is not acknowledged; `rollfab status` says what is under way"
        )


def until_stuck(groups: Iterable[Group], stuck: list[NothingMoves]) -> Iterator[Group]:
    """Yield groups until there are no more, or none can come: that error goes to `stuck`, what came before is kept."""
    try:
        yield from groups
    except NothingMoves as error:
        stuck.append(error)


def _bytes_of(file: Path) -> bytes:
    """Read a file of tasks, which may be a pipe.

    Raises:
        InputError: it is too large, or has no end, as a device may.
    """
    with file.open("rb") as opened:
        data = opened.read(TASK_BYTES_MAX + 1)
    if len(data) > TASK_BYTES_MAX:
        raise InputError(f"{file} has more than {TASK_BYTES_MAX:,} bytes of tasks: push it in parts")
    return data


def read_tasks(data: bytes, name: str) -> list[dict[str, Any]]:
    """Read the tasks of a file, one JSON object per line; empty lines count, but hold none. name: the file's.

    Raises:
        InputError: names the file and the line.
    """
    return [_task(line, number, name) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


def _task(line: bytes, number: int, name: str) -> dict[str, Any]:
    try:
        task = load_json(line)
        if not isinstance(task, dict):
            raise WireError("expected a JSON object")
    except WireError as error:
        text = f"{name}: line {number} is no task: {error.message}. Mend the line, or leave it out"
        raise InputError(text, line=number) from error
    return task
