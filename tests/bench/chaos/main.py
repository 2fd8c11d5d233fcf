"""`rollfab bench chaos`: a real workload under kills, freezes and cuts of every role and the broker.

What it counts, over one run with a seeded schedule (schedule.py) and real processes (cast.py):

- `faults`: injected, by role and kind.
- `lost`, `duplicated`, `malformed`, `diverged`: from the trainers' own journals (journal.py), after faults have
  stopped and all that was accepted had DRAIN_S to end. What has not ended by then is lost.
- `regenerated_fraction`: tokens that engines made beyond those of settled turns, over tokens made. Engines' own counts,
  kept in files that survive their kill (bench/witness.py). It is what was made and thrown away: behind the last save
  of a killed worker, or by one whose claims were gone without its knowing.
- `recovery_ms`: for a fault on a process that held claims of trajectories or turns, the time from the fault until each
  of those was claimed anew, settled, or renewed by its holder, who came back in time. For the broker, from the fault
  until a turn was settled after its return. `recovery_ms_by_role` adds reward workers, which hold no claims: until
  every trajectory that waited for its reward at that moment had it.
- `dead`: dead letters; there must be none.

With `--calls` a trajectory is the chat calls of an agent that is written against `openai` alone (calls.py): by agents
that are environments, or by agents elsewhere, in sessions at gateways, which are harmed in place of agent workers. Each
kind of talk is played once before the first fault; every answer afterwards is measured by it. It adds:

- `calls`, `calls_completed`, `calls_lost`, `errors_retryable`, `errors_final`, `sessions_over`, `turns_doubled`,
  `answers_differing`: see calls.py, judge_calls.
- `turns_unused`: turns that were settled and are in no record.

Exit code 1 when anything was lost, duplicated, malformed, diverged, dead, left over or did not recover, a call was lost
or had a final error, a turn was doubled in the record, or an answer differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rollfab.deploy.replay.figures import Report
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.host.helpers import Helpers
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import RunStatus
from rollfab.trainer.client import connect

from ..lively import lively_weights
from ..witness import POOL, token_count
from .calls import CALM, KIND_COUNT, Players, Talk, judge_calls, read_calls
from .cast import Cast, Workload
from .claims import ClaimWatch
from .director import Director
from .journal import Verdict, judge, read_journal
from .report import complain, count_fates, count_faults, count_tokens, print_table, time_recoveries
from .schedule import BROKER
from .trainer import RUN_ID, digest, flaw, journal_path

START_TIMEOUT_S = 120.0  # importing torch several times on a busy machine
DRAIN_S = 90.0  # longer than the longest safety net: a turn without a result is asked for again after a minute


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. pauses: bounds of the quiet time before a fault, in seconds, by role. agent_kill_count: that many kills
    of agents, and no other faults, in place of `duration_s` of all kinds; 0: not that.
    """

    workload: Workload
    duration_s: float
    pauses: dict[str, tuple[float, float]]
    agent_kill_count: int = 0


FULL = Settings(
    workload=Workload(
        counts={"worker": 2, "serving": 2, "agent": 2, "controller": 2, "reward": 2, "api": 2, "trainer": 2},
        slots={"worker": 8, "serving": 8},
        depth=28,  # more than three workers have slots, so that both serving ones are lent
        group_size=2,
        turn_count=4,
        completion_tokens=64,
        pace_s=0.8,  # about 1,600 tokens/s in all: the better part of two cores is for starting again what was killed
    ),
    duration_s=600.0,
    pauses={
        "worker": (3.0, 8.0),
        "serving": (4.0, 10.0),
        "agent": (0.5, 3.0),
        "controller": (0.5, 3.0),
        "reward": (0.5, 3.0),
        "api": (0.5, 3.0),
        "trainer": (0.5, 3.0),
        BROKER: (4.0, 12.0),
    },
)
_QUICK_COUNTS = {role: count for role, count in FULL.workload.counts.items() if role != "serving"}
QUICK = Settings(
    workload=replace(
        FULL.workload, counts={**_QUICK_COUNTS, "api": 1}, slots={"worker": 16}, depth=16, turn_count=3, pace_s=0.5
    ),
    duration_s=22.0,
    pauses={**dict.fromkeys(FULL.pauses, (0.2, 0.8)), BROKER: (2.0, 4.0)},
)


CALLS = {"agents": "agent", "gateway": "gateway"}  # whose calls → the role that holds their sessions

KILLS = Settings(  # trajectories that outlive several agents each
    workload=replace(
        QUICK.workload,
        counts={"worker": 1, "agent": 3, "controller": 1, "reward": 1, "trainer": 1},
        depth=24,
        turn_count=6,
    ),
    duration_s=3600.0,
    pauses={"agent": (0.1, 0.6)},
)


def calls_of(settings: Settings, calls: str) -> Settings:
    """Return settings whose trajectories are chat calls. calls: one of CALLS."""
    role = CALLS[calls]
    workload = replace(
        settings.workload,
        calls=calls,
        counts={"worker": 2, role: 2, "controller": 2, "trainer": 2},
        slots={"worker": 16},
        depth=8,
        group_size=1,
        turn_count=5,
        completion_tokens=32,
        pace_s=0.3,
    )
    # An agent's processes take seconds to load `openai` on a busy machine: what is killed before never makes a call.
    return replace(settings, workload=workload, pauses={**settings.pauses, role: (2.0, 5.0)})


def bench_chaos(
    *,
    quick: bool,
    json_output: bool,
    seed: int,
    duration_s: float | None,
    agent_kill_count: int = 0,
    calls: str = "",
) -> int:
    """Run and print; returns the exit code."""
    settings = QUICK if quick else FULL
    if calls:
        settings = calls_of(settings, calls)
    if agent_kill_count:
        settings = replace(KILLS, agent_kill_count=agent_kill_count)
    if duration_s is not None:
        settings = replace(settings, duration_s=duration_s)
    directory = Path(tempfile.mkdtemp(prefix="rollfab-chaos-"))
    where = f"What every process wrote, and the broker's data, are in {directory}"
    try:
        report = asyncio.run(measure(settings, seed, directory))
    except FabricError as error:
        print(f"the chaos of seed {seed} could not be brought to its end: {error}\n{where}", file=sys.stderr)
        return 1
    if json_output:
        print(report.json())
    else:
        print_table(report)
    again = f"rollfab bench chaos --seed {seed}" + (f" --kill-agents {agent_kill_count}" if agent_kill_count else "")
    again += f" --calls {calls}" if calls else ""
    if complaint := complain(report.results, again):
        print(f"{complaint}\n{where}", file=sys.stderr)
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    return 0


async def measure(settings: Settings, seed: int, directory: Path) -> Report:
    """One run.

    Args:
        settings: the workload, for how long, how often.
        seed: of the faults.
        directory: exists and is empty; holds logs, journals and the broker's data afterwards.

    Raises:
        FabricError: the processes did not come up, or one did not come back.
    """
    started_s = time.monotonic()
    cast = Cast(directory, settings.workload)
    try:
        await _start_roles(cast, settings.workload)
        async with _playing_elsewhere(cast, settings.workload):
            calm = await asyncio.to_thread(_play_calmly, cast, settings.workload) if settings.workload.calls else {}
            await _start_trainers(cast)
            watch = ClaimWatch(cast.broker.url, RUN_ID)
            director = Director(cast, watch, seed, settings.pauses)
            await _harm(director, settings)
            drain_s = await _drain(cast)
            await watch.close()
        status = await _status(cast)
    finally:
        await cast.close()
    journals = [read_journal(journal_path(directory, index)) for index in range(settings.workload.counts["trainer"])]
    verdict = judge(journals)
    made = token_count(directory)
    results = {
        **count_faults(director.injected),
        **count_fates(verdict, status),
        **count_tokens(made, status, verdict),
        **time_recoveries(director.injected),
        **(_judge_calls(directory, settings.workload, verdict, calm, status) if calm else {}),
        "crashes": cast.crashes,
        "drain_s": drain_s,
        "wall_s": time.monotonic() - started_s,
    }
    params = {"seed": seed, "settings": asdict(settings)}
    return Report(name="chaos", params=params, results=results, baselines={}, ratio={})


async def _harm(director: Director, settings: Settings) -> None:
    most = f"{settings.agent_kill_count} kills" if settings.agent_kill_count else f"{settings.duration_s:.0f} s"
    progress = asyncio.create_task(_show_progress(director, most))
    try:
        if settings.agent_kill_count:
            await director.kill_agents(settings.agent_kill_count)
        else:
            await director.run(settings.duration_s)
    finally:
        progress.cancel()


async def _start_roles(cast: Cast, load: Workload) -> None:
    """Everything but trainers up, with a run and its first weights."""
    for role in load.counts:
        if role != "trainer":
            await cast.start(role)
    cast.watch()
    await asyncio.to_thread(_open_run, cast, load)


@contextlib.asynccontextmanager
async def _playing_elsewhere(cast: Cast, load: Workload) -> AsyncIterator[None]:
    """Agents of this process play at the gateways, where the workload has gateways, as long as the block lasts."""
    if load.calls != "gateway":
        yield
        return
    talk = Talk(turn_count=load.turn_count, completion_tokens=load.completion_tokens, pace_s=load.pace_s)
    players = Players(cast.gateways, cast.gateway_key, RUN_ID, cast.directory, talk)
    async with Helpers(players.play(load.depth)):
        yield


def _play_calmly(cast: Cast, load: Workload) -> dict[int, str]:
    """Have every kind of talk played before anything is harmed; returns the digest of each."""
    names = {f"{CALM}-{kind}": kind for kind in range(KIND_COUNT)}
    found: dict[int, str] = {}
    until_s = time.monotonic() + START_TIMEOUT_S
    with connect(cast.broker.url) as fabric:
        run = fabric.run(RUN_ID)
        tasks = [{"seed": kind, "name": name} for name, kind in names.items()]
        run.submit(tasks, group_size=load.group_size, group_ids=list(names))
        while len(found) < len(names):
            if time.monotonic() >= until_s:
                raise FabricError(f"of {len(names)} undisturbed trajectories {len(found)} have ended in time")
            with run.groups(timeout=0.25, consumer=CALM) as groups:
                for group in groups:
                    if wrong := flaw(group, load.group_size, load.turn_count):
                        raise FabricError(f"the undisturbed {group.group_id} is {wrong}")
                    found[names[group.group_id]] = digest(group.rollouts[0])
    return found


def _judge_calls(
    directory: Path, load: Workload, verdict: Verdict, calm: dict[int, str], status: RunStatus
) -> dict[str, Any]:
    settled = status.counters.get("turns_settled", 0)
    return {
        **judge_calls(read_calls(directory), verdict, calm, load.turn_count),
        "turns_unused": settled - verdict.turn_count - len(calm) * load.turn_count,
    }


async def _start_trainers(cast: Cast) -> None:
    """Trainers up, and every process at work."""
    await cast.start("trainer")
    until_s = time.monotonic() + START_TIMEOUT_S
    while not all(cast.is_serving(name) for name in cast.relays):
        if time.monotonic() >= until_s:
            silent = next(name for name in cast.relays if not cast.is_serving(name))
            raise FabricError(f"{silent} did not start, its last lines:\n{cast.child(silent).tail()}")
        await asyncio.sleep(0.05)


def _open_run(cast: Cast, load: Workload) -> None:
    pace = {"turn_count": load.turn_count, "completion_tokens": load.completion_tokens, "pace_s": load.pace_s}
    worlds: dict[str, dict[str, Any]] = {
        "": {"environment": "stroll", "environment_options": pace, "reward": "count-turns"},
        "agents": {"environment": "talk", "environment_options": {**pace, "directory": str(cast.directory)}},
        "gateway": {"environment": "gateway"},
    }
    sampling = {"temperature": 0.0} if load.calls else {}
    # Any staleness will do: every version holds the same weights
    config = RunConfig(run_id=RUN_ID, model="tiny", staleness=1_000_000, sampling=sampling, **worlds[load.calls])

    async def create() -> None:
        async with await RedisFabric.open(cast.broker.url, client_name="chaos") as ports:
            await ports.board.create_run(config)
            await ports.board.set_lend(f"pool:{POOL}", "on")

    asyncio.run(create())
    with connect(cast.broker.url) as fabric:
        fabric.run(RUN_ID).publish(lively_weights(), version=0)


async def _drain(cast: Cast) -> float:
    """No new work; returns how long it took until all trainers said that nothing was left, DRAIN_S at most."""
    (cast.directory / "drain").touch()
    started_s = time.monotonic()
    paths = [journal_path(cast.directory, index) for index in range(cast.workload.counts["trainer"])]
    while time.monotonic() - started_s < DRAIN_S:
        if all(any(line["event"] == "done" for line in read_journal(path)) for path in paths):
            break
        await asyncio.sleep(0.1)
    return time.monotonic() - started_s


async def _status(cast: Cast) -> RunStatus:
    async with await RedisFabric.open(cast.broker.url, client_name="chaos") as ports:
        return await ports.board.run_status(RUN_ID)


async def _show_progress(director: Director, most: str) -> None:
    """One line that is written over on a terminal, one every 15 s elsewhere."""
    is_terminal = sys.stderr.isatty()
    started_s = time.monotonic()
    while True:
        await asyncio.sleep(1.0 if is_terminal else 15.0)
        counts = Counter(each.fault.kind for each in director.injected)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        text = f"{time.monotonic() - started_s:4.0f} s, of {most}: {len(director.injected)} faults ({kinds})"
        print(f"\r{text}" if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
