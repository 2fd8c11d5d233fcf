"""`rollfab bench placement`: what the broker pays to give out one job, by how many workers and trajectories there are.

- A private broker is filled with trajectories of one run; each has a turn that waits, as soon as an agent holds it.
- Then single claims, settles and pushes are made by workers in random order: a turn goes to its home, to others when
  that takes too long, within every worker's share. The broker times every script itself (a slow log of every call).
- Beside it, in the same traffic: a script that does nothing, which is the floor of any script.
- A controller's tick that extends all leases is timed too: it counts all slots anew.

Exit code 1 when a job was not given out, or given out twice, or when what giving out and handing in take grows with the
trajectories under way: P50 with LIVE_MANY of them over that with LIVE_FEW, the same workers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha1
from typing import Any

from redis.asyncio import Redis

from rollfab.deploy.replay.figures import Report, number, percentile, show
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.lease_plan import LeaseChange
from rollfab.fabric.contract.records import Lease, RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TrajectoryClaim, TurnSettle
from rollfab.fabric.queue.scripts import load_script

from ..queue.life import new_group, new_turn, result_of

RUN_ID, AGENT = "bench-placement", "bench-agent"
SCRIPTS = ("claim", "settle_turns", "push_turns", "set_leases")
NOTHING = "return 1"
BATCH, GROUP_SIZE = 512, 8
US_PER_TOKEN = 20  # that workers say reading a prompt takes them: a turn waits some ms for its home
TICK_COUNT = 200  # claims between two ticks of a controller
TRAJECTORIES, FIRST_TURNS, TURNS = "claim: trajectory", "first turn", "next turn"
SETTLE, PUSH, EXTEND = "settle turn", "push turn", "extend leases"
FLOOR = "nothing"  # a script that does nothing
LIVE_FEW, LIVE_MANY = 4_000, 100_000
GROWTH_MAX, NOISE = 1.2, 0.3  # beside it the floor of the two cases differs, by what else the machine does
COLUMNS = (TRAJECTORIES, FIRST_TURNS, TURNS, SETTLE, PUSH, EXTEND, FLOOR)


@dataclass(frozen=True, kw_only=True)
class Case:
    """worker_count: with leases. live_count: trajectories that have not ended."""

    worker_count: int
    live_count: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """call_count: of every kind, in each case; the first case is what the others are compared with."""

    cases: tuple[Case, ...]
    call_count: int


CASES = tuple(Case(worker_count=w, live_count=n) for n in (4_000, 20_000, 100_000) for w in (10, 100, 1_000))
FULL = Settings(cases=CASES, call_count=3_000)
QUICK = Settings(
    cases=(Case(worker_count=10, live_count=1_000), Case(worker_count=100, live_count=4_000)), call_count=300
)


@dataclass
class Found:
    """Microseconds of the broker, by what was asked for; jobs that were not given out as they should."""

    times_us: dict[str, list[float]] = field(default_factory=dict)
    wrong_count: int = 0


async def measure(settings: Settings) -> Report:
    """Measure all cases, each on a broker of its own."""
    rows = []
    for case in settings.cases:
        found = await _measure_case(case, settings.call_count)
        times = {
            name: {"p50": percentile(each, 0.5), "p99": percentile(each, 0.99), "count": len(each)}
            for name, each in found.times_us.items()
        }
        floor = max(1.0, times[FLOOR]["p99"])  # the broker counts whole microseconds
        over = {name: each["p99"] / floor for name, each in times.items()}
        rows.append({**asdict(case), "us": times, "p99_over_floor": over, "wrong_count": found.wrong_count})
    first, last = rows[0]["us"], rows[-1]["us"]
    return Report(
        name="placement",
        params={"settings": asdict(settings)},
        results={"rows": rows, "wrong_count": sum(row["wrong_count"] for row in rows)},
        baselines={FLOOR: [row["us"][FLOOR] for row in rows]},
        ratio={
            **{name: {part: last[name][part] / first[name][part] for part in ("p50", "p99")} for name in first},
            "growth": growth(rows),
        },
    )


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Divide P50 with LIVE_MANY trajectories by that with LIVE_FEW, by count of workers, where there are both."""
    p50_us = {
        (row["worker_count"], row["live_count"]): {name: each["p50"] for name, each in row["us"].items()}
        for row in rows
    }
    return {
        f"{workers:,} workers": {name: many_us / max(1.0, few[name]) for name, many_us in many.items()}
        for (workers, live_count), many in p50_us.items()
        if live_count == LIVE_MANY and (few := p50_us.get((workers, LIVE_FEW)))
    }


def faults(report: Report) -> list[str]:
    """Tell whether jobs were given out as they should be, and at a cost that does not grow with trajectories."""
    count = report.results["wrong_count"]
    wrong = [f"{count} claims brought no job, or one that somebody had"] if count else []
    for workers, found in report.ratio["growth"].items():
        most = (GROWTH_MAX + NOISE) * max(1.0, found[FLOOR])  # a floor that rose: the machine was busier then
        wrong += [
            f"{workers}: {name} takes {times:.2f} times as long with {LIVE_MANY:,} trajectories as with {LIVE_FEW:,}, "
            f"at most {GROWTH_MAX} is promised ({most:.2f} with room for noise)"
            for name, times in found.items()
            if name != FLOOR and times > most
        ]
    return wrong


async def _measure_case(case: Case, call_count: int) -> Found:
    with EmbeddedBroker.start() as broker:
        async with await RedisFabric.open(broker.url, client_name="bench") as fabric:
            bench = _Bench(fabric, case, min(call_count, case.live_count // 4), random.Random(case.live_count))
            async with Redis.from_url(broker.url) as direct:
                bench.direct = direct
                await bench.fill()
                await bench.claim_trajectories()
                await bench.go_on()
        return bench.found


class _Bench:
    """One run on one broker."""

    direct: Redis

    def __init__(self, fabric: RedisFabric, case: Case, call_count: int, dice: random.Random) -> None:
        self._fabric, self._case, self._call_count, self._dice = fabric, case, call_count, dice
        self._run = RunConfig(
            run_id=RUN_ID, model="none", environment="none", trajectory_count_max=1_000_000, memory_bytes_max=1 << 40
        )
        self._trajectories, self._turns = fabric.trajectories(self._run), fabric.turns(self._run)
        self._workers = [f"w{index}" for index in range(case.worker_count)]
        self._names = {sha1(load_script(name).encode(), usedforsecurity=False).hexdigest(): name for name in SCRIPTS}
        self._seen: set[str] = set()
        self.found = Found()

    async def fill(self) -> None:
        """Push all trajectories and give all workers leases, for half of them at once in all."""
        await self._fabric.board.create_run(self._run)
        rollouts = self._fabric.rollouts(self._run)
        for _ in range(self._case.live_count // BATCH + 1):
            assert all(await rollouts.push([new_group(GROUP_SIZE) for _ in range(BATCH // GROUP_SIZE)]))
        slot_count = max(2, self._case.live_count // (2 * self._case.worker_count))
        lease = Lease(worker_id="", run_id=RUN_ID, lease_epoch=1, slot_count=slot_count, lease_until_ms=None)
        self._leases = [
            LeaseChange(lease=replace(lease, worker_id=worker), duration_ms=60_000) for worker in self._workers
        ]
        assert all(await self._fabric.board.change_leases(0, self._leases, {}))
        await self.direct.script_load(NOTHING)
        await self.direct.config_set("slowlog-max-len", 100_000)

    async def claim_trajectories(self) -> None:
        """Claim some one by one while all are queued, and then all others; push the first turn of each."""
        await self._begin()
        held: list[TrajectoryClaim] = []
        for _ in range(self._call_count):
            held += self._one(await self._trajectories.claim(AGENT, 1))
            await self._nothing()
        await self._end({"claim": TRAJECTORIES})
        while found := await self._trajectories.claim(AGENT, BATCH):
            held += found
        self._dice.shuffle(held)
        self._held = {claim.job.trajectory_id: claim for claim in held}
        for first in range(0, len(held), BATCH):
            pushes = [new_turn(claim, 0, AGENT) for claim in held[first : first + BATCH]]
            assert not any(await self._turns.push(AGENT, pushes))

    async def go_on(self) -> None:
        """Take turns one by one, settle each, and push the next of its trajectory, which has its home there."""
        assigned = dict.fromkeys(self._workers, RUN_ID)
        for part in (FIRST_TURNS, TURNS):
            await self._begin()
            for count in range(self._call_count):
                worker = self._dice.choice(self._workers)
                exchange = await self._turns.exchange(
                    worker, want=1, lease_epoch=1, active_version=-1, us_per_token=US_PER_TOKEN
                )
                for claim in self._one(exchange.claims):
                    settle = TurnSettle(claim=claim, result=result_of(claim))
                    assert not (await self._turns.exchange(worker, settles=[settle])).refused
                    trajectory, _, turn = claim.job.turn_id.rpartition(".")
                    push = new_turn(self._held[trajectory], int(turn) + 1, AGENT)
                    assert not any(await self._turns.push(AGENT, [replace(push, home=worker)]))
                await self._nothing()
                if count % TICK_COUNT == 0:
                    await self._fabric.board.change_leases(0, self._leases, assigned)
            others = {"settle_turns": SETTLE, "push_turns": PUSH, "set_leases": EXTEND}
            await self._end({"claim": part, **(others if part == TURNS else {})})

    def _one(self, claims: Sequence[Any]) -> Sequence[Any]:
        """Count what is not one job that nobody had."""
        names = [getattr(claim.job, "turn_id", None) or claim.job.trajectory_id for claim in claims]
        if len(names) != 1 or names[0] in self._seen:
            self.found.wrong_count += 1
        self._seen.update(names)
        return claims

    async def _begin(self) -> None:
        await self.direct.config_set("slowlog-log-slower-than", 0)
        await self.direct.slowlog_reset()

    async def _nothing(self) -> None:
        await self.direct.evalsha(sha1(NOTHING.encode(), usedforsecurity=False).hexdigest(), 0)

    async def _end(self, names: dict[str, str]) -> None:
        await self.direct.config_set("slowlog-log-slower-than", -1)
        nothing = sha1(NOTHING.encode(), usedforsecurity=False).hexdigest()
        for entry in await self.direct.slowlog_get(100_000):
            words = entry["command"].split(b" ", 2)
            if words[0].upper() != b"EVALSHA":
                continue
            digest = words[1].decode()
            name = FLOOR if digest == nothing else names.get(self._names.get(digest, ""))
            if name is not None:
                self.found.times_us.setdefault(name, []).append(float(entry["duration"]))


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows = []
    for row in found["results"]["rows"]:
        cells = [f"{each['p50']:.0f}, {each['p99']:.0f}" for each in (row["us"][name] for name in COLUMNS)]
        rows.append([f"{row['worker_count']:,} workers, {row['live_count']:,} trajectories", *cells])
    ratio = found["ratio"]
    floors = [
        f"P99 over that of {FLOOR}, {row['worker_count']:,} workers, {row['live_count']:,} trajectories: "
        + ", ".join(f"{name} {number(row['p99_over_floor'][name])}" for name in COLUMNS if name != FLOOR)
        for row in found["results"]["rows"]
    ]
    grown = [
        f"P50 of {LIVE_MANY:,} trajectories over {LIVE_FEW:,}, {workers}: "
        + ", ".join(f"{name} {number(times[name])}" for name in COLUMNS)
        for workers, times in ratio["growth"].items()
    ]
    notes = [
        "last row over the first, P50 and P99: "
        + "; ".join(f"{name} {number(ratio[name]['p50'])}, {number(ratio[name]['p99'])}" for name in COLUMNS),
        *grown,
        *floors,
        f"machine: {found['machine']}",
    ]
    show("rollfab bench placement: microseconds of the broker, P50 and P99", ["", *COLUMNS], rows, notes)
