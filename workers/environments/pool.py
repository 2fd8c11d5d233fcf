"""The environment processes of one agent: started when needed, kept warm between episodes, ended when unfit.

- A process runs one episode at a time, and then another of the same program; after a call that failed in any way, or
  after `episode_count_max` episodes, it is never used again.
- Few start at once: imports are the dear part, and a hundred side by side would all miss their time limit. A program
  whose processes fail one after the other waits before each start: it must not spend everybody's cores on starting.
- There is one process for each episode, besides the idle ones: an agent's number of environments bounds them.
- At most `idle_count_max` are idle, each for at most `idle_s`. The pool waits until each process has ended: none
  becomes a zombie.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...fabric.contract.errors import EnvironmentFailed
from ...fabric.contract.limits import KIB, WORLD_MEMORY_BYTES_MAX
from .confinement import UNASKED, Confinement, means
from .process import EnvironmentProcess
from .spawn import ROW_LIMITS, Program

log = logging.getLogger(__name__)

FREE_FAILURES = 3  # processes that may fail one after the other before the next start waits
PAUSE_S_MAX = 1.0
EPISODE_COUNT_MAX = 100  # bounds the leaks of an environment; a start costs 0.1 to 0.5 s


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Settings of the environment processes."""

    idle_count_max: int = 64
    """Processes that wait for an episode, over all programs, [0, 10000]."""
    episode_count_max: int = EPISODE_COUNT_MAX
    """Episodes that one process serves, if its program states no number."""
    idle_s: float = 60.0
    """How long an idle process waits before the pool ends it."""
    start_count_max: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Processes of one program that may start at once."""
    start_s: float = 120.0
    """A start with all its imports may take this long: on a busy machine, a large package takes more than 30 s."""
    play_s: float = 1800.0
    """A whole episode that an agent plays by itself may take this long."""
    memory_bytes_max: int = WORLD_MEMORY_BYTES_MAX
    """Memory that each may write to; a class may say that it needs less."""
    confinement: Confinement = UNASKED
    """How the processes are held in."""


class ProcessPool:
    """Gives processes to episodes and takes them back."""

    def __init__(self, config: PoolConfig | None = None) -> None:
        self._config = config or PoolConfig()
        self._idle: list[tuple[EnvironmentProcess, asyncio.TimerHandle]] = []
        self._starting: dict[Program, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(self._config.start_count_max)
        )
        self._failed: Counter[Program] = Counter()  # processes that failed since the last good one
        self._running: set[EnvironmentProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._liveness: tuple[int, int] | None = None

    @property
    def confinement(self) -> Confinement:
        """How the processes are held in."""
        return self._config.confinement

    @property
    def play_s(self) -> float:
        """How long an agent may play one episode."""
        return self._config.play_s

    async def take(self, program: Program) -> EnvironmentProcess:
        """Give out a process that has loaded its program, for one episode.

        Raises:
            ConfigError: the process cannot be started, or does not find the code to load.
            EnvironmentFailed: the code raised, hung or crashed while the process loaded it.
        """
        process = self._wake(program)
        if process is None:
            async with self._starting[program]:
                await asyncio.sleep(pause_s(self._failed[program]))
                process = self._wake(program) or await self._start(program)
        process.episode_count += 1
        process.said.begin_episode()
        return process

    def give_back(self, process: EnvironmentProcess) -> None:
        """Take back a process after its episode; keep it for another if it is fit, else end it."""
        most = self._config.episode_count_max if process.episode_count_max is None else process.episode_count_max
        is_used_up = process.episode_count >= most
        if not process.has_failed and process.is_alive:
            self._failed.pop(process.program, None)
        if process.has_failed or not process.is_alive or is_used_up or self._config.idle_count_max == 0:
            self.end(process)
            return
        if len(self._idle) >= self._config.idle_count_max:
            self._retire(self._idle[0][0])
        self._running.discard(process)
        timer = asyncio.get_running_loop().call_later(self._config.idle_s, self._retire, process)
        self._idle.append((process, timer))

    def end(self, process: EnvironmentProcess) -> None:
        """Kill a process with all it has started."""
        self._running.discard(process)
        self._failed[process.program] += process.has_failed
        process.kill()
        task = asyncio.get_running_loop().create_task(process.wait())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End every process, including those in use, and wait until they are gone."""
        for process, timer in self._idle:
            timer.cancel()
            self.end(process)
        self._idle.clear()
        for process in list(self._running):
            self.end(process)
        await asyncio.gather(*self._ending)
        if self._liveness is not None:
            for end in self._liveness:
                os.close(end)
        self._liveness = None

    def _wake(self, program: Program) -> EnvironmentProcess | None:
        """Take the process of this program that became idle last; end processes that died meanwhile."""
        for index in reversed(range(len(self._idle))):
            process, timer = self._idle[index]
            if process.program != program:
                continue
            del self._idle[index]
            timer.cancel()
            if process.is_alive:
                self._running.add(process)
                return process
            self.end(process)
        return None

    async def _start(self, program: Program) -> EnvironmentProcess:
        if self._liveness is None:
            self._liveness = os.pipe()
        confinement = self._config.confinement
        await asyncio.to_thread(means, confinement.is_offline)  # the first call takes as long as a start
        process = await EnvironmentProcess.start(program, confinement, self._config.memory_bytes_max, self._liveness[0])
        self._running.add(process)
        try:
            arguments = {
                "target": program.target,
                "path": program.path(),
                "is_first": program.python is None,
                "limits": ROW_LIMITS,
                "decoder": program.decoder,
            }
            answer = await process.call("load", arguments, self._config.start_s, bytes_max=64 * KIB)
            process.stated = answer if isinstance(answer, dict) else {}
            process.episode_count_max = _count(process.stated)
        except BaseException:
            self.end(process)
            raise
        log.info("environment.process_started", extra={"environment": program.target, "pid": process.pid})
        return process

    def _retire(self, process: EnvironmentProcess) -> None:
        """End an idle process."""
        for index, (each, timer) in enumerate(self._idle):
            if each is process:
                timer.cancel()
                del self._idle[index]
                self.end(process)
                return


def pause_s(failed_count: int) -> float:
    """Say how long to wait before the next start of a program whose last processes failed one after the other."""
    return 0.0 if failed_count < FREE_FAILURES else min(PAUSE_S_MAX, 0.05 * 2 ** min(failed_count - FREE_FAILURES, 10))


def _count(answer: Mapping[str, object]) -> int | None:
    """Read `episode_count_max` as the program states it; None if it does not. Raises EnvironmentFailed."""
    stated: Any = answer.get("episode_count_max")
    if stated is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if int(stated) >= 1:
            return int(stated)
    raise EnvironmentFailed(f"its episode_count_max is {stated!r}: at least 1", reason="load")
