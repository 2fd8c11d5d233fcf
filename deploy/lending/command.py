"""`rollfab lend`: the serving team's switch, its outcome on every worker, and what lending has cost and given.

- on, observe, off and limit change what is said of one worker, one pool, or all; caps and hours stay until they are
  changed themselves. clear: nothing is said of it any more. A number of slots is `on --slots N`.
- Leaving names out never lends more to all: that takes --worker, --pool or --all. `off` needs none of them.
- A name that nobody has is refused; --future: it is one that is still to come.
- The answer says what was taken back, as its workers tell it.
- The switch needs the broker alone: workers obey it within milliseconds, with every controller dead.
- Wrong usage is exit code 2.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...fabric.contract.clock import SystemClock
from ...fabric.contract.errors import ConfigError, InputError
from ...fabric.contract.limits import SLOT_COUNT_MAX
from ...fabric.contract.records import Lease, WorkerInfo
from ...fabric.contract.sharing import ALL, POOL, LendSetting
from ...fabric.contract.text import cleaned, did_you_mean
from ...fabric.host.command import with_commands
from ...fabric.inspect.lend_switch import switch
from ...fabric.rules.lending.hours import minute_of_week
from ...fabric.rules.lending.terms import CLEAR, MODES, changed, check_subject, terms
from ...fabric.rules.serving.tax import sharing_totals, with_taxes
from ..cli.options import AsJson, Url, need_url, with_ports
from ..cli.printing import Console, show_json
from .view import draw_log, draw_report, draw_status

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric

SWITCHES = (*MODES, "limit", CLEAR)
VIEWS = ("status", "log", "report")
NONE = "none"  # takes a cap or the hours away
PAGE_COUNT = 1000
READ_COUNT_MAX = 5_000  # events that one look at the log goes through
TAKEN_BACK_S = 5.0  # how long the answer waits for what workers give back
LOGGED = ("lend.", "lease.")  # kinds of events


def _begun_actions(incomplete: str) -> list[str]:
    return [each for each in (*SWITCHES, *VIEWS) if each.startswith(incomplete)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("lend")(_lend)


def _lend(
    action: Annotated[
        str,
        typer.Argument(
            help="on, observe, off, limit, clear; status, log, report; or slots.", autocompletion=_begun_actions
        ),
    ],
    worker: Annotated[str | None, typer.Option(help="One serving worker. Default: all.")] = None,
    pool: Annotated[str | None, typer.Option(help="One pool of serving workers. Default: all.")] = None,
    everyone: Annotated[
        bool, typer.Option("--all", help="All: on for those known now, observe, off and limits for later ones too.")
    ] = False,
    future: Annotated[bool, typer.Option("--future", help="The name may be one that nobody has yet.")] = False,
    slots: Annotated[str | None, typer.Option(help='At most so many turns at once, or "none".')] = None,
    compute: Annotated[str | None, typer.Option(help='Share of the device\'s time, like 0.3, or "none".')] = None,
    memory: Annotated[str | None, typer.Option(help='Share of the KV cache, like 0.2, or "none".')] = None,
    hours: Annotated[
        list[str] | None, typer.Option(help='When, UTC: "mon-fri 22:00-06:00". Repeatable. "none": always.')
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; kept with the switch.")] = "",
    count: Annotated[int, typer.Option(help="log: the newest so many.", min=1, max=10_000)] = 20,
    limit: Annotated[
        int, typer.Option(help="log: look for them among the newest so many events of all kinds.", min=1)
    ] = READ_COUNT_MAX,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """Lend serving workers' spare time to rollouts, or take it back; see what it costs and gives."""
    try:
        changes = _changes(action, {"slots": slots, "compute": compute, "memory": memory}, hours)
        if changes and action in VIEWS:
            raise InputError(f"lend {action} takes no caps or hours: `rollfab lend limit` sets them")
        changed(None, {**changes, "reason": reason})
        subject = _subject(action, worker, pool, is_all=everyone)
    except InputError as error:
        raise ConfigError(str(error)) from error

    async def work(ports: RedisFabric) -> dict[str, Any]:
        if action == "log":
            return await _log(ports, count, limit)
        if action == "report":
            return await _report(ports)
        if action == "status":
            return await _status(ports)
        said = {**changes, "reason": reason, "said_by": _user()}
        done = await switch(ports.board, SystemClock(), subject, said, is_future=future, wait_s=TAKEN_BACK_S)
        return {**await _status(ports), "switched": {"subject": subject, **asdict(done)}}

    try:
        seen = with_ports(need_url(url), work)
    except InputError as error:  # a name that nobody has
        raise ConfigError(str(error)) from error
    if json:
        show_json(seen)
        return
    draw = {"log": draw_log, "report": draw_report}.get(action, draw_status)
    Console().print(draw(with_commands(cleaned(seen))), highlight=False)


# ---------------------------------------------------------------- what was typed


def _subject(action: str, worker: str | None, pool: str | None, *, is_all: bool) -> str:
    if (worker is not None) + (pool is not None) + is_all > 1:
        raise InputError("--worker, --pool and --all name different things: give one of them")
    may_lend_more = action in ("on", CLEAR) or action.isdigit()
    if may_lend_more and worker is None and pool is None and not is_all:
        raise InputError(
            f"lend {action}: say whose: --pool NAME, --worker NAME, or --all for those known now; "
            "`rollfab lend status` lists them"
        )
    return check_subject(f"{POOL}{pool}" if pool is not None else worker if worker is not None else ALL)


def _changes(action: str, caps: Mapping[str, str | None], hours: list[str] | None) -> dict[str, Any]:
    """Return the fields of a setting that an action changes; none for one that only looks."""
    found: dict[str, Any] = {}
    if action.isascii() and action.isdigit():
        found = {"mode": "on", "slot_count_max": _number("lend", action, int, SLOT_COUNT_MAX)}
    elif action in (*MODES, CLEAR):
        found = {"mode": action}
    elif action not in (*SWITCHES, *VIEWS):
        words = (*MODES, *VIEWS, "limit", CLEAR)
        raise InputError(
            f"lend {action!r}: expected {', '.join(words)}, or a number of slots; {did_you_mean(action, words)}"
        )
    if caps["slots"] is not None:
        found["slot_count_max"] = _number("--slots", caps["slots"], int, SLOT_COUNT_MAX)
    for name in ("compute", "memory"):
        if (text := caps[name]) is not None:
            found[f"{name}_fraction_max"] = _number(f"--{name}", text, float, 1)
    if hours:
        found["hours"] = [] if hours == [NONE] else hours
    if action == "limit" and not found:
        raise InputError("lend limit: say what: --slots 4, --compute 0.3, --memory 0.2 or --hours 22:00-06:00")
    return found


def _number(option: str, text: str, kind: type[int] | type[float], most: int) -> float | None:
    if text == NONE:
        return None
    try:
        found = kind(text)
    except ValueError as error:
        raise InputError(f'{option} is {text!r:.60}: expected a number, or "{NONE}"') from error
    if not 0 <= found <= most:
        part = "" if kind is int else ": 0.3 is 30 %"
        raise InputError(f"{option} is {text:.60}: expected a number from 0 to {most:,}{part}")
    return found


def _user() -> str:
    """Name who is at the command line, for the record; not a proof."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container without a name for its user
        return f"cli@{socket.gethostname()}"


# ---------------------------------------------------------------- what is asked of the broker


async def _status(ports: RedisFabric) -> dict[str, Any]:
    """Read the settings, and their outcome on every serving worker."""
    board = ports.board
    lends, workers = await board.lends(), await board.workers()
    leases = {name: each for run in await board.runs() for name, each in (await board.leases(run)).items()}
    minute = minute_of_week(await board.wall_ms())
    rows = [
        {**worker_row(info, lends, leases.get(info.worker_id), minute), "heartbeat_age_ms": age_ms}
        for info, age_ms in workers.values()
        if info.role == "serving"
    ]
    return {
        "lends": {name: asdict(said) for name, said in sorted(lends.items())},
        "serving_workers": sorted(rows, key=lambda row: (row["pool"], row["worker_id"])),
    }


def worker_row(info: WorkerInfo, lends: Mapping[str, LendSetting], lease: Lease | None, minute: int) -> dict[str, Any]:
    """Describe a serving worker: what its team allows, what it was given, and what its guard does with it."""
    found = terms(lends, info.worker_id, info.pool, minute)
    return {
        "worker_id": info.worker_id,
        "pool": info.pool,
        "state": info.state,
        "terms": asdict(found),
        "lease": asdict(lease) if lease is not None else None,
        "run_id": info.run_id,
        "running_count": info.running_count,
        "guard_state": info.guard_state,
        "guard_reason": info.guard_reason,
        "open_fraction": info.open_fraction,
        "headroom_fraction": info.headroom_fraction,
        "probe": info.probe,
        "tokens_per_s": info.tokens_per_s,
    }


async def _log(ports: RedisFabric, count: int, limit: int) -> dict[str, Any]:
    """Read the newest `count` lends, revokes and switches among the newest `limit` events, the newest last.

    is_cut: there may be more of them in older events, which were not read.
    """
    workers = await ports.board.workers()
    others = {name for name, (info, _) in workers.items() if info.role != "serving"}
    before, found, left = "", list[dict[str, Any]](), limit
    while len(found) < count and left > 0:
        page = await ports.board.newest_events(before, min(PAGE_COUNT, left))
        found += [
            {"event_id": name, "time_ms": int(name.split("-")[0]), "kind": kind, "facts": facts}
            for name, kind, facts in page
            if kind.startswith(LOGGED) and facts.get("worker_id") not in others
        ]
        if not page:
            break
        before, left = page[-1][0], left - len(page)
    return {"events": found[:count][::-1], "is_cut": len(found) < count and left <= 0}


async def _report(ports: RedisFabric) -> dict[str, Any]:
    reports = await ports.board.sharing()
    rows = [with_taxes(report) for _, report in sorted(reports.items())]
    return {"workers": rows, "totals": asdict(sharing_totals(reports.values()))}
