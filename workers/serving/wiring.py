"""Connects a serving worker's engine and loop with its serving engine: from a probe's address to reports of the cost.

- The guard is the engine's own and needs nothing of this: if all here stood still, it would go on deciding, and soon
  lend nothing more. Many times a second it is told whether there is a lease that the serving team allows, and the
  team's caps.
- A URL is scraped into a page of our own, so that the guard reads a page in any case.
- The KV budget is looked at here, as often.
- A worker is the only one beside its serving engine (ProbeHold).
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, ConfigError, EngineError, EngineUnsupported
from ...fabric.contract.records import Lease
from ...fabric.contract.sharing import GuardView, SharingReport
from ...fabric.host.helpers import Helpers
from ...fabric.ports.queue import LeaseBoard
from ...fabric.rules.lending.terms import LendTerms
from ...fabric.rules.serving.facts import Slo
from ...fabric.rules.serving.guard import GuardRule
from ..engines.base import Engine
from ..rollout.lease import UNREAD
from .device.bounds import Bounds
from .device.memory import KvBudget, check_backend, open_backend
from .device.mps import check_serving, mps_environment
from .device.priority import children_of, lower, lower_engine_thread, lower_front, session_note
from .guarding.guard import GuardConfig, GuardOrders, GuardPort
from .guarding.thread import GuardThread
from .options import ServingOptions
from .probes.reader import ProbeReader
from .probes.scrape import MetricsProbe, target_of

log = logging.getLogger(__name__)

LOOK_S = 0.05
ORDER_S = 0.5  # an order that is not said again holds no longer: this process may have been frozen
WAIT_S = 0.2
SCRAPED_STALE_S = 0.6  # scrapes are 0.1 s apart and may take as long again; two that fail count as stale at once
ENGINE_THREAD = "rollfab-engine"  # of an engine that runs in this process


@runtime_checkable
class Guarded(Protocol):
    """An engine whose steps may have a guard; None: it was started without one."""

    @property
    def guard(self) -> GuardPort | None: ...


class Leased(Protocol):
    """A LeaseKeeper's knowledge of whether its worker's engine may compute."""

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
    def environment(self) -> dict[str, str | None]:
        """The variables that must be set before the engine's device is first used; None: must not be set."""
        return mps_environment(self._options.mps, is_lowered=self._priority != "normal")

    @property
    def _priority(self) -> str:
        return self._options.priority or "yield"

    @property
    def config(self) -> GuardConfig:
        """The settings of the engine's guard."""
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
            is_mps_client=self._options.mps.is_asked,
        )

    @property
    def memory(self) -> KvBudget | None:
        """The engine's KV memory, where it can be given back; None: it cannot, or the engine has not started."""
        return self._budget if self._budget is not None and self._budget.backend.can_give_back else None

    def check(self, engine: Engine) -> None:
        """Refuse, before its start, an engine that the memory backend cannot work with. Raises ConfigError."""
        check_backend(self._options.memory, engine)

    def trouble(self) -> str:
        """Say why the serving engine is not seen now, and what to do; "" if it is seen."""
        found = self._reader.trouble(self._clock.now_s())
        if found and self._scraper is not None:
            return (
                f"no metrics of vLLM at {self._options.probe} ({self._scraper.failure}): start that server, or name the"
                " one that there is with --probe"
            )
        return found

    def seen(self) -> str:
        """Say what the probe shows, for people."""
        return f"it sees {self._reader.engine()} by {self._options.probe} (process {self._reader.writer_pid()})"

    async def wait(self, stop: asyncio.Event, say: Callable[[str], None]) -> None:
        """Wait until the serving engine is seen, or `stop`. Says what is waited for and what to do, when that changes.

        Raises:
            ConfigError: MPS was asked for, and the serving engine is not under it.
        """
        said = ""
        while not stop.is_set() and (trouble := self.trouble()):
            if trouble != said:
                said = trouble
                say(f"waiting for the serving engine: {trouble}")
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await stop.wait()
        if self._options.mps.is_asked and not stop.is_set():
            serving_pid = None if self._scraper is not None else self._reader.writer_pid()
            say(await asyncio.to_thread(check_serving, serving_pid))

    def attach(self, engine: Engine, capacity_tokens: int) -> Callable[[], GuardView | None]:
        """Lower the priority of an engine that has started, and bound its memory; returns `view`.

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
        """Lower the engine and the front end, and log what came of it. is_here: the engine runs in this process."""
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
        """Return what the guard sees and does, with the KV budget; None: the engine has not started."""
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
        try:
            async with Helpers(self._follow(guard, keeper), sender.run()):
                yield
        finally:
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
    """Say how the worker is lent and what it sees; "" while its team's word has not been read."""
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


# ---------------------------------------------------------------- reports
#
# Reports to the broker of what sharing a device cost and gave: the serving team decides on them.
#
# - The guard measures; this adds who it is and how many tokens the worker made.
# - A report that cannot be sent is dropped: the next one holds all of it again.


SEND_S = 5.0
FIELDS = {each.name for each in dataclasses.fields(SharingReport)}


class SharingSender:
    """Sends one worker's reports."""

    def __init__(
        self,
        board: LeaseBoard,
        blank: SharingReport,
        clock: Clock,
        *,
        measured: Callable[[], Mapping[str, Any] | None],
        token_count: Callable[[], int],
    ) -> None:
        """
        Args:
            blank: whose report it is.
            measured: fields of it, by the guard; None: there is none yet.
            token_count: of rollouts, since the engine's start.
        """
        self._board = board
        self._blank = blank
        self._clock = clock
        self._measured = measured
        self._token_count = token_count

    async def run(self) -> None:
        """Send a report every SEND_S, for ever."""
        while True:
            await self._clock.sleep(SEND_S)
            await self.send()

    async def send(self) -> None:
        """Send one report; what cannot be sent is dropped."""
        try:
            await self._board.set_sharing(self.report())
        except BrokerError as error:
            log.warning("sharing.not_sent", extra={"error": str(error)})

    def report(self) -> SharingReport:
        measured = {name: value for name, value in (self._measured() or {}).items() if name in FIELDS}
        return dataclasses.replace(self._blank, **{**measured, "token_count": self._token_count()})


def blank_report(worker_id: str, slo: Slo) -> SharingReport:
    """Make a report in which nothing is measured yet."""
    return SharingReport(worker_id=worker_id, ttft_slo_ms=slo.ttft_ms, tpot_slo_ms=slo.tpot_ms)


# ---------------------------------------------------------------- holder
#
# One worker beside one serving engine: each would use up the slack that the other one counts on.
#
# - An advisory lock (flock) on a file of its own, held for as long as the process lives: `kill -9` lets go of it.
# - Not on the page itself: that is another file after each start of the serving engine, and none before the first.
# - The file stays, with its last holder's process id: were it removed, two workers could hold the locks of two files.
# - A forked engine has no part in it: left over by a killed worker, it gets no orders and computes nothing.
# - An engine is known by its page's real path, or its URL's host, port and path: two names of one host count as two.


MEMORY = Path("/dev/shm")


def memory_directory() -> Path:
    """Return the directory in memory, which a restart of the machine empties; else the temporary one."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


def lock_path_of(probe: str) -> Path:
    """Return the path of the lock for a page or a server's URL. Raises ConfigError: it is no such URL."""
    if "://" not in probe:
        return Path(os.path.realpath(probe) + ".lock")
    target = target_of(probe)
    name = hashlib.sha256(f"{target.host}:{target.port}{target.path}".encode()).hexdigest()[:16]
    return memory_directory() / f"rollfab-probe-{name}.lock"


class ProbeHold:
    """Makes this process the one worker that sees by a probe."""

    def __init__(self, probe: str) -> None:
        """Raises ConfigError: another process is that worker, or there is no place for a lock."""
        path = lock_path_of(probe)
        try:
            self._handle: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"--probe {probe}: its lock {path} cannot be opened ({error.strerror}). Name a page in a directory that"
                " this process may write; where another user's worker has left the lock there, remove it",
                path=str(path),
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            raise ConfigError(
                f"--probe {probe}: process {holder} is the worker beside this serving engine (it holds {path})."
                " Two would each use up its slack: end that one first, or give this one the probe of another engine",
                path=str(path),
                pid=holder,
            ) from error
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        os.register_at_fork(after_in_child=self._forget)

    def close(self) -> None:
        """Release the lock, so that another worker may take it."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _forget(self) -> None:
        """Close the lock in a forked child: it is the parent's."""
        with suppress(OSError):
            self.close()
