"""Injecting the schedule: a lane per role, each fault with what came of it.

A lane waits until the role's other processes serve, does harm, ends it after its time, and goes on when no claim waits
any more and the process serves again. So every role has one process at work, unless the broker itself is away.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from redis.exceptions import RedisError

from rollfab.fabric.contract.errors import FabricError

from .cast import Cast, until
from .claims import ClaimWatch, Held
from .schedule import BROKER, CUT, FREEZE, HOLD, KILL, Fault, faults

RECOVERY_TIMEOUT_S = 60.0
KILLS_RECOVERY_TIMEOUT_S = 300.0  # where agents die all the time: who is suspected waits to run alone, one at a time
SERVING_TIMEOUT_S = 240.0  # importing torch on a busy machine
SETTLE_S = 0.01  # what a process had sent before its fault reaches the broker within this time


@dataclass(kw_only=True)
class Injected:
    """A fault and what came of it. recovery_ms: None where the process held nothing."""

    fault: Fault
    at_s: float
    held_count: int = 0
    recovery_ms: float | None = None
    is_recovered: bool = True


class Director:
    """Runs all lanes."""

    def __init__(self, cast: Cast, watch: ClaimWatch, seed: int, pauses: Mapping[str, tuple[float, float]]) -> None:
        self._cast = cast
        self._watch = watch
        self._seed = seed
        self._pauses = pauses
        self._until_s = 0.0
        self._started_s = 0.0
        self._late: list[asyncio.Task[None]] = []
        self.injected: list[Injected] = []

    async def run(self, duration_s: float) -> None:
        """Inject faults for so long; returns when the last one is over.

        Raises:
            FabricError: a process did not come back.
        """
        self._started_s = time.monotonic()
        self._until_s = self._started_s + duration_s
        try:
            async with asyncio.TaskGroup() as lanes:
                for role in [*self._cast.workload.counts, BROKER]:
                    lanes.create_task(self._lane(role))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await asyncio.gather(*self._late)

    async def kill_agents(self, count: int) -> None:
        """So many kills of agents, one at a time, as soon as one of them works; returns when all have recovered.

        Raises:
            FabricError: an agent did not come back.
        """
        self._started_s = time.monotonic()
        agents = faults(
            self._seed, "agent", instance_count=self._cast.workload.counts["agent"], pause_s=self._pauses["agent"]
        )
        for fault in itertools.islice(agents, count):
            name = f"agent-{fault.instance}"
            await asyncio.sleep(fault.pause_s)
            await self._until_serving(name)
            worker_id, started_s = self._cast.worker_id(name), time.monotonic()
            injected = self._note(replace(fault, kind=KILL, duration_s=0.0))
            self._cast.kill(name)
            recovering = self._recover(injected, "agent", worker_id, started_s, KILLS_RECOVERY_TIMEOUT_S)
            self._late.append(asyncio.create_task(recovering))
        await asyncio.gather(*self._late)

    async def _lane(self, role: str) -> None:
        count = self._cast.workload.counts.get(role, 1)
        for fault in faults(self._seed, role, instance_count=count, pause_s=self._pauses[role]):
            await asyncio.sleep(min(fault.pause_s, max(0.0, self._until_s - time.monotonic())))
            name = f"{role}-{fault.instance}"
            left_s = self._until_s - time.monotonic()
            if not await until(partial(self._may_hit, role, name), left_s) or time.monotonic() >= self._until_s:
                return
            await (self._hit_broker(fault) if role == BROKER else self._hit(name, fault))

    def _may_hit(self, role: str, name: str) -> bool:
        return role == BROKER or (self._cast.is_serving(name) and self._cast.others_serve(name))

    def _note(self, fault: Fault) -> Injected:
        injected = Injected(fault=fault, at_s=time.monotonic() - self._started_s)
        self.injected.append(injected)
        return injected

    # ---- one process

    async def _hit(self, name: str, fault: Fault) -> None:
        worker_id = self._cast.worker_id(name)
        injected = self._note(fault)
        started_s = time.monotonic()
        self._harm(name, fault.kind)
        waiting = asyncio.create_task(self._recover(injected, fault.role, worker_id, started_s))
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            self._end_harm(name, fault.kind)
        if fault.role == "reward":  # it holds no claims: the lane need not wait
            self._late.append(waiting)
        else:
            await waiting
        await self._until_serving(name)

    def _harm(self, name: str, kind: str) -> None:
        relay = self._cast.relays[name]
        {
            KILL: lambda: self._cast.kill(name),
            FREEZE: lambda: self._cast.freeze(name),
            CUT: lambda: relay.cut(name),
            HOLD: lambda: relay.hold(name),
        }[kind]()

    def _end_harm(self, name: str, kind: str) -> None:
        if kind == FREEZE:
            self._cast.thaw(name)
        self._cast.relays[name].heal(name)

    async def _recover(
        self,
        injected: Injected,
        role: str,
        worker_id: str | None,
        started_s: float,
        timeout_s: float = RECOVERY_TIMEOUT_S,
    ) -> None:
        await asyncio.sleep(SETTLE_S)
        held = await self._held(role, worker_id)
        injected.held_count = sum(len(each.claims) for each in held)
        if injected.held_count:
            injected.is_recovered = await self._watch.wait(held, timeout_s)
            injected.recovery_ms = 1000 * (time.monotonic() - started_s)

    async def _held(self, role: str, worker_id: str | None) -> list[Held]:
        while True:
            try:
                if role == "reward":
                    return await self._watch.scoring()
                return await self._watch.held_by(worker_id) if worker_id else []
            except (RedisError, OSError):  # the broker is away, and changes nothing meanwhile
                await asyncio.sleep(SETTLE_S)

    async def _until_serving(self, name: str) -> None:
        if not await until(lambda: self._cast.is_serving(name), SERVING_TIMEOUT_S):
            raise FabricError(
                f"{name} did not serve again within {SERVING_TIMEOUT_S:.0f} s, its last lines:\n"
                f"{self._cast.child(name).tail()}"
            )

    # ---- the broker

    async def _hit_broker(self, fault: Fault) -> None:
        injected = self._note(fault)
        started_s = time.monotonic()
        if fault.kind == KILL:
            await self._cast.restart_broker(fault.duration_s)
        elif fault.kind == FREEZE:
            os.kill(self._cast.broker.pid, signal.SIGSTOP)
            await asyncio.sleep(fault.duration_s)
            os.kill(self._cast.broker.pid, signal.SIGCONT)
        else:
            await self._cut_all(fault.duration_s)
        injected.is_recovered = await self._watch.wait_settled(RECOVERY_TIMEOUT_S)
        injected.recovery_ms = 1000 * (time.monotonic() - started_s)

    async def _cut_all(self, duration_s: float) -> None:
        for relay in self._cast.relays.values():
            relay.cut(BROKER)
        await asyncio.sleep(duration_s)
        for relay in self._cast.relays.values():
            relay.heal(BROKER)
