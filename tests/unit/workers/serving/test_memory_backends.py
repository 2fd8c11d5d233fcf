"""Memory backends of a rollout engine: limits, handing memory over, and being chosen by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollfab.fabric.contract.errors import ConfigError, EngineError, EngineUnsupported
from rollfab.fabric.rules.serving.facts import ServingState
from rollfab.workers.engines.base import EngineLimits, EngineStats
from rollfab.workers.serving.device.bounds import Bounds
from rollfab.workers.serving.device.memory import (
    HOLD,
    KvBudget,
    KvRelease,
    StaticPartition,
    open_backend,
)
from rollfab.workers.serving.device.memory_options import MemoryOptions
from tests.support.queue.played_worker import PlayedEngine

SERVING = ServingState(seen_at_s=0.0, kv_capacity_tokens=1000)


class LimitedEngine(PlayedEngine):
    """Remembers the limits that it was given, and how much of its cache the test says is used."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[EngineLimits] = []
        self.kv_used_fraction = 0.0

    def set_limits(self, limits: EngineLimits) -> None:
        self.limits.append(limits)

    def stats(self) -> EngineStats:
        return replace(super().stats(), kv_used_fraction=self.kv_used_fraction)


class ReleasingEngine(LimitedEngine):
    """Can unmap its cache, unless `error` says why not; says in which order it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.error: EngineError | None = None

    async def pause(self, reason: str) -> None:
        self.calls.append(f"pause {reason}")
        await super().pause(reason)

    async def resume(self, reason: str) -> None:
        self.calls.append(f"resume {reason}")
        await super().resume(reason)

    async def release_kv(self) -> float:
        if self.error is not None:
            raise self.error
        self.calls.append("release")
        return 0.1

    async def take_kv(self) -> float:
        self.calls.append("take")
        return 0.2


def static(engine: Any, capacity_tokens: int = 8000) -> StaticPartition:
    return StaticPartition(engine, Bounds(engine), capacity_tokens)


def test_who_changes_one_limit_keeps_what_others_said() -> None:
    engine = LimitedEngine()
    bounds = Bounds(engine)  # type: ignore[arg-type]
    bounds.set(step_tokens=16)
    bounds.set(kv_tokens=100)
    bounds.set(kv_tokens=100)
    bounds.set(step_tokens=None)
    assert engine.limits == [
        EngineLimits(step_tokens=16),
        EngineLimits(step_tokens=16, kv_tokens=100),
        EngineLimits(kv_tokens=100),
    ]


async def test_a_static_partition_bounds_what_is_let_in_and_gives_nothing_back() -> None:
    engine = LimitedEngine()
    engine.kv_used_fraction = 0.25
    backend = static(engine)
    backend.limit(500)
    assert (engine.limits, backend.used_tokens()) == ([EngineLimits(kv_tokens=500)], 2000)
    for change in (backend.give_back, backend.take_again):
        with pytest.raises(EngineUnsupported, match="played 1 keeps the cache that it was built with"):
            await change()


async def test_a_cache_is_released_behind_a_pause_that_lasts_until_it_is_taken_again() -> None:
    engine = ReleasingEngine()
    backend = KvRelease(engine, Bounds(engine), 8000)  # type: ignore[arg-type]
    assert (await backend.give_back(), engine.pauses) == (0.1, {HOLD})
    assert (await backend.take_again(), engine.pauses) == (0.2, set())
    assert engine.calls == [f"pause {HOLD}", "release", "take", f"resume {HOLD}"]


async def test_an_engine_that_cannot_release_its_cache_here_goes_on() -> None:
    engine = ReleasingEngine()
    engine.error = EngineUnsupported("started without sleep mode: add -- --enable-sleep-mode")
    with pytest.raises(EngineUnsupported):
        await KvRelease(engine, Bounds(engine), 8000).give_back()  # type: ignore[arg-type]
    assert engine.pauses == set()
    # but where it is not known what became of its memory, it makes no step
    engine.error = EngineError("the worker process is gone")
    with pytest.raises(EngineError):
        await KvRelease(engine, Bounds(engine), 8000).give_back()  # type: ignore[arg-type]
    assert engine.pauses == {HOLD}


def test_a_backend_is_chosen_by_name_and_what_cannot_work_says_why() -> None:
    def choose(name: str | None, engine: Any) -> Any:
        return open_backend(MemoryOptions(backend=name), engine, Bounds(engine), capacity_tokens=100)

    assert choose("static", LimitedEngine()).name == choose(None, LimitedEngine()).name == "static"
    assert choose("release", ReleasingEngine()).name == "release"
    with pytest.raises(ConfigError, match="played 1 cannot give back its KV cache alone"):
        choose("release", LimitedEngine())
    with pytest.raises(ConfigError, match="did you mean static"):
        choose("elastic", LimitedEngine())


def test_a_budget_is_followed_and_an_engine_without_one_is_left_alone() -> None:
    # Given rollouts that hold half of their cache beside an engine that needs little
    engine = LimitedEngine()
    engine.kv_used_fraction = 0.5
    budget = KvBudget(static(engine))
    assert (budget.look(0.0, SERVING, None), budget.reason, engine.limits) == (None, "", [])
    # When its need grows, then they may hold half of that at once
    assert budget.look(1.0, replace(SERVING, kv_used_tokens=900), None) == 2000
    assert engine.limits == [EngineLimits(kv_tokens=2000)]
    # When there has been slack for long, then nothing bounds them any more
    seen = [budget.look(2.0 + tick / 10, SERVING, None) for tick in range(100)]
    assert None not in seen[:30]
    assert (seen[-1], engine.limits[-1]) == (None, EngineLimits())
    # but what their team allows
    assert budget.look(20.0, SERVING, 0.125) == 1000


async def test_memory_that_is_away_is_left_alone_and_comes_back_with_the_budget_of_that_moment() -> None:
    # Given a cache that was given back
    engine = ReleasingEngine()
    budget = KvBudget(KvRelease(engine, Bounds(engine), 8000))  # type: ignore[arg-type]
    budget.look(0.0, SERVING, None)
    assert await budget.give_back() == 0.1

    # When the serving engine needs more meanwhile, then nothing is let in, and nobody touches the engine
    assert budget.look(1.0, SERVING, None) == 0
    assert budget.look(2.0, replace(SERVING, kv_used_tokens=990), None) == 0
    assert engine.limits == []

    # Then it comes back with what is left to it
    assert await budget.take_again() == 0.2
    assert engine.limits == [EngineLimits(kv_tokens=0)]
    assert budget.look(2.1, SERVING, None) == 0
    assert budget.look(3.5, SERVING, None) > 0  # type: ignore[operator]


async def test_a_refusal_changes_nothing_and_a_failure_lets_nothing_in_until_the_memory_is_back() -> None:
    engine = ReleasingEngine()
    budget = KvBudget(KvRelease(engine, Bounds(engine), 8000))  # type: ignore[arg-type]
    engine.error = EngineUnsupported("started without sleep mode")
    with pytest.raises(EngineUnsupported):
        await budget.give_back()
    assert budget.look(0.0, SERVING, None) is None
    engine.error = EngineError("the worker process is gone")
    with pytest.raises(EngineError):
        await budget.give_back()
    assert budget.look(1.0, SERVING, None) == 0
    await budget.take_again()
    assert budget.look(2.0, SERVING, None) is None
