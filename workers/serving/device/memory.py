"""The device memory of a rollout engine beside a serving engine: how it is bounded, given back and taken again.

- `limit` lets no turn begin beyond it, from the next step on. No backend takes memory of a turn that runs: where those
  come to hold more, some yield within a tenth of a second (rollout/yielding.py), with their tokens.
- "static": each engine has its own cache, sized at its start. A limit frees no memory for the serving engine; it bounds
  how much the rollouts compute and read beside it. Works with every engine.
- "release": a vLLM unmaps its whole KV cache, for minutes in which another process needs the memory. Unverified on a
  GPU.
- Memory is given back while nothing is lent, and taken again before a turn is claimed: rollout/engine_sleep.py says
  when. The budget is decided on meanwhile, and holds from when the memory is here again.
- Idle rollout weights go to host memory when the engine sleeps: rollout/engine_sleep.py, which also reports how long
  that took.
"""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

from ....fabric.contract.errors import ConfigError, EngineUnsupported
from ....fabric.rules.serving.facts import ServingState
from ....fabric.rules.serving.memory import MemoryFacts, MemoryRule, MemoryState, decide
from ...engines.base import Engine
from .bounds import Bounds
from .memory_options import MemoryOptions, check_memory_options

log = logging.getLogger(__name__)

HOLD = "memory"  # the reason for which the engine is paused


class MemoryBackend(Protocol):
    """The KV memory of one rollout engine.

    Attributes:
        name: how it is chosen. note: what it cannot do here, for people.
        can_give_back: it can hand its memory over while nothing runs, unless the engine refuses that here.
    """

    name: str
    note: str
    can_give_back: bool

    @property
    def capacity_tokens(self) -> int:
        """The most that it can hold."""
        ...

    def used_tokens(self) -> int:
        """Return the tokens of KV cache that the rollout engine holds now. Raises EngineError."""
        ...

    def limit(self, kv_tokens: int | None) -> None:
        """Bound what rollouts may hold when one begins; None: its capacity alone. May be repeated."""
        ...

    async def give_back(self) -> float:
        """Hand the memory over while nothing runs; returns seconds. Raises EngineUnsupported, EngineError."""
        ...

    async def take_again(self) -> float:
        """Take the memory back, so that the engine can generate; returns seconds. Raises as `give_back`."""
        ...


@runtime_checkable
class ReleasesKv(Protocol):
    """An engine that can unmap its KV cache and keep its weights, as vLLM 0.32 with sleep mode.

    Both return seconds. `release_kv` may be called while the engine is paused and nothing runs; `take_kv` leaves it as
    its pauses say. Raise EngineUnsupported, EngineError.
    """

    async def release_kv(self) -> float: ...
    async def take_kv(self) -> float: ...


class StaticPartition:
    """The cache that the engine was built with, bounded when requests are let in."""

    name = "static"
    can_give_back = False

    def __init__(self, engine: Engine, bounds: Bounds, capacity_tokens: int) -> None:
        self.note = "the cache was allocated when the engine started: a limit frees no memory"
        self.capacity_tokens = capacity_tokens
        self._engine = engine
        self._bounds = bounds

    def used_tokens(self) -> int:
        return round(self._engine.stats().kv_used_fraction * self.capacity_tokens)

    def limit(self, kv_tokens: int | None) -> None:
        self._bounds.set(kv_tokens=kv_tokens)

    async def give_back(self) -> float:
        raise EngineUnsupported(
            f"{self._engine.name} keeps the cache that it was built with: put it to sleep instead (--sleep-after), or"
            " choose the memory backend release"
        )

    async def take_again(self) -> float:
        return await self.give_back()


class KvRelease(StaticPartition):
    """A static partition all of which can be unmapped. Unverified on a GPU."""

    name = "release"
    can_give_back = True

    def __init__(self, engine: Engine, bounds: Bounds, capacity_tokens: int) -> None:
        super().__init__(engine, bounds, capacity_tokens)
        assert isinstance(engine, ReleasesKv), "check_backend comes first"
        self.note = "all of the cache is given back, or nothing"
        self._holder: ReleasesKv = engine

    async def give_back(self) -> float:
        """Unmap the whole cache; the engine stays paused until `take_again`.

        Give running turns back first: they would be computed again. An engine that cannot release its cache is resumed,
        and goes on as before.
        """
        await self._engine.pause(HOLD)
        try:
            return await self._holder.release_kv()
        except EngineUnsupported:
            await self._engine.resume(HOLD)
            raise

    async def take_again(self) -> float:
        taken_s = await self._holder.take_kv()
        await self._engine.resume(HOLD)
        return taken_s


def check_backend(options: MemoryOptions, engine: Engine) -> None:
    """Refuse a backend that is known not to work with this engine before it starts. Raises ConfigError."""
    check_memory_options(options)
    if options.backend == "release" and not isinstance(engine, ReleasesKv):
        raise ConfigError(
            f"memory backend release: {engine.name} cannot give back its KV cache alone. Use the engine vllm on a"
            " GPU with -- --enable-sleep-mode, or the memory backend static"
        )


def open_backend(options: MemoryOptions, engine: Engine, bounds: Bounds, *, capacity_tokens: int) -> MemoryBackend:
    """Open the backend that the options name.

    Raises:
        ConfigError: there is none of that name, or it cannot work here.
    """
    check_backend(options, engine)
    if options.backend == "release":
        return KvRelease(engine, bounds, capacity_tokens)
    return StaticPartition(engine, bounds, capacity_tokens)


class KvBudget:
    """Holds a backend to the budget that fabric/rules/serving/memory.py decides. Not thread safe: one caller looks.

    Attributes:
        reason: why rollouts may hold less than all; "": they may hold all.
    """

    def __init__(self, backend: MemoryBackend) -> None:
        self.backend = backend
        self._rule = MemoryRule()
        self._state = MemoryState()
        self._limited_to: int | None = None
        self._is_away = False

    @property
    def reason(self) -> str:
        return self._state.reason

    def look(self, now_s: float, serving: ServingState | None, memory_fraction_max: float | None) -> int | None:
        """Decide how many tokens rollouts may hold now (None: no bound), and hold the backend to it.

        Raises:
            EngineError: the engine is gone.
        """
        facts = MemoryFacts(
            now_s=now_s,
            serving_used=serving.kv_used_tokens if serving is not None else 0,
            serving_capacity=serving.kv_capacity_tokens if serving is not None else 0,
            rollout_capacity_tokens=self.backend.capacity_tokens,
            rollout_tokens=self.backend.used_tokens(),
            memory_fraction_max=memory_fraction_max,
        )
        before, self._state = self._state, decide(self._state, facts, self._rule)
        tokens: int | None = self._state.kv_tokens_max
        if tokens is not None and tokens >= self.backend.capacity_tokens:
            tokens = None
        self._hold_to(tokens, is_first=before.looked_at_s is None)
        if self._state.kv_tokens_max < before.kv_tokens_max:
            facts_told = {"kv_tokens_max": self._state.kv_tokens_max, "reason": self._state.reason}
            log.info("memory.cut", extra=facts_told)
        return 0 if self._is_away else tokens

    async def give_back(self) -> float:
        """Hand the memory over as MemoryBackend says; no request may be taken in until `take_again` has succeeded."""
        self._is_away = True
        try:
            return await self.backend.give_back()
        except EngineUnsupported:
            self._is_away = False
            raise

    async def take_again(self) -> float:
        """Take the memory back as MemoryBackend says, and bound it to what is allowed by now."""
        taken_s = await self.backend.take_again()
        self.backend.limit(self._limited_to)
        self._is_away = False
        return taken_s

    def _hold_to(self, tokens: int | None, *, is_first: bool) -> None:
        if not self._is_away and (tokens != self._limited_to or is_first):
            self.backend.limit(tokens)
        self._limited_to = tokens
