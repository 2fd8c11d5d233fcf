"""What an engine must have before its worker gives it anything to do: it is awake, and has its KV memory.

- The engine sleeps once it has had no lease for `sleep_after_s`, if that was asked for. Its KV memory goes back after
  MEMORY_AFTER_S without one, where the worker's memory backend can hand it over (serving/device/memory.py).
- Both follow fabric/rules/queue/engine_sleep.py: never while a turn runs, again with the next lease and before a turn
  is claimed, and what fails keeps turns away, says why, and is tried again ever more rarely.
- One at a time: an engine wakes before its memory is taken, and of one that sleeps nothing more is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ...fabric.contract.clock import Clock
from ...fabric.rules.queue.engine_sleep import ActivationRule
from .engine_sleep import Activation, Sleeps, Words

MEMORY_AFTER_S = 2.0  # a lease that flickers, or a switch pressed twice, unmaps nothing


class GivesBack(Protocol):
    """KV memory that can be handed over while nothing runs.

    Both return seconds. Raise EngineUnsupported (it is as it was), EngineError.
    """

    async def give_back(self) -> float: ...
    async def take_again(self) -> float: ...


class _Memory:
    """Of one engine, as what sleeps and wakes."""

    def __init__(self, memory: GivesBack) -> None:
        self.sleep = memory.give_back
        self.wake = memory.take_again


class Readiness:
    """One worker's."""

    def __init__(
        self,
        engine: Sleeps,
        clock: Clock,
        *,
        sleep_after_s: float | None = None,
        memory: GivesBack | None = None,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when a change begins and when it has ended. memory: None: it is never given back."""
        self._engine = Activation(engine, ActivationRule(sleep_after_s=sleep_after_s), clock, changed=changed)
        self._parts = [self._engine]
        self._memory: Activation | None = None
        if memory is not None:
            words = Words(
                noun="kv_memory",
                not_asleep="the engine's KV memory was not given back",
                not_awake="the engine did not get its KV memory again",
            )
            rule = ActivationRule(sleep_after_s=MEMORY_AFTER_S)
            self._memory = Activation(_Memory(memory), rule, clock, changed=changed, words=words)
            self._parts.append(self._memory)

    @property
    def is_awake(self) -> bool:
        """Whether the engine may be given anything to do."""
        return all(part.is_awake for part in self._parts)

    @property
    def is_asleep(self) -> bool:
        """Whether it sleeps, or its memory is away, or either is about to be so."""
        return any(part.is_asleep for part in self._parts)

    @property
    def sleep_ms(self) -> int | None:
        """What the last changes took, of the engine and of its memory together; None: there was none."""
        return _sum(part.sleep_ms for part in self._parts)

    @property
    def wake_ms(self) -> int | None:
        """As `sleep_ms`."""
        return _sum(part.wake_ms for part in self._parts)

    @property
    def sleep_note(self) -> str | None:
        """Why it cannot sleep, or not give its memory back; None: it can, or was never asked to."""
        return "; ".join(part.sleep_note for part in self._parts if part.sleep_note is not None) or None

    @property
    def error(self) -> str | None:
        """Why it is neither awake nor asleep; None: it is one of them."""
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
