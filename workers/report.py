"""What a rollout worker says of itself with every heartbeat.

- The engine, the lease and the weights tell; this puts it into one record.
- How much of recent prompts was found in the prefix cache: of the last WINDOW_S to twice that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..fabric.clock import Clock
from ..fabric.records import WorkerInfo
from .activation import Activation
from .engines.base import Engine, EngineStats

if TYPE_CHECKING:
    from .rollout import RolloutConfig
    from .weights import WeightReceiver

WINDOW_S = 30.0


class WorkerReport:
    """Makes one worker's WorkerInfo."""

    def __init__(
        self,
        engine: Engine,
        config: RolloutConfig,
        clock: Clock,
        *,
        activation: Activation,
        headroom: Callable[[], float | None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._activation = activation
        self._headroom = headroom
        self._hits = PrefixHits(clock)

    def info(
        self,
        *,
        run_id: str | None,
        active_version: int,
        running_count: int,
        trouble: str | None,
        receiver: WeightReceiver | None,
    ) -> WorkerInfo:
        """Now. trouble: why no turns are taken. receiver: of the run's weights.

        Raises:
            EngineError: the engine is gone.
        """
        stats, activation = self._engine.stats(), self._activation
        commit = receiver.last if receiver is not None else None
        if trouble:
            state = "failed"
        elif activation.is_asleep:
            state = "asleep"
        else:
            state = "ready" if active_version >= 0 else "loading"
        return WorkerInfo(
            worker_id=self._config.worker_id,
            role=self._config.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            model=self._config.model,
            slot_count=self._config.slot_count,
            running_count=running_count,
            run_id=run_id,
            active_version=active_version,
            token_count=stats.token_count,
            headroom_fraction=self._headroom(),
            state=state,
            error=trouble,
            engine=self._engine.name,
            prefix_hit_fraction=self._hits.look(stats),
            wake_ms=activation.wake_ms,
            sleep_ms=activation.sleep_ms,
            sleep_note=activation.sleep_note,
            head_version=receiver.head_version if receiver is not None else -1,
            stage_ms=round(1000 * commit.stage_s) if commit is not None else None,
            pause_ms=round(1000 * commit.pause_s, 2) if commit is not None else None,
            payload_bytes=commit.payload_bytes if commit is not None else None,
            weights_note=receiver.note if receiver is not None else None,
        )


class PrefixHits:
    """Prompt tokens of late, and how many of them the prefix cache had."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = self._next = (0, 0)  # counts as this window began, and as the next one will have begun
        self._turned_at_s = clock.now_s()

    def look(self, stats: EngineStats) -> float | None:
        """The fraction, [0, 1]; None while there were no prompts."""
        now, counts = self._clock.now_s(), (stats.prompt_token_count, stats.cached_token_count)
        if now - self._turned_at_s >= WINDOW_S:
            self._since, self._next, self._turned_at_s = self._next, counts, now
        prompt_count, cached_count = counts[0] - self._since[0], counts[1] - self._since[1]
        return round(min(1.0, cached_count / prompt_count), 4) if prompt_count > 0 else None
