"""The faults: what happens to processes, connections, engines and clocks, all drawn from one Random.

Every fault is undone by its own timer; `settle` undoes what is left, so that phase two starts in a healthy cluster.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING

from rollfab.fabric.queue.keys import LEADER
from tests.sim.virtual_loop import Process

if TYPE_CHECKING:
    from tests.sim.world import World

CLOCK_STEP_S = 3600.0


class Faults:
    """Makes trouble for a world until told to stop."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random
        kinds = [
            self._crash,
            self._stop,
            self._cut,
            self._outlive,
            self._outlive,
            self._depose,
            self._restart_trainer,
            self._replace_trainer,
            self._slow_engine,
            self._engine_dies,
            self._broker_stalls,
            self._lend,
            self._world_hangs,
            self._clock_steps,
        ]
        # Few kinds a seed: rare things that need each other then happen together, in an else healthy cluster.
        self._kinds: list[Callable[[], Awaitable[None]]] = random.sample(kinds, random.randint(1, 4))
        focus = world.options.focus
        if focus:
            own = {"trainer": [self._restart_trainer, self._replace_trainer], "leader": [self._depose]}
            self._kinds = own.get(focus, [self._outlive])
        self._is_outlived = False
        self._under_way: list[asyncio.Task[None]] = []

    async def run(self, duration_s: float) -> None:
        """Faults, one after another, each for a while."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + duration_s
        self._world.network.is_rough = True
        while (gap_s := self._random.expovariate(1 / self._world.options.fault_gap_s)) < until_s - loop.time():
            await asyncio.sleep(gap_s)
            kind = self._random.choice(self._kinds)
            self._under_way.append(asyncio.create_task(kind()))  # type: ignore[arg-type]
        await asyncio.sleep(max(0.0, until_s - loop.time()))

    async def settle(self) -> None:
        """No more faults; what is under way is undone, but for the two that never are (see below)."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._world.network.is_rough = False
        now_s = asyncio.get_running_loop().time()
        for process in (self._world.broker, *self._world.living()):
            process.trouble_s = min(process.trouble_s, now_s)
        await self._world.set_lend("on")
        if self._world.options.revokes:
            await self._revoke()
        if self._world.options.hangs:
            await self._hang()

    # ---- what a healthy cluster must bear

    async def _revoke(self) -> None:
        """The serving team wants its machines back, once they are at work."""
        await asyncio.sleep(0.3)
        if await self._until_busy("serving", for_s=2.0):
            await self._world.set_lend("off")
            self._world.facts.note("operator", "lend", "*", "off")
            await asyncio.sleep(3.0)

    async def _hang(self) -> None:
        """An engine at work makes no step any more, for good; another is left to go on."""
        names = await self._until_busy("dedicated", "serving")
        if names and len(self._world.engines) > 1:
            victim = self._world.links[self._random.choice(names)].process
            self._world.engines[victim.name].hang()
            self._note(victim, "engine.hangs")
            victim.trouble_s = math.inf

    async def _until_busy(self, *roles: str, for_s: float = 0.0) -> list[str]:
        """Workers that run turns, for so long at least; none, when there were none for a while."""
        for _ in range(60):
            if names := self._busy(*roles, for_s=for_s):
                return names
            await asyncio.sleep(0.05)
        return []

    def _busy(self, *roles: str, for_s: float) -> list[str]:
        engines = self._world.engines
        return [
            name for name in engines if engines[name].left_s > for_s and self._world.links[name].process.role in roles
        ]

    # ---- one fault each

    async def _crash(self) -> None:
        victim = self._any()
        self._note(victim, "crash")
        self._world.crash(victim, after_s=self._random.uniform(0.1, 2.0))

    async def _stop(self) -> None:
        await self._stop_one(self._any(), self._random.choice((0.3, 1.0, 6.0)))

    async def _stop_one(self, victim: Process, duration_s: float) -> None:
        self._note(victim, "stop", duration_s)
        victim.stop()
        await self._for_a_while(victim, duration_s, victim.wake)

    async def _cut(self) -> None:
        await self._cut_one(self._any(), self._random.choice((0.2, 1.0)))

    async def _outlive(self) -> None:
        """Somebody at work is not heard of for a little longer than a claim lasts: then it is a zombie."""
        if self._world.options.focus != "agents" and self._random.random() < 0.8:
            names = await self._until_busy("dedicated", "serving")
        else:
            names = [name for name, agent in self._world.agents.items() if agent.running_count]
        if names and not self._is_outlived:  # one at a time, so that somebody is there to take over
            self._is_outlived = True
            victim = self._world.links[self._random.choice(names)].process
            hurt = self._random.choice((self._stop_one, self._cut_one, self._cut_one))
            await hurt(victim, self._random.uniform(2.2, 3.5))
            self._is_outlived = False

    async def _depose(self) -> None:
        """The leader is stopped for longer than it may be silent."""
        leader = self._world.store.carry_out(("GET", LEADER)) or b""
        if (link := self._world.links.get(leader.decode().partition("/")[0])) is not None:
            await self._stop_one(link.process, self._random.uniform(2.2, 4.0))

    async def _restart_trainer(self) -> None:
        for victim in [each for each in self._world.living() if each.role == "trainer" and not each.is_replaced]:
            self._note(victim, "crash")
            self._world.crash(victim, after_s=self._random.uniform(0.1, 0.5))

    async def _replace_trainer(self) -> None:
        """A trainer is taken for dead and another one started, but it was only stopped, and wakes up."""
        trainers = [each for each in self._world.living() if each.role == "trainer" and not each.is_replaced]
        if trainers:
            victim = trainers[0]
            victim.is_replaced = True
            self._note(victim, "replace")
            self._world.start("trainer")
            await self._stop_one(victim, self._random.uniform(0.5, 3.0))

    async def _cut_one(self, victim: Process, duration_s: float) -> None:
        self._note(victim, "cut", duration_s)
        link = self._world.links[victim.name]
        link.is_cut = True

        def mend() -> None:
            link.is_cut = False

        await self._for_a_while(victim, duration_s, mend)

    async def _slow_engine(self) -> None:
        names = list(self._world.engines)
        if not names:
            return
        name = self._random.choice(names)
        engine, victim = self._world.engines[name], self._world.links[name].process
        if engine.is_hung:
            return
        engine.slowness = self._random.choice((4.0, 1000.0))
        duration_s = self._random.uniform(0.5, 3.0)
        self._note(victim, "slow", f"x{engine.slowness:g}")

        def recover() -> None:
            if not engine.is_hung:
                engine.slowness = 1.0

        await self._for_a_while(victim, duration_s, recover)

    async def _engine_dies(self) -> None:
        names = list(self._world.engines)
        if names:
            name = self._random.choice(names)
            self._note(self._world.links[name].process, "engine.dies")
            self._world.engines[name].die()

    async def _broker_stalls(self) -> None:
        duration_s = self._random.choice((0.1, 0.5, 1.5))
        self._note(self._world.broker, "stall", duration_s)
        self._world.broker.stop()
        await self._for_a_while(self._world.broker, duration_s, self._world.broker.wake)

    async def _lend(self) -> None:
        value = self._random.choice(("off", "off", "1", "on"))
        self._world.facts.note("operator", "lend", "*", value)
        await self._world.set_lend(value)

    async def _world_hangs(self) -> None:
        agents = [each for each in self._world.living() if each.role == "agent"]
        if not agents:
            return
        victim = self._random.choice(agents)
        self._note(victim, "world.hangs")
        victim.is_world_hung = True

        def recover() -> None:
            victim.is_world_hung = False

        await self._for_a_while(victim, 0.1, recover)

    async def _clock_steps(self) -> None:
        step_s = self._random.choice((-CLOCK_STEP_S, CLOCK_STEP_S))
        self._world.store.set_ahead_s += step_s
        for watched in self._world.watched:
            watched.facts.clock_trouble_s = asyncio.get_running_loop().time()
        self._note(self._world.broker, "clock", f"{step_s:+} s")

    # ---- what they share

    def _any(self) -> Process:
        """A process; those that hold claims more often than others."""
        living = self._world.living()
        weights = [3 if each.role in ("agent", "dedicated", "serving") else 1 for each in living]
        return self._random.choices(living, weights)[0]

    def _note(self, victim: Process, what: str, details: object = "") -> None:
        victim.trouble_s = max(victim.trouble_s, asyncio.get_running_loop().time())
        self._world.facts.note("fault", what, victim.name, details)

    async def _for_a_while(self, victim: Process, duration_s: float, undo: Callable[[], None]) -> None:
        until_s = asyncio.get_running_loop().time() + duration_s
        victim.trouble_s = max(victim.trouble_s, until_s + 0.1)
        try:
            await asyncio.sleep(duration_s)
        finally:
            undo()
