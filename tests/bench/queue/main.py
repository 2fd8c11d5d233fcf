"""`rollfab bench queue`: jobs per second and waits of our queues, beside the peers and the broker's own limit.

- One broker, one run: our life cycle, the replay of its commands, and every peer, in alternating rounds.
- The broker has one core and all clients together another, where there are two; the waits are measured unpinned.
- Every trajectory pushed must be delivered once: what was lost or duplicated is shown, and fails the bench.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from rollfab.deploy.replay.figures import Report, number, percentile, show
from rollfab.fabric.broker.clients.url import mask_url, resolve_url
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.opened import RedisFabric
from tests.bench.measure import Figure, alternate, process_cpu_s, run_bench, split_cores

from ..peers.processes import Peer, PeerFailed, start_peers
from ..peers.rounds import PAYLOAD_BYTES
from .latency import Waits, measure_waits
from .life import Shape, Tally, close_run, lanes_of, live, open_run
from .limit import Tape, check_replay, record, replay

PEERS = ("rq", "dramatiq", "taskiq", "arq")
BATCHED = Shape(lane_count=4, batch_count=64, group_size=8, turn_count=4)
TURNS_ONLY = Shape(lane_count=4, batch_count=64, group_size=8, turn_count=16)
TRAJECTORIES_ONLY = Shape(lane_count=4, batch_count=64, group_size=8, turn_count=0)
ONE_BY_ONE = Shape(lane_count=8, batch_count=1, group_size=1, turn_count=4)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long to measure."""

    round_count: int
    round_s: float  # aimed at; the first, unmeasured round says how many jobs that is
    wait_s: float  # of pushing at turns_per_s, per round
    turns_per_s: float = 400.0
    peers: tuple[str, ...] = PEERS
    may_install: bool = False  # arq's own environment


QUICK = Settings(round_count=3, round_s=0.5, wait_s=2.0)
FULL = Settings(round_count=7, round_s=2.0, wait_s=5.0, may_install=True)


def bench_queue(*, quick: bool, json_output: bool, url: str | None) -> int:
    """Measure and print; returns the exit code: 1 when anything was lost or duplicated, or the broker unfit."""
    return run_bench(
        lambda: measure(QUICK if quick else FULL, url), _print_table, json_output=json_output, faults=faults
    )


def faults(report: Report) -> list[str]:
    """Name what was lost, and what came twice."""
    return [f"{count} jobs were {name}" for name in ("lost", "duplicated") if (count := report.results[name])]


def measure(settings: Settings, url: str | None = None) -> Report:
    """Run everything on one broker.

    Args:
        url: a broker whose database is empty; it is emptied again afterwards. None: a private one.

    Raises:
        ConfigError: the database holds keys.
        BrokerError: the broker cannot be reached or is unfit.
    """
    with _broker(url) as (where, server_pid):
        with split_cores(server_pid) as is_pinned:
            bench = _Bench(where, server_pid, settings)
            bench.measure_throughput()
        bench.measure_waits()
        return bench.report(mask_url(where), is_pinned=is_pinned)


@contextmanager
def _broker(url: str | None) -> Iterator[tuple[str, int | None]]:
    """URL of the broker to measure, and its process where it is ours."""
    given = resolve_url(url)
    if given is None:
        with EmbeddedBroker.start() as broker:
            yield broker.url, broker.pid
        return
    with redis.Redis.from_url(given) as client:
        if client.dbsize():
            raise ConfigError(
                f"the broker {mask_url(given)} holds keys, and a bench leaves its database empty: "
                "give the number of an empty one, redis://host:port/9"
            )
        try:
            yield given, None
        finally:
            client.flushdb()


@dataclass
class _Bench:
    """The arms, and what their rounds brought."""

    url: str = field(repr=False)
    server_pid: int | None
    settings: Settings
    rates: dict[str, Figure] = field(default_factory=dict)  # jobs per second by arm
    reasons: dict[str, str] = field(default_factory=dict)  # peers that could not run
    busy: dict[str, list[float]] = field(default_factory=lambda: {"client": [], "broker": []})
    tally: Tally = field(default_factory=Tally)
    waits: list[Waits] = field(default_factory=list)
    run_count: int = 0

    def measure_throughput(self) -> None:
        tape = asyncio.run(record(BATCHED))
        peers, self.reasons = start_peers(self.settings.peers, self.url, may_install=self.settings.may_install)
        try:
            arms: dict[str, Callable[[], float]] = {
                "rollfab": self._ours(BATCHED, is_headline=True),
                "broker limit": lambda: self._limit(tape),
                "turns": self._ours(TURNS_ONLY),
                "trajectories": self._ours(TRAJECTORIES_ONLY),
                "one by one": self._ours(ONE_BY_ONE),
                **{name: self._peer(peer) for name, peer in peers.items()},
            }
            rounds = alternate(arms, self.settings.round_count)
        finally:
            for peer in peers.values():
                peer.stop()
        self.rates = {name: Figure(tuple(found)) for name, found in rounds.items() if name not in self.reasons}

    def measure_waits(self) -> None:
        for _ in range(self.settings.round_count):
            self.waits.append(asyncio.run(self._wait_round()))

    def _ours(self, shape: Shape, *, is_headline: bool = False) -> Callable[[], float]:
        """Rounds of our own life cycle; a first one, unmeasured, warms up and says how long a round is."""
        rate = asyncio.run(self._life(shape, 1, is_headline=False))
        pass_count = max(1, round(rate * self.settings.round_s / shape.jobs_per_pass))
        return lambda: asyncio.run(self._life(shape, pass_count, is_headline=is_headline))

    async def _life(self, shape: Shape, pass_count: int, *, is_headline: bool) -> float:
        async with await RedisFabric.open(self.url, client_name="bench") as fabric:
            run = await open_run(fabric, self._run_id())
            lanes = lanes_of(fabric, run, shape, self.tally)
            server_s, client_s, start_s = self._server_cpu_s(), time.process_time(), time.perf_counter()
            await live(lanes, pass_count)
            duration_s = time.perf_counter() - start_s
            if is_headline:
                self.busy["client"].append((time.process_time() - client_s) / duration_s)
                self.busy["broker"].append((self._server_cpu_s() - server_s) / duration_s)
            await close_run(fabric, run)
        return shape.jobs_per_pass * pass_count / duration_s

    def _limit(self, tape: Tape) -> float:
        """Several replays, as long together as a round of ours."""
        duration_s, job_count = 0.0, 0
        while duration_s < self.settings.round_s / 2:
            duration_s += asyncio.run(self._replay(tape))
            job_count += tape.shape.jobs_per_pass
        return job_count / duration_s

    async def _replay(self, tape: Tape) -> float:
        async with await RedisFabric.open(self.url, client_name="bench") as fabric:
            run = await open_run(fabric, self._run_id())
            duration_s = replay(tape, self.url, run.run_id)
            await check_replay(fabric, tape, run.run_id)
            await close_run(fabric, run)
        return duration_s

    def _peer(self, peer: Peer) -> Callable[[], float]:
        def measure_round(job_count: int) -> float:
            try:
                return peer.round(job_count)
            except PeerFailed as error:
                self.reasons[peer.name] = f"not run: {error}"
                return 0.0

        measure_round(100)
        job_count = max(100, round(measure_round(100) * self.settings.round_s))
        return lambda: 0.0 if peer.name in self.reasons else measure_round(job_count)

    async def _wait_round(self) -> Waits:
        run_id = self._run_id()
        async with await RedisFabric.open(self.url, client_name="bench") as fabric:
            run = await open_run(fabric, run_id)
            waits = await measure_waits(
                self.url, run_id, turns_per_s=self.settings.turns_per_s, duration_s=self.settings.wait_s
            )
            await close_run(fabric, run)
        return waits

    def _run_id(self) -> str:
        self.run_count += 1
        return f"bench-{self.run_count}"

    def _server_cpu_s(self) -> float:
        return process_cpu_s(self.server_pid) if self.server_pid else 0.0

    def report(self, broker: str, *, is_pinned: bool) -> Report:
        ours, limit = self.rates["rollfab"], self.rates["broker limit"]
        peers = {name: self.rates[name] for name in self.settings.peers if name in self.rates}
        best = max(peers.values(), key=lambda figure: figure.median, default=None)
        turn_share = TURNS_ONLY.turn_count / (1 + TURNS_ONLY.turn_count)
        p50, p99 = (Figure(tuple(percentile(each.claim_ms, part) for each in self.waits)) for part in (0.5, 0.99))
        late = Figure(tuple(percentile(each.late_ms, 0.99) for each in self.waits))
        results = {
            "jobs_per_s": ours.median,
            "jobs_per_s_spread": ours.spread,
            "turns_per_s": self.rates["turns"].median * turn_share,
            "trajectories_per_s": self.rates["trajectories"].median,
            "jobs_per_s_one_by_one": self.rates["one by one"].median,
            "claim_ms_p50": p50.median,
            "claim_ms_p99": p99.median,
            "claim_ms_p99_spread": p99.spread,
            "pusher_late_ms_p99": late.median,
            "share_of_broker_limit": ours.median / limit.median,
            "client_busy_fraction": Figure(tuple(self.busy["client"])).median,
            "broker_busy_fraction": Figure(tuple(self.busy["broker"])).median if self.server_pid else None,
            "lost": self.tally.lost_count,
            "duplicated": self.tally.duplicated_count,
        }
        baselines: dict[str, Any] = {"broker limit": _row(limit), **{name: _row(each) for name, each in peers.items()}}
        baselines |= {name: {"jobs_per_s": None, "reason": reason} for name, reason in self.reasons.items()}
        ratio = {
            "best_peer": ours.median / best.median if best else None,
            "by_peer": {name: ours.median / each.median for name, each in peers.items()},
            "broker_limit": ours.median / limit.median,
        }
        params = {
            "broker": broker,
            "payload_bytes": PAYLOAD_BYTES,
            "batched": asdict(BATCHED),
            "one_by_one": asdict(ONE_BY_ONE),
            "settings": asdict(self.settings),
            "is_pinned": is_pinned,
        }
        return Report(name="queue", params=params, results=results, baselines=baselines, ratio=ratio)


def _row(figure: Figure) -> dict[str, Any]:
    return {"jobs_per_s": figure.median, "spread": figure.spread}


def _print_table(report: Report) -> None:
    found = json.loads(report.json())
    results, baselines = found["results"], found["baselines"]
    ours = results["jobs_per_s"]

    def row(name: str, rate: float | None, spread: list[float] | None = None, reason: str | None = None) -> list[str]:
        if rate is None:
            return [name, reason or "", "", ""]
        low_high = f"{number(spread[0])} to {number(spread[1])}" if spread else ""
        return [name, number(rate), low_high, f"{ours / rate:.2f}"]

    rows = [
        row("rollfab, 64 a call (turns and trajectories)", ours, results["jobs_per_s_spread"]),
        row("rollfab, turns alone", results["turns_per_s"]),
        row("rollfab, trajectories alone", results["trajectories_per_s"]),
        row("rollfab, one a call", results["jobs_per_s_one_by_one"]),
        *(row(name, *map(each.get, ("jobs_per_s", "spread", "reason"))) for name, each in baselines.items()),
    ]
    best = found["ratio"]["best_peer"]
    notes = [
        f"push to claim at {found['params']['settings']['turns_per_s']:.0f} turns/s: "
        f"p50 {results['claim_ms_p50']:.2f} ms, p99 {results['claim_ms_p99']:.2f} ms "
        f"(the pusher itself was late by p99 {results['pusher_late_ms_p99']:.2f} ms)",
        f"share of the broker's limit {results['share_of_broker_limit']:.2f}; "
        f"times the best peer {'-' if best is None else format(best, '.1f')}; "
        f"lost {results['lost']}, duplicated {results['duplicated']}",
        f"busy while ours ran: client {results['client_busy_fraction']:.0%} of a core"
        + (f", broker {results['broker_busy_fraction']:.0%}" if results["broker_busy_fraction"] is not None else ""),
        f"machine: {found['machine']}",
    ]
    show("rollfab bench queue: jobs per second, life cycle whole", ["", "jobs/s", "spread", "ours ÷ this"], rows, notes)
