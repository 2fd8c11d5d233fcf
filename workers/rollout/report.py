"""The heartbeat's report on a rollout worker.

- WorkerReport puts the facts of the engine, the lease and the weights into one record.
- The prefix cache's hits are counted over the last WINDOW_S to twice that.
- Tokens a second are a mean of the last seconds, with older ones counting ever less, and only since turns began to run:
  a pause before them says nothing of their speed.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...fabric.contract.clock import Clock
from ...fabric.contract.fields import WHOLE_MAX
from ...fabric.contract.records import WorkerInfo
from ...fabric.contract.sharing import GuardView
from ...fabric.host.memory import HeldMemory, resident_bytes
from ..engines.base import Engine, EngineStats
from .config import RolloutConfig
from .engine_sleep import Readiness

if TYPE_CHECKING:
    from .weights import WeightReceiver

WINDOW_S = 30.0
SHUT_S = 0.5  # before a guard counts as shut
PACE_S = 5.0  # time constant of tokens a second

Guarded = Callable[[], GuardView | None]  # returns a guard's view and verdict of now; None: it is not up yet


class WorkerReport:
    """Makes one worker's WorkerInfo."""

    def __init__(
        self,
        engine: Engine,
        config: RolloutConfig,
        clock: Clock,
        *,
        readiness: Readiness,
        guard: Guarded | None = None,
        held: HeldMemory | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._readiness = readiness
        self._guard = guard
        self._held = held
        self._switch_ms: int | None = None
        self._hits = PrefixHits(clock)
        self._pace = TokenPace(clock)

    def info(
        self,
        *,
        run_id: str | None,
        active_version: int,
        running_count: int,
        trouble: str | None,
        receiver: WeightReceiver | None,
        guests: Mapping[str, int] = MappingProxyType({}),
        behind: str | None = None,
        is_stale: bool = False,
        speeds: tuple[int, int] = (0, 0),
    ) -> WorkerInfo:
        """Make the record of now.

        Args:
            trouble: why the worker is of no use.
            guests: its guests, and how they name the live weights.
            receiver: receives the run's weights.
            behind: why the weights are older than the head.
            is_stale: the weights are too old for turns.
            speeds: microseconds for a token read, and for one made; 0: not known.

        Raises:
            EngineError: the engine is gone.
        """
        stats, readiness = self._engine.stats(), self._readiness
        view = (self._guard() or GuardView()) if self._guard is not None else None
        commit = receiver.last if receiver is not None else None
        unseen = view.probe_trouble if view else None
        if receiver is not None and receiver.ready_s is not None:
            self._switch_ms = round(1000 * receiver.ready_s)
        error = trouble or unseen or (behind if is_stale else None)
        is_fetching = active_version < 0 and receiver is not None and receiver.head_version >= 0
        state = "loading" if is_fetching or not readiness.is_awake else "ready"
        if trouble or unseen or readiness.is_asleep:
            state = "failed" if trouble else "waiting" if unseen else "asleep"
        return WorkerInfo(
            worker_id=self._config.worker_id,
            role=self._config.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            model=self._config.model,
            model_digest=self._config.model_digest,
            waits_for=_waited_for(state, run_id, active_version, readiness),
            slot_count=0 if self._config.is_observing else self._config.slot_count,
            running_count=running_count,
            run_id=run_id,
            active_version=active_version,
            guest_versions=dict(guests),
            token_count=stats.token_count,
            state=state,
            error=error,
            engine=self._engine.name,
            cannot=sorted(self._engine.cannot),
            prefix_hit_fraction=self._hits.look(stats),
            wake_ms=readiness.wake_ms,
            sleep_ms=readiness.sleep_ms,
            sleep_note=readiness.sleep_note,
            switch_ms=self._switch_ms,
            head_version=receiver.head_version if receiver is not None else -1,
            stage_ms=round(1000 * commit.stage_s) if commit is not None else None,
            pause_ms=round(1000 * commit.pause_s, 2) if commit is not None else None,
            payload_bytes=commit.payload_bytes if commit is not None else None,
            weights_note=(behind if error is None else None) or (receiver.note if receiver is not None else None),
            pool=self._config.pool,
            tokens_per_s=self._pace.look(stats.token_count, running_count),
            **(_guard_facts(view) if view else {}),
            **self._device(*speeds),
        )

    def _device(self, prefill_us: int, decode_us: int) -> dict[str, Any]:
        found: dict[str, Any] = {"hardware": self._config.hardware, "prefill_us": prefill_us, "decode_us": decode_us}
        found["resident_bytes"] = resident_bytes()
        if self._held is not None:
            found |= {"resident_bytes": self._held.resident_bytes, "device_bytes": self._held.device_bytes}
        return found


def _waited_for(state: str, run_id: str | None, active_version: int, readiness: Readiness) -> str | None:
    """Say what a worker without trouble still needs before it can take a turn; None: nothing."""
    if active_version >= 0 or state == "failed":
        return None
    if state == "loading" and not readiness.is_awake:
        return "its engine to wake"
    return "a lease" if run_id is None else f"weights of run {run_id}"


def _guard_facts(view: GuardView) -> dict[str, Any]:
    return {
        "headroom_fraction": view.headroom_fraction,
        "load_fraction": view.load_fraction,
        "request_count": view.request_count,
        "guard_state": _guard_state(view),
        "guard_reason": view.reason,
        "open_fraction": view.open_fraction,
        "probe": view.probe,
        "step_error_fraction_p50": _rounded(view.step_error_p50),
        "step_error_fraction_p95": _rounded(view.step_error_p95),
    }


def _rounded(error: float | None) -> float | None:
    return None if error is None else round(min(error, WHOLE_MAX), 4)


def _guard_state(view: GuardView) -> str:
    """Report a guard as shut only after SHUT_S: one that shuts for a step or two opens many times a second."""
    is_brief = view.state == "shut" and bool(view.probe) and view.shut_s < SHUT_S
    return "narrow" if is_brief else view.state


class PrefixHits:
    """Measures how many of the recent prompt tokens the prefix cache had."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = self._next = (0, 0)  # counts at the start of this window, and of the next one
        self._turned_at_s = clock.now_s()

    def look(self, stats: EngineStats) -> float | None:
        """Take the engine's counts; return the fraction of hits, [0, 1], or None without prompts in the window."""
        now, counts = self._clock.now_s(), (stats.prompt_token_count, stats.cached_token_count)
        if now - self._turned_at_s >= WINDOW_S:
            self._since, self._next, self._turned_at_s = self._next, counts, now
        prompt_count, cached_count = counts[0] - self._since[0], counts[1] - self._since[1]
        return round(min(1.0, cached_count / prompt_count), 4) if prompt_count > 0 else None


class TokenPace:
    """Measures tokens a second over the last seconds, while turns run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s = clock.now_s()
        self._count = 0
        self._is_idle = True
        self._tokens = self._weight_s = 0.0  # made since turns began to run, and in how long; older ones count less

    def look(self, token_count: int, running_count: int) -> float | None:
        """Take the engine's token count since its start; return tokens a second.

        None: turns have only just begun to run. 0: no turns run.
        """
        now, was_idle, before = self._clock.now_s(), self._is_idle, self._count
        gap_s, self._at_s = now - self._at_s, now
        self._count, self._is_idle = token_count, running_count == 0
        if was_idle:
            self._tokens = self._weight_s = 0.0
        elif gap_s > 0:
            kept = math.exp(-gap_s / PACE_S)
            spent_s = PACE_S * (1 - kept)
            self._tokens = self._tokens * kept + max(0, token_count - before) / gap_s * spent_s
            self._weight_s = self._weight_s * kept + spent_s
        if not self._weight_s:
            return 0.0 if self._is_idle else None
        return round(self._tokens / self._weight_s, 2)
