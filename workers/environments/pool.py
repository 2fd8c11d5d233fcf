"""The environment processes of one agent: started when needed, kept warm between episodes, ended when unfit.

- A process runs one episode at a time, and after it another of the same program; one whose call failed in any way is
  never used again, nor is one that has run its `episode_count_max`.
- Few start at once: imports are the dear part, and a hundred beside each other would all miss their time limit.
- At most `idle_count_max` wait unused, each for at most `idle_s`. Every process is waited for: none becomes a zombie.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from dataclasses import dataclass, field

from ...fabric.errors import EnvironmentFailed
from .process import EnvironmentProcess
from .spawn import Program

log = logging.getLogger(__name__)

EPISODE_COUNT_MAX = 100  # bounds what an environment leaks; a start costs 0.1 to 0.5 s


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Settings of the environment processes."""

    idle_count_max: int = 64
    """Processes that wait for an episode, over all programs, [0, 10000]."""
    episode_count_max: int = EPISODE_COUNT_MAX
    """Episodes that one process serves, where its program states no number."""
    idle_s: float = 60.0
    """How long one waits before it is ended."""
    start_count_max: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Processes of one program that start beside each other."""
    start_s: float = 30.0
    """A start with all its imports may take this long."""


class ProcessPool:
    """Gives processes to episodes and takes them back."""

    def __init__(self, config: PoolConfig | None = None) -> None:
        self._config = config or PoolConfig()
        self._idle: list[tuple[EnvironmentProcess, asyncio.TimerHandle]] = []
        self._starting: dict[Program, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(self._config.start_count_max)
        )
        self._running: set[EnvironmentProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._liveness: tuple[int, int] | None = None

    async def take(self, program: Program) -> EnvironmentProcess:
        """A process that has loaded its program, for one episode.

        Raises:
            ConfigError: it cannot be started, or does not find what it is to load.
            EnvironmentFailed: it raised, hung or crashed while it loaded that.
        """
        process = self._wake(program)
        if process is None:
            async with self._starting[program]:
                process = self._wake(program) or await self._start(program)
        process.episode_count += 1
        process.said.begin_episode()
        return process

    def give_back(self, process: EnvironmentProcess) -> None:
        """The episode is over; the process is kept for another if it is fit."""
        most = self._config.episode_count_max if process.episode_count_max is None else process.episode_count_max
        is_used_up = process.episode_count >= most
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
        process.kill()
        task = asyncio.get_running_loop().create_task(process.wait())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End every process, those in use too, and wait until they are gone."""
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
        """The process of this program that was idle last; those that died meanwhile are buried."""
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
        process = await EnvironmentProcess.start(program, self._liveness[0])
        self._running.add(process)
        try:
            arguments = {"target": program.target, "path": program.path(), "decoder": program.decoder}
            answer = await process.call("load", arguments, self._config.start_s)
            process.episode_count_max = _count(answer)
        except BaseException:
            self.end(process)
            raise
        log.info("environment.process_started", extra={"environment": program.target, "pid": process.pid})
        return process

    def _retire(self, process: EnvironmentProcess) -> None:
        """End one that is idle."""
        for index, (each, timer) in enumerate(self._idle):
            if each is process:
                timer.cancel()
                del self._idle[index]
                self.end(process)
                return


def _count(answer: object) -> int | None:
    """`episode_count_max` as the program states it."""
    stated = answer.get("episode_count_max") if isinstance(answer, dict) else None
    if stated is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if int(stated) >= 1:
            return int(stated)
    raise EnvironmentFailed(f"its episode_count_max is {stated!r}: at least 1", reason="load")
