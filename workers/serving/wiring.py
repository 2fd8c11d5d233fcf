"""What a serving worker has beside its engine and its loop, from a probe's address to reports of what sharing costs.

- The guard is the engine's own and needs nothing of this: were all here to stand still, it would go on deciding, and
  soon lend nothing more. What it is told, many times a second: whether there is a lease that the serving team allows,
  and its caps.
- A URL is scraped into a page of our own, so that the guard reads a page in any case.
- The KV budget is looked at here, as often.
- It is the only worker beside its serving engine, or there is none (holder.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import EngineError, EngineUnsupported
from ...fabric.contract.records import Lease
from ...fabric.contract.sharing import GuardView
from ...fabric.ports.queue import LeaseBoard
from ...fabric.rules.lending.terms import LendTerms
from ...fabric.rules.serving.guard import GuardRule
from ..engines.base import Engine
from ..rollout.lease import UNREAD
from .device.bounds import Bounds
from .device.memory import KvBudget, check_backend, open_backend
from .device.priority import children_of, device_environment, lower, lower_engine_thread, lower_front, session_note
from .guarding.guard import GuardConfig, GuardOrders, GuardPort
from .guarding.thread import GuardThread
from .holder import ProbeHold, memory_directory
from .options import ServingOptions
from .probes.reader import ProbeReader
from .probes.scrape import MetricsProbe
from .reports import SharingSender, blank_report

log = logging.getLogger(__name__)

LOOK_S = 0.05
ORDER_S = 0.5  # an order that is not said again holds no longer: this process may have been frozen
WAIT_S = 0.2
SCRAPED_STALE_S = 0.6  # scrapes are 0.1 s apart and may take as long again; two that fail count as stale at once
ENGINE_THREAD = "rollfab-engine"  # of an engine that runs in this process


@runtime_checkable
class Guarded(Protocol):
    """Of an engine, the guard in front of its steps; None: it was started without."""

    @property
    def guard(self) -> GuardPort | None: ...


class Leased(Protocol):
    """What decides whether a worker's engine may compute: of its LeaseKeeper."""

    @property
    def lease(self) -> Lease | None: ...
    @property
    def terms(self) -> LendTerms | None: ...


class Sharing:
    """One serving worker's part in sharing its device."""

    def __init__(self, options: ServingOptions, clock: Clock) -> None:
        """Raises ConfigError: another worker is beside that serving engine; there is no place for a page of our own."""
        assert options.probe is not None
        self._hold = ProbeHold(options.probe)
        self._options = options
        self._clock = clock
        self._scraper: MetricsProbe | None = None
        if options.is_scraped:
            self._page = memory_directory() / f"rollfab-metrics-{os.getpid()}"
            self._scraper = MetricsProbe(options.probe, self._page)
        else:
            self._page = Path(options.probe)
        self._reader = ProbeReader(self._page, owner_uid=options.probe_owner_uid)
        self._engine: Engine | None = None
        self._guard: GuardPort | None = None
        self._budget: KvBudget | None = None
        self._kv_tokens_max: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What must be in the environment before the engine's device is first used."""
        return device_environment(self._priority)

    @property
    def _priority(self) -> str:
        return self._options.priority or "yield"

    @property
    def config(self) -> GuardConfig:
        """Of the engine's guard."""
        slo = self._options.slo
        rule = GuardRule(stale_s=SCRAPED_STALE_S) if self._scraper is not None else GuardRule()
        name = "metrics" if self._scraper is not None else "vllm"
        return GuardConfig(
            probe=str(self._page),
            probe_name=name,
            probe_owner_uid=self._options.probe_owner_uid,
            slo_ttft_ms=slo.ttft_ms,
            slo_tpot_ms=slo.tpot_ms,
            rule=rule,
            yields=self._priority == "yield",
        )

    @property
    def memory(self) -> KvBudget | None:
        """The engine's KV memory, where it can be given back; None: it cannot, or the engine has not started."""
        return self._budget if self._budget is not None and self._budget.backend.can_give_back else None

    def check(self, engine: Engine) -> None:
        """Before the engine is started. Raises ConfigError: the memory backend cannot work with it."""
        check_backend(self._options.memory, engine)

    def trouble(self) -> str:
        """Why the serving engine is not seen now, and what to do; "" if it is."""
        found = self._reader.trouble(self._clock.now_s())
        if found and self._scraper is not None:
            return (
                f"no metrics of vLLM at {self._options.probe} ({self._scraper.failure}): start that server, or name the"
                " one that there is with --probe"
            )
        return found

    def seen(self) -> str:
        """What the probe shows, for people."""
        return f"it sees {self._reader.engine()} by {self._options.probe} (process {self._reader.writer_pid()})"

    async def wait(self, stop: asyncio.Event, say: Callable[[str], None]) -> None:
        """Until the serving engine is seen, or `stop`. Says what is waited for and what to do, when that changes."""
        said = ""
        while not stop.is_set() and (trouble := self.trouble()):
            if trouble != said:
                said = trouble
                say(f"waiting for the serving engine: {trouble}")
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await stop.wait()

    def attach(self, engine: Engine, capacity_tokens: int) -> Callable[[], GuardView | None]:
        """The engine has started: lower its priority, and bound its memory; returns what tells of its guard.

        capacity_tokens: of its KV cache, where it does not say so itself.

        Raises:
            ConfigError: see `check`.
            EngineUnsupported: it has no guard.
        """
        guard = engine.guard if isinstance(engine, Guarded) else None
        if guard is None:
            raise EngineUnsupported(f"{engine.name} has no guard: beside a serving engine it may not run")
        self._engine, self._guard = engine, guard
        capacity_tokens = engine.stats().kv_capacity_tokens or capacity_tokens
        backend = open_backend(self._options.memory, engine, Bounds(engine), capacity_tokens=capacity_tokens)
        self._budget = KvBudget(backend)
        self._lower(is_here=isinstance(guard, GuardThread))
        return self.view

    def _lower(self, *, is_here: bool) -> None:
        """is_here: the engine runs in this process."""
        if is_here:
            how = "idle" if self._priority == "yield" else self._priority  # it has no thread that could give way
            note = lower_engine_thread(ENGINE_THREAD, how)
        else:
            note = lower(children_of([os.getpid()]), self._priority)
        front = lower_front(ENGINE_THREAD if is_here else None) if self._priority != "normal" else None
        for said in (note, front, session_note(self._reader.writer_pid())):
            if said:
                log.info("worker.priority", extra={"note": said})

    def view(self) -> GuardView | None:
        """What the guard sees and does, with the KV budget; None: the engine has not started."""
        if self._guard is None:
            return None
        view = self._guard.view()
        reason = (
            f"observing only, as it was started; else: {view.reason}" if self._options.is_observing else view.reason
        )
        trouble = self.trouble() or None
        return dataclasses.replace(view, reason=reason, kv_tokens_max=self._kv_tokens_max, probe_trouble=trouble)

    @asynccontextmanager
    async def following(self, keeper: Leased, worker_id: str, board: LeaseBoard) -> AsyncIterator[None]:
        """Tell the guard what the worker may do, and the broker what came of it, while the block runs."""
        engine, guard = self._engine, self._guard
        assert engine is not None and guard is not None, "attach comes first"
        sender = SharingSender(
            board,
            blank_report(worker_id, self._options.slo),
            self._clock,
            measured=guard.sharing,
            token_count=lambda: engine.stats().token_count,
        )
        tasks = [asyncio.create_task(self._follow(guard, keeper)), asyncio.create_task(sender.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(EngineError):
                guard.order(GuardOrders())

    def close(self) -> None:
        """Scrape no more, and let another worker be beside the serving engine."""
        if self._scraper is not None:
            self._scraper.close()
        self._hold.close()

    async def _follow(self, guard: GuardPort, keeper: Leased) -> None:
        while True:
            try:
                self._order(guard, keeper)
            except EngineError as error:  # the worker finds out for itself
                log.debug("guard.not_ordered", extra={"error": str(error)})
            except Exception:  # without orders nothing is lent: a fault of one look must not be the end of all
                log.exception("guard.not_ordered")
            await self._clock.sleep(LOOK_S)

    def _order(self, guard: GuardPort, keeper: Leased) -> None:
        terms = keeper.terms
        is_lent = keeper.lease is not None and (terms is None or terms.may_lend) and not self._options.is_observing
        cap = terms.compute_fraction_max if terms is not None else None
        until_s = self._clock.now_s() + ORDER_S
        guard.order(GuardOrders(is_lent=is_lent, until_s=until_s, compute_fraction_max=cap))
        self._look_at_memory(terms.memory_fraction_max if terms is not None else None)

    def _look_at_memory(self, memory_fraction_max: float | None) -> None:
        assert self._budget is not None
        now = self._clock.now_s()
        self._kv_tokens_max = self._budget.look(now, self._reader.read(now), memory_fraction_max)


async def announce(
    worker_id: str, options: ServingOptions, keeper: Leased, sharing: Sharing | None, say: Callable[[str], None]
) -> None:
    """Say that a serving worker is ready, how it is lent and what it sees, and again when that changes; for ever."""
    said = ""
    while True:
        text = _announcement(worker_id, options, keeper.terms, sharing)
        if text and text != said:
            said = text
            say(text)
        await asyncio.sleep(WAIT_S)


def _announcement(worker_id: str, options: ServingOptions, terms: LendTerms | None, sharing: Sharing | None) -> str:
    """ "": its team's word has not been read yet."""
    if terms is None or terms is UNREAD:
        return ""
    who = f"{worker_id} in pool {options.pool}" if options.pool else f"{worker_id}, in no pool"
    if sharing is not None and (trouble := sharing.trouble()):
        return f"serving worker {who}: waiting for the serving engine, nothing is lent: {trouble}"
    if options.is_observing:
        how = "observing only, as it was started (--observe)"
    elif terms.mode == "on":
        how = f"lent ({terms.reason})"
    else:
        how = f"{'observing only' if terms.mode == 'observe' else 'taken back'} ({terms.reason})"
    sees = sharing.seen() if sharing is not None else "it has no --probe, so it shares its device with none"
    return f"serving worker {who}: ready, {how}; {sees}"
