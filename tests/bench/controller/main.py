"""`rollfab bench controller`: how long a capacity plan takes, a whole tick of it on a real broker, and a failover.

- `plan_ms`: the rules alone (settle and plan), on one core, of facts that change between two plans as in the next.
- `plan_cpu_ms`: what of that a core was busy with: the same where others use the machine too.
- `tick_ms`: everything that a controller does in a tick: reading workers, runs and leases, planning, renewing and
  changing leases, writing down what is news. A quarter of the workers has said something new before each.
- `failover_s`: from the kill -9 of the leading controller process until its successor has renewed every lease; the
  pool is the smallest one. `double_leases`: workers that were seen with leases on two runs meanwhile.

Half of the workers are dedicated, half serving; eight runs share them.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from redis import Redis

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.deploy.replay.figures import Report, number, percentile, show
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.lease_plan import EPOCHS_PER_TERM
from rollfab.fabric.contract.records import Lease
from rollfab.fabric.contract.sharing import ALL, LendSetting
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import Survey
from rollfab.fabric.queue.keys import LEADER, ShardKeys
from rollfab.fabric.rules.lending.capacity import CapacityRule, Grant, RunFacts, plan, settle
from rollfab.fabric.rules.lending.terms import lent_by_name
from rollfab.workers.controller.controller import Controller, ControllerConfig
from rollfab.workers.controller.demand import Census
from tests.bench.measure import run_bench

from .stage import MODEL, RUN_COUNT, SLOT_COUNT, Stage, run_config, stirred, worker_infos

SEED = 7
WARM_COUNT = 5  # ticks that are not counted: the first ones grant every lease
FAILOVER_MAX_S = 20.0
NAMES = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    worker_counts: tuple[int, ...]
    plan_count: int
    tick_count: int
    failover_count: int


FULL = Settings(worker_counts=(10, 100, 1000), plan_count=400, tick_count=100, failover_count=5)
QUICK = Settings(worker_counts=(10, 100, 1000), plan_count=100, tick_count=20, failover_count=1)


def bench_controller(*, quick: bool, json_output: bool) -> int:
    """Measure and print; returns the exit code."""
    return run_bench(lambda: _measure(QUICK if quick else FULL), _print, json_output=json_output)


def _measure(settings: Settings) -> Report:
    results: dict[str, Any] = {}
    for count in settings.worker_counts:
        walls, cores = zip(*plan_times_ms(count, settings.plan_count), strict=True)
        results |= _figures("plan_ms", count, walls) | _figures("plan_cpu_ms", count, cores)
        results |= _figures("tick_ms", count, _on_broker(partial(_tick_times_ms, count, settings)))
    failovers = _on_broker(partial(_failovers, settings.failover_count))
    results["failover_s"] = [round(each, 3) for each, _ in failovers]
    results["failover_s_max"] = max(results["failover_s"])
    results["double_leases"] = sum(doubles for _, doubles in failovers)
    params = {"run_count": RUN_COUNT, "seed": SEED, "worker_counts": list(settings.worker_counts)}
    return Report(name="controller", params=params, results=results, baselines={}, ratio={})


def _figures(name: str, count: int, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_p50_{count}": round(percentile(values, 0.5), 3),
        f"{name}_p99_{count}": round(percentile(values, 0.99), 3),
    }


def _on_broker(measure: Callable[[str], Any]) -> Any:
    """What is measured on a broker of its own."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedBroker.start(Path(directory) / "broker") as broker:
        return asyncio.run(measure(broker.url))


def plan_times_ms(worker_count: int, plan_count: int) -> list[tuple[float, float]]:
    """Milliseconds of each plan, and of a core in it; workers and demand change from one to the next."""
    gc.collect()
    gc.freeze()  # as the controller process does once it has started
    random, rule, census = Random(SEED), CapacityRule(), Census()
    infos = [stirred(info, random) for info in worker_infos(worker_count)]
    lends = {ALL: lent_by_name(ALL, LendSetting(mode="on"), infos)}
    grants: list[Grant] = []
    owed: dict[str, float] = {}
    found = []
    for tick in range(plan_count + WARM_COUNT):
        now_s = tick * 0.25
        infos = [stirred(info, random) if random.random() < 0.25 else info for info in infos]
        facts = census.workers(infos, _survey(grants), lends, now_s=now_s, wall_ms=0)
        runs = [_demand(index, worker_count, random) for index in range(RUN_COUNT)]
        begun_s, core_s = time.perf_counter(), time.thread_time()
        owed = settle(owed, grants, runs, 0.25, rule)
        grants = plan(facts, runs, rule)
        found.append(((time.perf_counter() - begun_s) * 1000, (time.thread_time() - core_s) * 1000))
        census.learn(facts, grants, now_s)
    return found[WARM_COUNT:]


def _survey(grants: list[Grant]) -> Survey:
    """The board after these grants."""
    leases: dict[str, dict[str, Lease]] = {}
    for grant in grants:
        if grant.run_id is not None:
            lease = Lease(
                worker_id=grant.worker_id,
                run_id=grant.run_id,
                lease_epoch=1,
                slot_count=grant.slot_count,
                lease_until_ms=None,
            )
            leases.setdefault(grant.run_id, {})[grant.worker_id] = lease
    return Survey(workers={}, assignments={}, runs={}, leases=leases)


def _demand(index: int, worker_count: int, random: Random) -> RunFacts:
    """A run's demand, from nothing to twice its share of all slots."""
    share = worker_count * SLOT_COUNT // RUN_COUNT
    return RunFacts(
        run_id=run_config(index).run_id,
        model=MODEL,
        weight=run_config(index).weight,
        has_weights=True,
        open_count=random.choice((0, share // 2, share, 2 * share)),
        idle_s=0.0,
        left_tokens=400.0,
    )


async def _tick_times_ms(worker_count: int, settings: Settings, url: str) -> list[float]:
    """Milliseconds of each tick of a controller in this process, on a broker of its own."""
    async with await RedisFabric.open(url, client_name="bench") as fabric:
        stage = Stage(fabric, worker_count, SEED)
        await stage.open([run_config(index) for index in range(RUN_COUNT)])
        config = ControllerConfig(worker_id="bench", lead_ms=60_000, worker_age_ms_max=3_600_000)
        controller = Controller(fabric.board, config, SystemClock())
        found = []
        for _ in range(settings.tick_count + WARM_COUNT):
            await stage.beat(max(1, worker_count // 4))
            begun_s = time.perf_counter()
            await controller.tick(await fabric.board.lead("bench", config.lead_ms))
            found.append((time.perf_counter() - begun_s) * 1000)
        return found[WARM_COUNT:]


async def _failovers(count: int, url: str) -> list[tuple[float, int]]:
    """Seconds of each failover between two controller processes, and workers that were on two runs meanwhile."""
    async with await RedisFabric.open(url, client_name="bench") as fabric:
        stage = Stage(fabric, min(FULL.worker_counts), SEED)
        await stage.open([run_config(index) for index in range(RUN_COUNT)])
        with tempfile.TemporaryDirectory() as directory, Redis.from_url(url) as redis:
            supervisor = Supervisor(Path(directory))
            try:
                for name in NAMES:
                    supervisor.add(name, ["controller", "--name", name], environment={"ROLLFAB_URL": url})
                return [await _failover(stage, redis, supervisor) for _ in range(count)]
            finally:
                supervisor.stop()


async def _failover(stage: Stage, redis: Redis, supervisor: Supervisor) -> tuple[float, int]:
    """Kill the leader once both are up; the standby's turn."""
    begun_s = time.monotonic()
    while not _leader(redis) or not await _all_known(stage):
        _check_time(begun_s, "two controllers lead and follow")
        supervisor.watch()
        await _keep_alive(stage)
    killed, term = _leader(redis), _term(redis)
    supervisor.kill(killed)
    begun_s, double_count = time.monotonic(), 0
    while True:
        terms, doubles = _leases(redis)
        double_count = max(double_count, doubles)
        if terms and min(terms) > term:
            return time.monotonic() - begun_s, double_count
        _check_time(begun_s, "a successor has renewed every lease")
        await _keep_alive(stage)


async def _keep_alive(stage: Stage) -> None:
    await stage.beat(1)
    await asyncio.gather(*map(stage.fabric.board.heartbeat, stage.infos))
    await asyncio.sleep(0.005)


async def _all_known(stage: Stage) -> bool:
    """Both controllers have said that they are there, and every dedicated worker has its lease."""
    workers = await stage.fabric.board.workers()
    fresh = {name for name in NAMES if name in workers and workers[name][1] < 2_000}
    survey = await stage.fabric.board.survey()
    leased = {name for leases in survey.leases.values() for name in leases}
    return len(fresh) == len(NAMES) and {each.worker_id for each in stage.infos if each.role == "dedicated"} <= leased


def _leader(redis: Redis) -> str:
    found: Any = redis.get(LEADER)
    return found.decode().partition("/")[0] if found else ""


def _term(redis: Redis) -> int:
    found: Any = redis.get(LEADER)
    return int(found.decode().split()[1])


def _leases(redis: Redis) -> tuple[list[int], int]:
    """Terms of all leases, and how many workers have more than one, of one moment."""
    with redis.pipeline(transaction=True) as pipeline:
        for index in range(RUN_COUNT):
            pipeline.hgetall(ShardKeys(run_config(index).run_id, 0).leases)
        rows = [row for hash_ in pipeline.execute() for row in hash_.items()]
    names = [name for name, _ in rows]
    return [int(raw.split()[0]) // EPOCHS_PER_TERM for _, raw in rows], len(names) - len(set(names))


def _check_time(begun_s: float, what: str) -> None:
    if time.monotonic() - begun_s > FAILOVER_MAX_S:
        raise BrokerError(f"controllers: after {FAILOVER_MAX_S:g} s still not: {what}", reason="timeout")


def _print(report: Report) -> None:
    rows = []
    for count in report.params["worker_counts"]:
        parts = [(what, part) for what in ("plan_ms", "plan_cpu_ms", "tick_ms") for part in ("p50", "p99")]
        figures = [report.results[f"{what}_{part}_{count}"] for what, part in parts]
        rows.append([str(count), *map(number, figures)])
    longest, doubles = report.results["failover_s_max"], report.results["double_leases"]
    notes = [
        f"failover after kill -9: at most {number(longest)} s in {len(report.results['failover_s'])} rounds; "
        f"workers seen with two leases: {doubles}",
    ]
    columns = ["workers", "plan ms p50", "plan ms p99", "core ms p50", "core ms p99", "tick ms p50", "tick ms p99"]
    show("Capacity controller, half of the workers dedicated, half serving, 8 runs", columns, rows, notes)
