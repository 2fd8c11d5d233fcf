"""`rollfab logs`: what the roles of `rollfab up` or `rollfab demo` have logged, in the order of time.

- A line without a time (of a traceback, or of a library) belongs to the line before it.
- The broker is not asked: logs can be read when everything else is dead.
- Only as many lines as are shown are kept in memory, however long the logs are.
"""

from __future__ import annotations

import heapq
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.text import did_you_mean, one_line
from ..cli.options import AsJson
from ..cli.printing import Console, show_json
from ..cli.speech import say_nothing
from .supervisor import LOG_BYTES_MAX, OLDER

PLACES = ("rollfab-data", "rollfab-demo")
LOOK_S = 0.25
NAMES_SHOWN = 6  # of roles, where nothing is shown of any
TAIL_BYTES = 1 << 10  # read of each file for a line that is wanted, where all lines are
TAIL_BYTES_MIN = 1 << 16
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?:- \S+ - )?([A-Z]+)\b")
STARTED = re.compile(r"role\.started worker_id='([\w-]+)'")
STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red", "DEBUG": "dim"}
HUES = ("cyan", "magenta", "blue", "green", "bright_cyan", "bright_magenta", "bright_blue")


class Line(NamedTuple):
    """One line of a role's log. at: its time, or that of the line that it belongs to."""

    at: str
    role: str
    level: str
    text: str


class Wanted(NamedTuple):
    """Which lines are shown. names: of trajectories, turns, groups or workers, each of which a line must name."""

    worker: str | None = None
    trajectory: str | None = None

    def tests(self) -> list[Callable[[str], object]]:
        """Return what a line must pass: each name, alone or before what is below it: of g.1 also g.1.0, not g.10."""
        names = [re.escape(each) for each in self if each is not None]
        return [re.compile(rf"(?<![\w.-]){name}(?![\w-])").search for name in names]


class LogFile:
    """One role's log, read on from where it was read to."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self.role = path.name.removesuffix(".log")
        self._path = path
        self._wanted = wanted
        self._tests = wanted.tests()
        self._offset, self._is_begun = 0, False
        self._at, self._level, self._is_shown, self._worker = "", "", False, ""

    def lines(self, byte_count: int | None = None) -> Iterator[Line]:
        """Yield the lines wanted that are new.

        byte_count: of the first reading, so many bytes at the end; None: all, with the older part.
        """
        size = self._path.stat().st_size if self._path.exists() else 0
        if not self._is_begun and byte_count is not None:
            self._offset = max(0, size - byte_count)
        elif not self._is_begun or self._offset > size:  # it was moved since, and begins anew
            yield from self._read(self._path.with_name(self._path.name + OLDER))
            self._offset = 0
        self._is_begun = True
        yield from self._read(self._path)

    def _read(self, path: Path) -> Iterator[Line]:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(max(0, self._offset - 1))
            if self._offset and file.read(1) != b"\n":
                self._offset += len(file.readline())
            for raw in file:
                if not raw.endswith(b"\n"):  # it is being written
                    return
                self._offset += len(raw)
                if (line := self._line(raw.decode("utf-8", "replace").rstrip("\r\n"))) is not None:
                    yield line

    def _line(self, text: str) -> Line | None:
        stamp = STAMP.match(text)
        if stamp is not None:
            self._at, self._level, self._is_shown = stamp[1], stamp[2], False
        if (started := STARTED.search(text)) is not None:
            self._worker = started[1]
        is_its_own = self._wanted.worker is not None and self._wanted.worker in (self._worker, self.role)
        tests = self._tests[is_its_own:]  # all that a worker logs is about it
        self._is_shown |= all(test(text) for test in tests)
        return Line(self._at, self.role, self._level, text) if self._is_shown else None


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("logs")(_logs)


def _logs(
    role: Annotated[
        list[str] | None, typer.Option(help="A role's, as agent-0, or all of a kind, as agent. Repeatable.")
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option(help="Lines that name a trajectory or its turns; or a group, or a turn.")
    ] = None,
    worker: Annotated[str | None, typer.Option(help="What a worker logged, and lines that name it.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="The newest so many.", min=1, max=1_000_000)] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    data: Annotated[
        str | None,
        typer.Option(help="The --data of `up`, or --output of `demo`. Default: the one here that logged last."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what the roles of `rollfab up` or `demo` on this machine have logged, in the order of time."""
    directory = find_logs(data)
    wanted = Wanted(worker, trajectory)
    files = [LogFile(path, wanted) for path in _chosen(directory, role or [])]
    has_all = worker is not None or trajectory is not None
    count = None if has_all else max(TAIL_BYTES_MIN, lines * TAIL_BYTES)
    merged = heapq.merge(*(file.lines(count) for file in files), key=lambda line: line.at)
    newest, tell = deque(merged, maxlen=lines), _teller(files, json)
    for line in newest:
        tell(line)
    if not newest:
        say_nothing(nothing(directory, [file.role for file in files], wanted))
    if follow:
        _follow(directory, files, role or [], wanted, tell)


def _follow(
    directory: Path, files: list[LogFile], roles: Sequence[str], wanted: Wanted, tell: Callable[[Line], None]
) -> None:
    never, known = threading.Event(), {file.role for file in files}
    while not never.wait(LOOK_S):
        for path in _there(directory, roles):
            if (new := LogFile(path, wanted)).role not in known:  # a role that was started meanwhile
                known.add(new.role)
                files.append(new)
        for line in sorted((line for file in files for line in file.lines()), key=lambda line: line.at):
            tell(line)


def nothing(directory: Path, roles: Sequence[str], wanted: Wanted) -> str:
    """Say why no line is shown, and what to do."""
    where = f"the logs of {', '.join(roles[:NAMES_SHOWN])}"
    where += (
        f" and {len(roles) - NAMES_SHOWN} more in {directory}/" if len(roles) > NAMES_SHOWN else f" in {directory}/"
    )
    asked = (("trajectory", wanted.trajectory), ("worker", wanted.worker))
    names = " and ".join(f"{what} {name!r:.100}" for what, name in asked if name is not None)
    if not names:
        return f"no line is shown: {where} are empty. `rollfab status` says which roles run"
    causes = []
    if wanted.trajectory is not None:
        causes.append(
            "only what goes wrong with a trajectory is logged under its name (an attempt that failed, a claim that was "
            "lost), so one that goes well has no line: `rollfab trace` lists those that are there, `rollfab trace ID` "
            "shows one, also of the past"
        )
    if wanted.worker is not None:
        causes.append("`rollfab status` lists the workers that are there")
    kept = f"{LOG_BYTES_MAX >> 19} MiB of each role are kept, the newest"
    return f"no line is shown: none in {where} names {names}; " + "; ".join([*causes, kept])


def find_logs(data: str | None) -> Path:
    """Return the directory of logs in a data directory; None: in the one below here that was written to last.

    Raises:
        ConfigError: there is none.
    """
    found = [Path(each) / "logs" for each in ([data] if data is not None else PLACES)]
    found = [each for each in found if any(each.glob("*.log"))]
    if not found:
        where = data if data is not None else " or ".join(PLACES)
        raise ConfigError(
            f"no logs are in {where} here: give the directory with --data. `rollfab up` prints where its logs are; a "
            "role that was started alone logs to its own stderr",
            option="--data",
        )
    return max(found, key=lambda each: max(path.stat().st_mtime for path in each.glob("*.log")))


def _there(directory: Path, roles: Sequence[str]) -> list[Path]:
    paths = sorted(directory.glob("*.log"))
    return [path for path in paths if not roles or any(_is_of(path.name.removesuffix(".log"), each) for each in roles)]


def _is_of(name: str, role: str) -> bool:
    return name == role or name.startswith((f"{role}-", f"{role}."))


def _chosen(directory: Path, roles: Sequence[str]) -> list[Path]:
    """Return the logs of some roles, or of all. Raises ConfigError: a role has none."""
    names = [path.name.removesuffix(".log") for path in directory.glob("*.log")]
    for role in roles:
        if not any(_is_of(name, role) for name in names):
            raise ConfigError(
                f"no role {role!r:.100} logs to {directory}/: {did_you_mean(role, names)}", option="--role"
            )
    return _there(directory, roles)


def _teller(files: Sequence[LogFile], json: bool) -> Callable[[Line], None]:
    """Make what shows a line."""
    console, width = Console(), max((len(file.role) for file in files), default=0)
    hues: dict[str, str] = {}

    def tell(line: Line) -> None:
        if json:
            show_json(
                {"role": line.role, "time": line.at or None, "level": line.level or None, "text": line.text}, flush=True
            )
            return
        hue = hues.setdefault(line.role, HUES[len(hues) % len(HUES)])
        shown = Text.assemble(
            (f"{line.role:{width}} ", hue), (one_line(line.text), STYLES.get(line.level, "") or "default")
        )
        console.print(shown, soft_wrap=True, highlight=False)

    return tell
