"""Reads the broker once, for all who ask.

- A reading costs O(runs + workers), whatever their history.
- Concurrent readers wait for one reading; for `cache_s` after it, its answer or its error is everybody's. For STALE
  times as long its answer still is, while the next reading is under way: of a large fabric one takes 20 ms and more.
- A broker that is silent for `broker_timeout_s` is reported as an error, not waited for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ... import __version__
from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, FabricError
from ...fabric.contract.records import WorkerInfo
from ...fabric.contract.sharing import ALL, LendSetting
from ...fabric.inspect.diagnosing import read_fabric
from ...fabric.inspect.diagnosis import Cause, is_well
from ...fabric.ports.queue import Fabric, RunStatus
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.lending.hours import minute_of_week
from ...fabric.rules.serving.tax import sharing_totals
from ..access.config import ApiConfig
from ..schemas.answers import BadRowView, LeaseView, Rates, RunView, Status, WorkerView
from ..schemas.base import shown
from ..schemas.lending import LendSettingView
from ..schemas.weights import WeightsView
from .events import EventTail
from .views import (
    COUNTERS,
    agreement_view,
    counters_of,
    readiness,
    reward_curve,
    sum_up,
    terms_of,
    totals,
    value_of,
    worker_view,
)
from .weights import WeightReader

SAMPLE_S = 1.0
STALE = 3
WORKERS_AT_ONCE = 100  # views made before others have their turn
EVENT_COUNT = 40
CURVE_COUNT = 128
VERSION_COUNT = 8
AT_ONCE_COUNT = 8  # runs read at once: a quarter of the client's connections

In = TypeVar("In")
Out = TypeVar("Out")


class Ports(Fabric, Protocol):
    """The ports that the api reads: the queues, the board and the weights."""

    @property
    def weights(self) -> WeightStore: ...


@dataclass(frozen=True, slots=True)
class _WorkerFacts:
    """Facts about workers from other tables. minute: of the week, by the broker machine's time, as workers count."""

    lends: Mapping[str, LendSetting]
    leases: list[LeaseView]
    heads: dict[str, int]
    reasons: dict[str, str]
    minute: int


@dataclass(slots=True)
class _Cache:
    until_s: float = float("-inf")
    status: Status | None = None
    body: bytes | None = None
    error: FabricError | None = None


class StatusReader:
    """Reads the broker's state as one Status."""

    def __init__(
        self, ports: Ports, *, tail: EventTail, weights: WeightReader, config: ApiConfig, clock: Clock
    ) -> None:
        self._ports = ports
        self._tail = tail
        self._config = config
        self._clock = clock
        self._lock = asyncio.Lock()
        self._cache = _Cache()
        self._runs = Meters(*COUNTERS)
        self._tokens = Meters("tokens")
        self._weights = weights
        self._refreshing: asyncio.Task[_Cache] | None = None

    async def read(self) -> Status:
        """Return the state now, at most `cache_s` old, or four times that while a reading is under way.

        Raises:
            BrokerError: the broker cannot be reached or does not answer in time.
        """
        cache = await self._fresh()
        if cache.status is None:
            assert cache.error is not None
            raise cache.error.with_traceback(None)
        return cache.status

    async def body(self) -> bytes:
        """Return the state as JSON, encoded once for all who ask."""
        await self.read()
        cache = self._cache
        if cache.body is None:
            assert cache.status is not None
            cache.body = cache.status.model_dump_json().encode()
        return cache.body

    def forget(self) -> None:
        """Have the next one to ask read again, as something was changed."""
        self._cache = _Cache()

    async def watch(self) -> None:
        """Take a sample per second for rates and their history, until cancelled."""
        while True:
            try:
                status = await self.read()
            except FabricError:
                await self._clock.sleep(SAMPLE_S)  # who asks is told; a gap in the history is the truth
                continue
            now_s = self._clock.now_s()
            runs = {run.run_id: run.counters for run in status.runs}
            self._runs.sample(now_s, {**runs, ALL: sum_up(runs.values())})
            self._tokens.sample(now_s, {each.worker_id: {"tokens": each.token_count} for each in status.workers})
            await self._clock.sleep(SAMPLE_S)

    async def _fresh(self) -> _Cache:
        cache, now_s = self._cache, self._clock.now_s()
        if cache.status is None or not cache.until_s <= now_s < cache.until_s + STALE * self._config.cache_s:
            return await self._refreshed()
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refreshed())
        return cache

    async def _refreshed(self) -> _Cache:
        async with self._lock:
            if self._clock.now_s() < self._cache.until_s:
                return self._cache
            cache = _Cache()
            try:
                cache.status = await self._read_in_time()
            except FabricError as error:
                cache.error = error
            cache.until_s = self._clock.now_s() + self._config.cache_s
            self._cache = cache
            return cache

    async def _read_in_time(self) -> Status:
        timeout_s = self._config.broker_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read()
        except TimeoutError as error:
            raise BrokerError(
                f"the broker did not answer within {timeout_s:g} s: is it running, and reachable from the api?",
                reason="timeout",
            ) from error

    async def _read(self) -> Status:
        found, reports = await asyncio.gather(
            read_fabric(self._ports.board, has_rewards=True), self._ports.board.sharing()
        )
        survey, plan = found.survey, found.plan
        self._weights.keep(survey.runs)
        weights = await _for_each(sorted(survey.runs), self._read_weights)
        wall_ms, now_s = self._clock.wall_ms(), self._clock.now_s()
        held = (lease for _, leases in sorted(survey.leases.items()) for lease in leases.values())
        leases = [shown(LeaseView, lease) for lease in held if not lease.has_ended]
        facts = _WorkerFacts(
            lends=found.lends,
            leases=leases,
            heads={run_id: status.head_version for run_id, status in survey.runs.items()},
            reasons={row.worker_id: row.reason for row in plan.rows} if plan is not None else {},
            minute=minute_of_week(survey.wall_ms),
        )
        workers = await self._worker_views(survey.workers, facts)
        runs = [self._run_view(status, found.causes[name], now_s) for name, status in sorted(survey.runs.items())]
        counters = sum_up(counters_of(survey.runs.values()).values())
        lends = found.lends
        return Status(
            time_ms=wall_ms,
            version=__version__,
            readiness=readiness(workers),
            runs=runs,
            workers=workers,
            leases=leases,
            weights=[each for each in weights if each is not None],
            lend_all=value_of(lends[ALL]) if ALL in lends else "observe",
            lending=[shown(LendSettingView, setting, subject=subject) for subject, setting in sorted(lends.items())],
            sharing=sharing_totals(reports.values()),
            totals=totals(runs, workers),
            rates=_rates(self._runs.rates(now_s, ALL, counters)),
            rollouts_per_s_history=self._runs.history(ALL, "trajectories_completed"),
            tokens_per_s_history=self._runs.history(ALL, "tokens"),
            events=self._tail.newest(EVENT_COUNT),
            bad_rows=[shown(BadRowView, row) for row in survey.bad_rows],
        )

    async def _read_weights(self, run_id: str) -> WeightsView | None:
        try:
            return await self._weights.read(run_id, VERSION_COUNT)
        except BrokerError:
            raise
        except FabricError:
            return None  # deleted since we read the list

    async def _worker_views(self, infos: Mapping[str, tuple[WorkerInfo, int]], facts: _WorkerFacts) -> list[WorkerView]:
        now_s = self._clock.now_s()
        by_worker: dict[str, LeaseView] = {}
        for lease in facts.leases:  # of several, that on the run whose weights it follows
            info, _ = infos.get(lease.worker_id, (None, 0))
            if info is None or lease.run_id == info.run_id or lease.worker_id not in by_worker:
                by_worker[lease.worker_id] = lease
        views = []
        for name, (info, age_ms) in sorted(infos.items(), key=lambda item: (item[1][0].role, item[0])):
            rate = self._tokens.rates(now_s, name, {"tokens": info.token_count})["tokens"]
            view = worker_view(
                info,
                max(0, age_ms),
                found=terms_of(info, facts.lends, facts.minute),
                heads=facts.heads,
                lease=by_worker.get(name),
                tokens_per_s=rate,
                plan_reason=facts.reasons.get(name),
            )
            views.append(view)
            if len(views) % WORKERS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return views

    def _run_view(self, status: RunStatus, causes: Sequence[Cause], now_s: float) -> RunView:
        run_id = status.config.run_id
        return shown(
            RunView,
            status.config,
            status,
            rates=_rates(self._runs.rates(now_s, run_id, status.counters)),
            rollouts_per_s_history=self._runs.history(run_id, "trajectories_completed"),
            training=self._tail.training(run_id),
            reward_curve=reward_curve(status.rewards, CURVE_COUNT),
            is_well=is_well(causes),
            causes=causes,
            agreement=agreement_view(status.agreement) if status.agreement is not None else None,
        )


async def _for_each(items: Iterable[In], do: Callable[[In], Awaitable[Out]]) -> list[Out]:
    """Await `do` for all items, some at a time; returns results in the items' order."""
    items, results = list(items), []
    for start in range(0, len(items), AT_ONCE_COUNT):
        results += await asyncio.gather(*(do(item) for item in items[start : start + AT_ONCE_COUNT]))
    return results


def _rates(found: dict[str, float]) -> Rates:
    return Rates(
        rollouts_per_s=round(found["trajectories_completed"], 2),
        turns_per_s=round(found["turns_settled"], 2),
        tokens_per_s=round(found["tokens"], 2),
    )


# ---------------------------------------------------------------- rates
#
# Rates and their history, from counters that only grow. Pure: the caller brings the time.
#
# Samples are taken once per second; a rate is what was added since the oldest sample of the last few seconds, so a
# burst does not make it jump and a standstill shows within that time.


WINDOW_S = 5.0
HISTORY_COUNT = 120  # two minutes


@dataclass(slots=True)
class Meter:
    """Counters of one thing over the last seconds."""

    names: tuple[str, ...]
    samples: deque[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=int(WINDOW_S) + 2))
    history: dict[str, deque[float]] = field(default_factory=dict)

    def sample(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Take note of the counters; call once per second."""
        rates = self.rates(now_s, counters)
        for name in self.names:
            self.history.setdefault(name, deque(maxlen=HISTORY_COUNT)).append(round(rates[name], 2))
        self.samples.append((now_s, self._values(counters)))

    def rates(self, now_s: float, counters: Mapping[str, int]) -> dict[str, float]:
        """Compute every counter's growth per second; 0 before the first sample and after a counter began anew."""
        base = next((each for each in self.samples if each[0] >= now_s - WINDOW_S), None)
        if base is None and self.samples:
            base = self.samples[-1]
        if base is None or now_s <= base[0]:
            return dict.fromkeys(self.names, 0.0)
        values = self._values(counters)
        return {
            name: max(0, value - before) / (now_s - base[0])
            for name, value, before in zip(self.names, values, base[1], strict=True)
        }

    def _values(self, counters: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(counters.get(name, 0) for name in self.names)


class Meters:
    """A meter per thing, for the things that are there."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._meters: dict[str, Meter] = {}

    def sample(self, now_s: float, counters: Mapping[str, Mapping[str, int]]) -> None:
        """Take note of everything; what is not there any more is forgotten."""
        self._meters = {name: self._meters.get(name) or Meter(self._names) for name in counters}
        for name, each in counters.items():
            self._meters[name].sample(now_s, each)

    def rates(self, now_s: float, name: str, counters: Mapping[str, int]) -> dict[str, float]:
        """Compute the growth per second of one thing's counters."""
        meter = self._meters.get(name)
        return meter.rates(now_s, counters) if meter else dict.fromkeys(self._names, 0.0)

    def history(self, name: str, counter: str) -> list[float]:
        """Return one rate per second, the newest last."""
        meter = self._meters.get(name)
        return list(meter.history.get(counter, ())) if meter else []
