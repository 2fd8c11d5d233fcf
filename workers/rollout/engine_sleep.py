"""The readiness of an engine: its worker gives it work only while it is awake and has its KV memory.

- The engine sleeps once it has had no lease for `sleep_after_s`, if that was asked for. Its KV memory goes back after
  MEMORY_AFTER_S without a lease, if the worker's memory backend can hand it over (serving/device/memory.py).
- Both changes follow fabric/rules/queue/engine_sleep.py: never while a turn runs, and undone with the next lease,
  before a turn is claimed. A change that fails keeps turns away, says why, and is tried again ever more rarely.
- The two never change at once: an engine wakes before its memory is taken again, and while it sleeps its memory stays
  as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import EngineError, EngineTimeout, EngineUnsupported
from ...fabric.host.helpers import end_all
from ...fabric.rules.queue.engine_sleep import ActivationFacts, ActivationRule, Move, Rest, decide

MEMORY_AFTER_S = 2.0  # a lease that flickers, or a switch pressed twice, unmaps nothing


class GivesBack(Protocol):
    """KV memory that can be handed over while nothing runs.

    Both methods return the seconds they took. Raise EngineUnsupported (nothing has changed), EngineError.
    """

    async def give_back(self) -> float: ...
    async def take_again(self) -> float: ...


class _Memory:
    """Makes an engine's KV memory look like an engine that sleeps and wakes."""

    def __init__(self, memory: GivesBack) -> None:
        self.sleep = memory.give_back
        self.wake = memory.take_again


class Readiness:
    """The readiness of one worker's engine."""

    def __init__(
        self,
        engine: Sleeps,
        clock: Clock,
        *,
        sleep_after_s: float | None = None,
        memory: GivesBack | None = None,
        changed: Callable[[], None],
    ) -> None:
        """changed: called when a change begins and when it has ended. memory: None if it is never given back."""
        self._engine = Activation(engine, ActivationRule(sleep_after_s=sleep_after_s), clock, changed=changed)
        self._parts = [self._engine]
        self._memory: Activation | None = None
        if memory is not None:
            words = SleepWords(
                noun="kv_memory",
                not_asleep="the engine's KV memory was not given back",
                not_awake="the engine did not get its KV memory again",
            )
            rule = ActivationRule(sleep_after_s=MEMORY_AFTER_S)
            self._memory = Activation(_Memory(memory), rule, clock, changed=changed, words=words)
            self._parts.append(self._memory)

    @property
    def is_awake(self) -> bool:
        """True if the engine may be given work."""
        return all(part.is_awake for part in self._parts)

    @property
    def is_asleep(self) -> bool:
        """True if the engine sleeps, or its memory is away, or either is about to be so."""
        return any(part.is_asleep for part in self._parts)

    @property
    def sleep_ms(self) -> int | None:
        """The time that the engine and its memory last took to go to rest, in sum; None: neither ever did."""
        return _sum(part.sleep_ms for part in self._parts)

    @property
    def wake_ms(self) -> int | None:
        """The time that the engine and its memory last took to wake, in sum; None: neither ever did."""
        return _sum(part.wake_ms for part in self._parts)

    @property
    def sleep_note(self) -> str | None:
        """Why the engine cannot sleep, or not give its memory back; None: it can, or was never asked to."""
        return "; ".join(part.sleep_note for part in self._parts if part.sleep_note is not None) or None

    @property
    def error(self) -> str | None:
        """Why the engine or its memory is neither awake nor asleep; None: both are one or the other."""
        return next((part.error for part in self._parts if part.error is not None), None)

    def follow(self, *, has_lease: bool, is_in_use: bool) -> None:
        """Begin a change, if one is due; never blocks."""
        is_busy = self._memory is not None and not self._memory.is_settled
        self._engine.follow(has_lease=has_lease, is_in_use=is_in_use or is_busy)
        if self._memory is not None and self._engine.is_awake:
            self._memory.follow(has_lease=has_lease, is_in_use=is_in_use)

    async def close(self) -> None:
        """Wait for no change any more."""
        for part in self._parts:
            await part.close()


def _sum(parts: Iterable[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


# ---------------------------------------------------------------- engine sleep
#
# Puts a worker's engine, or its KV memory alone, to rest, and wakes it, as fabric/rules/queue/engine_sleep.py decides.
#
# - A change runs in a task of its own: the worker's loop, its heartbeats and its lease go on. A change has failed if it
#   is not answered within CHANGE_S.
# - While a change is under way the engine is not awake: see `is_awake`, which the worker asks before it does anything.
# - An engine that cannot sleep is asked only once. It stays awake, and `sleep_note` says why.


log = logging.getLogger(__name__)

CHANGE_S = 120.0  # an 8 B model was reported to take 10.6 s to sleep and 6.5 s to wake


class Sleeps(Protocol):
    """Can be put to rest: an engine (engines/base.py), or its memory. Both methods return the seconds they took."""

    async def sleep(self) -> float: ...
    async def wake(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepWords:
    """The words of logs and errors."""

    noun: str = "engine"
    not_asleep: str = "the engine did not fall asleep"
    not_awake: str = "the engine did not wake"


class Activation:
    """The sleep of one engine.

    Attributes:
        sleep_ms, wake_ms: how long the last change of its kind took; None: there was none.
        sleep_note: why the engine cannot sleep; None: it can, or was never asked to.
        error: why it is neither awake nor asleep; None: it is one of them.
    """

    def __init__(
        self,
        engine: Sleeps,
        rule: ActivationRule,
        clock: Clock,
        *,
        changed: Callable[[], None],
        words: SleepWords | None = None,
    ) -> None:
        """changed: called when a change begins and when it has ended."""
        self.sleep_ms: int | None = None
        self.wake_ms: int | None = None
        self.sleep_note: str | None = None
        self.error: str | None = None
        self._engine = engine
        self._rule = rule
        self._clock = clock
        self._changed = changed
        self._words = words or SleepWords()
        self._rest = Rest.AWAKE
        self._used_at_s = self._changed_at_s = clock.now_s()
        self._failure_count = 0
        self._move = Move.STAY
        self._task: asyncio.Task[None] | None = None

    @property
    def is_awake(self) -> bool:
        """True if the engine may be given work."""
        return self._rest is Rest.AWAKE and self._move is Move.STAY

    @property
    def is_asleep(self) -> bool:
        """True if the engine sleeps, or is falling asleep."""
        return self._move is Move.SLEEP or (self._rest is Rest.ASLEEP and self._move is Move.STAY)

    @property
    def is_settled(self) -> bool:
        """True if the engine is awake or asleep, and no change is under way."""
        return self._rest is not Rest.FAILED and self._move is Move.STAY

    def follow(self, *, has_lease: bool, is_in_use: bool) -> None:
        """Begin a change, if one is due; never blocks."""
        if self._task is not None:
            if not self._task.done():
                return
            self._task.result()
            self._task = None
        now = self._clock.now_s()
        if has_lease or is_in_use:
            self._used_at_s = now
        facts = ActivationFacts(
            rest=self._rest,
            has_lease=has_lease,
            is_in_use=is_in_use,
            idle_s=now - self._used_at_s,
            can_sleep=self.sleep_note is None,
            failure_count=self._failure_count,
            quiet_s=now - self._changed_at_s,
        )
        self._move = decide(facts, self._rule)
        if self._move is not Move.STAY:
            self._task = asyncio.create_task(self._change(self._move), name=f"{self._words.noun} {self._move.value}")
            self._changed()

    async def close(self) -> None:
        """Wait for no change any more."""
        if self._task is not None:
            await end_all([self._task])

    async def _change(self, move: Move) -> None:
        try:
            await (self._fall_asleep() if move is Move.SLEEP else self._wake_up())
        except EngineError as error:
            self._rest, self._failure_count = Rest.FAILED, self._failure_count + 1
            what = self._words.not_asleep if move is Move.SLEEP else self._words.not_awake
            self.error = f"{what}: {error}"
            log.warning(
                f"{self._words.noun}.not_activated", extra={"error": self.error, "failure_count": self._failure_count}
            )
        self._move, self._changed_at_s = Move.STAY, self._clock.now_s()
        self._changed()

    async def _fall_asleep(self) -> None:
        try:
            self.sleep_ms = await _timed(self._engine.sleep())
        except EngineUnsupported as error:
            self.sleep_note = str(error)
            log.info(f"{self._words.noun}.cannot_sleep", extra={"note": self.sleep_note})
            return
        self._rest = Rest.ASLEEP
        log.info(f"{self._words.noun}.asleep", extra={"sleep_ms": self.sleep_ms})

    async def _wake_up(self) -> None:
        self.wake_ms = await _timed(self._engine.wake())
        self._rest, self._failure_count, self.error = Rest.AWAKE, 0, None
        self._used_at_s = self._clock.now_s()
        log.info(f"{self._words.noun}.awake", extra={"wake_ms": self.wake_ms})


async def _timed(change: Awaitable[float]) -> int:
    """Wait for a change; return the milliseconds that the engine says it took.

    Raises:
        EngineError: the change failed, or there was no answer within CHANGE_S.
    """
    try:
        async with asyncio.timeout(CHANGE_S):
            return round(1000 * await change)
    except TimeoutError as error:
        raise EngineTimeout(f"no answer within {CHANGE_S:g} s", timeout_s=CHANGE_S) from error
