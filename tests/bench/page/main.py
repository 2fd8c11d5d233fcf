"""`rollfab bench page`: the page and its api before a large fabric, and what they cost the broker.

The broker holds a run with many trajectories, of which some are under way, some wait for a trainer, some are kept and
some were given up; events, six hours of samples; and as many workers as asked for beat once a second. Measured:

- `healthz`: a request that reads nothing. It is the floor of all others: the hop, and the event loop's other work.
- `status`: everything that the overview shows. `trajectory`: one in full. `list`: a page of those under way.
- `paint`: from opening the overview in a browser to its first paint; `live`: to the first numbers. `VIEW_paint`: the
  same of every view; `VIEW_shown`: until what it reads is there (skipped, and said so, where there is no Chromium).
- `drawn`: a finished trajectory of 20 turns and 4,800 tokens, from opening its address in a new browser until tokens
  are painted; `led_to`: the same from a click in a page that is open.
- `broker`: the part of a core that the broker uses while ten pages are open, less what it uses while none is: each view
  at least once, asking for what it asks for, as often (VIEWS).
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.deploy.replay.figures import Report, number, percentile, show
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.ids import trajectory_id
from rollfab.fabric.contract.lease_plan import LeaseSample, Sample, ServingSample
from rollfab.fabric.contract.records import DeadLetter, Rollout, RunConfig, Span, TrajectoryJob, WorkerInfo
from rollfab.fabric.inspect.history import SAMPLE_ROW_COUNT_MAX
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import GroupPush, TrajectoryQueue
from rollfab.fabric.queue import keys
from tests.bench.measure import Figure, process_cpu_s
from tests.e2e.chromium import find_chromium, open_browser
from tests.support.records import rollout_of

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "api" / "static"
RUN = RunConfig(
    run_id="large", model="tiny", environment="frozenlake", trajectory_count_max=1 << 24, memory_bytes_max=1 << 36
)
GROUP_SIZE, PUSH_COUNT = 16, 128
BEGUN_COUNT, WAITING_GROUP_COUNT, KEPT_GROUP_COUNT = 2_000, 200, 200
PAGE_COUNT = 10
LETTER_COUNT, EVENT_COUNT, SAMPLE_COUNT = 64, 500, 360
PAINTS = "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime || 0"
LIVE = f"(['live', 'warn'].includes(document.getElementById('state').dataset.state) && ({PAINTS}))"
TOKENS_PAINTED = """
new Promise((done) => {
  const painted = () => setTimeout(() => done(performance.now()));
  const look = () => requestAnimationFrame(() => (document.querySelector('.t') ? painted() : look()));
  look();
})
"""
FOLLOW = """
(() => {
  document.body.append(Object.assign(document.createElement('a'), { href: 'ADDRESS', id: 'lead' }));
  document.getElementById('lead').click();
  return performance.now();
})()
"""
LONG, LONG_TURN_COUNT = "g1.0", 20
POLL_S = 1.0  # as the page does
START_S = 60.0
HISTORY = ("/v1/history?since_ms=0&count=300", 20.0)
SHARING = ("/v1/sharing", 5.0)


@dataclass(frozen=True, kw_only=True)
class View:
    """One view of the page. address: `{name}` is a trajectory under way. shown: a selector, and a part of its text.

    reads: what it asks for besides the status, each with how often, in seconds, as api/static/views has it.
    """

    address: str
    shown: tuple[str, str]
    reads: tuple[tuple[str, float], ...] = ()


LARGE = "/v1/runs/large"
VIEWS = {
    "overview": View(address="", shown=("[data-run=large] [data-f=name]", "large"), reads=(HISTORY,)),
    "run": View(
        address="runs/large",
        shown=("[data-trajectory] [data-f=place]", "agent-0"),
        reads=(
            (LARGE, 5.0),
            (f"{LARGE}/trajectories?state=open&count=15", 2.0),
            (f"{LARGE}/groups?state=open&count=8", 2.0),
            (f"{LARGE}/trajectories?state=open&count=50", 10.0),
            (f"{LARGE}/trajectories?state=waiting&count=12", 10.0),
            (f"{LARGE}/trajectories?state=finished&count=12", 10.0),
            HISTORY,
        ),
    ),
    "trajectory": View(
        address="runs/large/trajectories/{name}",
        shown=("[data-f=state]", "running"),
        reads=((f"{LARGE}/trajectories/{{name}}", 2.0),),
    ),
    "workers": View(address="workers", shown=("#worker-count", "dedicated"), reads=(SHARING,)),
    "leases": View(
        address="workers?show=leases",
        shown=("[data-f=lease-legend]", "guard shut"),
        reads=(
            SHARING,
            ("/v1/leases/history?since_ms=0&" + "&".join(f"worker=worker-{each:04}" for each in range(50)), 30.0),
        ),
    ),
    "serving": View(address="serving", shown=("#serving", "worker-0000"), reads=(SHARING, HISTORY)),
    "dead": View(
        address="dead",
        shown=("[data-dead=large] .cause", "environment raised"),
        reads=((f"{LARGE}/dead-letters/causes", 3.0), (f"{LARGE}/dead-letters?count=200", 3.0)),
    ),
    "events": View(address="events", shown=("#all-events", "worker.failed")),  # and the stream of events
}
GOALS = {
    "paint_ms": 1_000,
    "trajectory_ms_p99": 300,
    "trajectory_drawn_ms": 300,
    "trajectory_led_to_ms": 300,
    "status_ms_p99": 20,
    "broker_core": 0.02,
    "javascript_kb": 150,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """window_s: in which the broker's use is measured. request_count: of each kind in a round."""

    worker_count: int
    trajectory_count: int
    round_count: int
    request_count: int
    window_s: float


FULL = Settings(worker_count=1_000, trajectory_count=1_000_000, round_count=5, request_count=200, window_s=10.0)
QUICK = Settings(worker_count=50, trajectory_count=10_000, round_count=1, request_count=20, window_s=2.0)


class World:
    """The broker, what it holds, and an api before it."""

    def __init__(self, broker: EmbeddedBroker, fabric: RedisFabric, settings: Settings) -> None:
        self.broker = broker
        self.fabric = fabric
        self.settings = settings
        self.trajectories: list[str] = []  # of each kind some

    async def fill(self) -> None:
        """Submit, claim, settle and consume."""
        await self.fabric.board.create_run(RUN)
        group_count = self.settings.trajectory_count // GROUP_SIZE
        queue, stream = self.fabric.trajectories(RUN), self.fabric.rollouts(RUN)
        for index in range(KEPT_GROUP_COUNT + WAITING_GROUP_COUNT):
            await stream.push([_group(index)])
            for claim in await queue.claim("agent-0", GROUP_SIZE):
                made = long_rollout(claim.job) if claim.job.trajectory_id == LONG else short_rollout(claim.job)
                await queue.settle(claim, made, is_scored=True)
            if index < KEPT_GROUP_COUNT:
                (delivery,) = await stream.receive("trainer", 1, 5.0)
                await stream.acknowledge(delivery)
        for start in range(KEPT_GROUP_COUNT + WAITING_GROUP_COUNT, group_count, PUSH_COUNT):
            await stream.push([_group(index) for index in range(start, min(start + PUSH_COUNT, group_count))])
        await self._remember(queue)
        claims = await queue.claim("agent-0", min(BEGUN_COUNT, self.settings.trajectory_count // 4))
        known = [f"g{index}.{index % GROUP_SIZE}" for index in range(0, KEPT_GROUP_COUNT + WAITING_GROUP_COUNT, 7)]
        queued = [f"g{index}.3" for index in range(group_count - 100, group_count)]
        self.trajectories = [*known, *queued, *(claim.job.trajectory_id for claim in claims[:100])]

    async def _remember(self, queue: TrajectoryQueue) -> None:
        """Give some trajectories up, and write events and samples, as large as these get."""
        for claim in await queue.claim("agent-0", LETTER_COUNT):
            job = claim.job.trajectory_id
            facts = {"run_id": RUN.run_id, "worker_id": "agent-0", "traceback": "Traceback: line 1\n" * 30}
            letter = DeadLetter(trajectory_id=job, reason="environment raised ValueError", attempt=1, job={}, **facts)
            await queue.fail(job, claim.fence, letter, is_final=True)
        board = self.fabric.board
        for index in range(EVENT_COUNT):
            await board.add_event("worker.failed", {"worker_id": f"worker-{index:04}", "error": "out of memory"})
        term, now_ms = await board.lead("bench", 600_000), await board.wall_ms()
        counts: Any = dict.fromkeys(("running_count", "slot_count", "groups_waiting", "dead_count"), 64)
        for index in range(SAMPLE_COUNT):
            made: Any = {"token_count": 9_000 * index, "rollout_count": 9 * index}
            time_ms = now_ms - 60_000 * (SAMPLE_COUNT - index)
            rows = tuple(serving_sample(f"worker-{4 * each:04}", index) for each in range(SAMPLE_ROW_COUNT_MAX))
            leases = tuple(
                lease_sample(each, index, time_ms) for each in range(index % 4, self.settings.worker_count, 4)
            )
            sample = Sample(time_ms=time_ms, worker_count=1_000, runs=(), serving=rows, leases=leases, **made, **counts)
            await board.add_sample(term, sample)


def short_rollout(job: TrajectoryJob) -> Rollout:
    """A rollout of 64 tokens."""
    return rollout_of(job, 1.0, range(4, 68))


def long_rollout(job: TrajectoryJob) -> Rollout:
    """A rollout of LONG_TURN_COUNT turns, each of 200 tokens and 40 of the environment's."""
    mask = np.tile(np.repeat(np.array([1, 0], np.uint8), (200, 40)), LONG_TURN_COUNT)
    return replace(
        rollout_of(job, 1.0, np.resize(np.arange(4, 100), len(mask)).tolist()),
        completion_mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        spans=tuple(Span(240 * turn, 240 * turn + 200, f"w{turn % 3}", turn // 4) for turn in range(LONG_TURN_COUNT)),
        turn_count=LONG_TURN_COUNT,
    )


def lease_sample(worker: int, index: int, time_ms: int) -> LeaseSample:
    """What a worker holds from one sample on: every fourth minute something else."""
    run_id, slot_count = (RUN.run_id, 64) if index % 8 < 4 else ("", 0)
    guard = ("open", "shut")[index % 8 < 4] if worker % 4 == 0 else ""
    return LeaseSample(
        worker_id=f"worker-{worker:04}", since_ms=time_ms, run_id=run_id, slot_count=slot_count, guard_state=guard
    )


def serving_sample(worker_id: str, index: int) -> ServingSample:
    """What a serving worker comes to in one sample."""
    latencies = {f"{name}_ms_p99{alone}": 40.0 for name in ("ttft", "tpot") for alone in ("", "_alone")}
    counts = dict.fromkeys(("token_count", "request_count", "request_count_alone"), 40 * index)
    nothing = {"violation_count": 0, "violation_count_alone": 0, "slot_count": 3}
    bounds = {"ttft_slo_ms": 60.0, "tpot_slo_ms": 60.0}
    facts: dict[str, Any] = {**latencies, **counts, **nothing, **bounds}
    return ServingSample(worker_id=worker_id, guard_state="open", **facts)


def beat(url: str, worker_count: int) -> None:
    """Have workers beat once a second, for ever: in a process of its own, as this one measures."""
    infos = [
        WorkerInfo(
            worker_id=f"worker-{index:04}",
            role="serving" if index % 4 == 0 else "dedicated",
            pid=index,
            host=f"host-{index // 8}",
            model="tiny",
            run_id="large",
            slot_count=64,
            engine="vllm 0.32.0 (bench)",
        )
        for index in range(worker_count)
    ]
    asyncio.run(_beat(url, infos))


async def _beat(url: str, infos: Sequence[WorkerInfo]) -> None:
    async with await RedisFabric.open(url, client_name="bench-workers") as fabric:
        client: Any = fabric.board._client
        count = 0
        while True:
            count += 100
            rows = {each.worker_id: replace(each, token_count=count, running_count=7).encode() for each in infos}
            now_ms = int(await fabric.board.wall_ms())
            async with client.pipeline(transaction=False) as pipeline:
                pipeline.hset(keys.WORKERS, mapping=rows)
                pipeline.zadd(keys.HEARTBEATS, dict.fromkeys(rows, now_ms))
                await pipeline.execute()
            await asyncio.sleep(1.0)


def _group(index: int) -> GroupPush:
    name = f"g{index}"
    jobs = tuple(
        TrajectoryJob(
            trajectory_id=trajectory_id(name, place),
            group_id=name,
            task_id=f"task-{index}",
            index=place,
            task={"seed": index},
            seed=index,
        )
        for place in range(GROUP_SIZE)
    )
    return GroupPush(group_id=name, task_id=f"task-{index}", task={"seed": index}, jobs=jobs)


@contextlib.asynccontextmanager
async def opened(settings: Settings, directory: Path) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """Fill a broker, beat for its workers, and start an api."""
    with EmbeddedBroker.start(directory / "broker") as broker, Supervisor(directory / "logs") as supervisor:
        async with await RedisFabric.open(broker.url, client_name="bench") as fabric:
            world = World(broker, fabric, settings)
            await world.fill()
            beating = get_context("spawn").Process(target=beat, args=(broker.url, settings.worker_count), daemon=True)
            beating.start()
            port = _free_port()
            supervisor.add("api", ["api", "--port", str(port)], environment={"ROLLFAB_URL": broker.url})
            try:
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                    await _answering(http)
                    yield world, http
            finally:
                beating.kill()
                beating.join()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def _answering(http: httpx.AsyncClient) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            if (await http.get("/v1/status")).status_code == 200:
                return
        await asyncio.sleep(0.1)
    raise FabricError(f"the bench's api did not answer within {START_S:.0f} s")


# ---- one round


async def timed(http: httpx.AsyncClient, paths: Sequence[str], pause_s: float) -> dict[str, float]:
    """Ask for addresses one by one, at moments that no clock of the api knows; returns percentiles, in ms."""
    taken: list[float] = []
    for path in paths:
        await asyncio.sleep(random.Random(path + str(len(taken))).random() * 2 * pause_s)
        start_s = time.perf_counter()
        answer = await http.get(path)
        taken.append((time.perf_counter() - start_s) * 1000)
        if answer.status_code != 200:
            raise FabricError(f"the bench's api answered {path} with {answer.status_code}: {answer.text[:200]}")
    return {"p50": percentile(taken, 0.5), "p99": percentile(taken, 0.99)}


async def broker_core(world: World, http: httpx.AsyncClient, page_count: int) -> float:
    """Measure the part of a core that the broker uses while so many pages are open."""
    views = list(VIEWS.values())

    async def repeat(path: str, every_s: float, share: float) -> None:
        await asyncio.sleep(every_s * share)
        while True:
            (await http.get(path)).raise_for_status()
            await asyncio.sleep(every_s)

    async def listen() -> None:
        async with http.stream("GET", "/v1/events?after=0", timeout=None) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async def page(index: int) -> None:
        view = views[index % len(views)]
        reads = [(path.format(name=world.trajectories[-1]), every_s) for path, every_s in view.reads]
        tasks = [repeat(path, every_s, index / page_count) for path, every_s in [("/v1/status", POLL_S), *reads]]
        await asyncio.gather(*tasks, *([listen()] if view is VIEWS["events"] else []))

    pages = [asyncio.create_task(page(index)) for index in range(page_count)]
    try:
        await asyncio.sleep(1.0)
        start_s, before_s = time.perf_counter(), process_cpu_s(world.broker.pid)
        await asyncio.sleep(world.settings.window_s)
        used_s, passed_s = process_cpu_s(world.broker.pid) - before_s, time.perf_counter() - start_s
    finally:
        for each in pages:
            each.cancel()
        await asyncio.gather(*pages, return_exceptions=True)
    return used_s / passed_s


async def painted(url: str, shown: tuple[str, str]) -> dict[str, float]:
    """Open an address in a browser of its own; returns when it was painted first, showed numbers, and all, in ms."""
    with tempfile.TemporaryDirectory(prefix="rollfab-browser-", ignore_cleanup_errors=True) as profile:
        async with open_browser(Path(profile)) as browser:
            start_s = time.perf_counter()
            page = await browser.open(url)
            await page.wait_text(".brand", "rollfab")  # its document is there
            await page.evaluate(f"new Promise(done => {{ setInterval(() => {LIVE} && done(), 10); }})")
            live_ms = (time.perf_counter() - start_s) * 1000
            await page.wait_text(*shown, timeout_s=START_S)
            shown_ms = (time.perf_counter() - start_s) * 1000
            return {"paint": float(await page.evaluate(PAINTS)), "live": live_ms, "shown": shown_ms}


async def drawn(root: str) -> dict[str, float]:
    """Open a long trajectory by its address, then by a link in an open page; how long until tokens are painted, ms."""
    address = f"{root}/runs/large/trajectories/{LONG}"
    with tempfile.TemporaryDirectory(prefix="rollfab-browser-", ignore_cleanup_errors=True) as profile:
        async with open_browser(Path(profile)) as browser:
            page = await browser.open(address)
            await page.wait_text(".brand", "rollfab")
            found = {"trajectory_drawn_ms": float(await page.evaluate(TOKENS_PAINTED))}
            page = await browser.open(f"{root}/runs/large")
            await page.wait_text(*VIEWS["run"].shown, timeout_s=START_S)
            since_ms = float(await page.evaluate(FOLLOW.replace("ADDRESS", address)))
            return found | {"trajectory_led_to_ms": float(await page.evaluate(TOKENS_PAINTED)) - since_ms}


async def one_round(world: World, http: httpx.AsyncClient) -> dict[str, float]:
    """Measure everything once."""
    count = world.settings.request_count
    names = random.Random(7).choices(world.trajectories, k=count)
    asked = {
        "healthz": ["/healthz"] * count,
        "status": ["/v1/status"] * count,
        "trajectory": [f"/v1/runs/large/trajectories/{name}" for name in names],
        "list": ["/v1/runs/large/trajectories?count=50", "/v1/runs/large/groups?state=finished"] * (count // 2),
    }
    found: dict[str, float] = {}
    for name, paths in asked.items():
        times = await timed(http, paths, 0.02)
        found |= {f"{name}_ms_{key}": value for key, value in times.items()}
    found["broker_core_alone"] = await broker_core(world, http, 0)
    found["broker_core_pages"] = await broker_core(world, http, PAGE_COUNT)
    found["broker_core"] = found["broker_core_pages"] - found["broker_core_alone"]
    if has_browser():
        for name, view in VIEWS.items():
            address = f"{str(http.base_url).rstrip('/')}/{view.address.format(name=world.trajectories[-1])}"
            times = await painted(address, view.shown)
            found |= {f"{name}_{key}_ms": times[key] for key in ("paint", "shown")}
            if name == "overview":
                found |= {f"{key}_ms": times[key] for key in ("paint", "live")}
        found |= await drawn(str(http.base_url).rstrip("/"))
    return found


def has_browser() -> bool:
    """Whether there is a Chromium on this machine."""
    try:
        find_chromium()
    except AssertionError:
        return False
    return True


def javascript_kb() -> float:
    """All scripts of the page, each compressed, in KB."""
    return sum(len(gzip.compress(path.read_bytes())) for path in sorted(STATIC.rglob("*.js"))) / 1000


# ---- the bench


async def measure(settings: Settings) -> Report:
    """Fill a fabric, and measure some rounds.

    Raises:
        FabricError: the api did not answer, or not as it should.
    """
    with tempfile.TemporaryDirectory(prefix="rollfab-page-", ignore_cleanup_errors=True) as name:
        async with opened(settings, Path(name)) as (world, http):
            rounds = [await one_round(world, http) for _ in range(settings.round_count)]
    figures = {key: Figure(tuple(each[key] for each in rounds)) for key in rounds[0]}
    results: dict[str, Any] = {key: {"median": each.median, "spread": each.spread} for key, each in figures.items()}
    results["javascript_kb"] = javascript_kb()
    floor = figures["healthz_ms_p99"].median
    return Report(
        name="page",
        params={**asdict(settings), "page_count": PAGE_COUNT, "poll_s": POLL_S, "browser": has_browser()},
        results={**results, "goals": GOALS},
        baselines={"healthz_ms_p99": floor},
        ratio={"status_over_healthz_p99": figures["status_ms_p99"].median / floor},
    )


def print_table(report: Report) -> None:
    found = json.loads(report.json())["results"]
    rows = []
    for key, value in found.items():
        if isinstance(value, dict) and "median" in value:
            low, high = value["spread"]
            goal = GOALS["paint_ms"] if key.endswith("paint_ms") else GOALS.get(key)
            rows.append(
                [key, number(value["median"]), f"{number(low)} to {number(high)}", "" if goal is None else str(goal)]
            )
    rows.append(["javascript_kb", number(found["javascript_kb"]), "", str(GOALS["javascript_kb"])])
    notes = [f"{report.params['worker_count']:,} workers, {report.params['trajectory_count']:,} trajectories"]
    if not report.params["browser"]:
        notes.append("no Chromium here: paint and live were not measured (tests/e2e/install_chromium.sh)")
    notes.append(f"machine: {report.machine}")
    show("rollfab bench page", ["figure", "median", "rounds", "goal"], rows, notes)
