"""An environment that lives in a process of its own, as an Environment like any other.

- If it hangs, crashes or fills its memory, only its own process is killed: its attempt fails, and the reason says why.
- It awaits its calls under its own time limit, so the caller needs none.
- It checks the answers of its process before it believes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...fabric.contract.errors import EnvironmentFailed, FabricError
from ...fabric.contract.limits import INFO_BYTES_MAX, KIB, OBSERVATION_BYTES_MAX, OBSERVATION_IMAGES_BYTES_MAX
from .base import Access, Environment, Observation, Played, Step, check_settings, show
from .pool import ProcessPool
from .process import EnvironmentProcess
from .room import Share
from .spawn import ANSWER_BYTES_MAX, Program

OBSERVATION = ("text", "info", "messages", "tools", "ids")
PLAYED = ("reward", "info", "truncated")
STEP = ("text", "reward", "terminated", "truncated", "info", "messages")
# process_main.py refuses texts and infos over their own limits, with advice; these bounds are for foreign code that
# writes to the channel itself.
BYTES_MAX = {"snapshot": ANSWER_BYTES_MAX}
# Messages and tools, or a text with escapes.
ROW_BYTES_MAX = 2 * OBSERVATION_BYTES_MAX + OBSERVATION_IMAGES_BYTES_MAX + INFO_BYTES_MAX + 64 * KIB


class IsolatedEnvironment(Environment):
    """The agent's end of an environment process. Made by `open`."""

    def __init__(self, name: str, pool: ProcessPool, process: EnvironmentProcess, timeout_s: float) -> None:
        self.name = name
        self._pool = pool
        self._process = process
        self._timeout_s = timeout_s

    @classmethod
    async def open(
        cls, name: str, program: Program, options: Mapping[str, Any], *, pool: ProcessPool, timeout_s: float
    ) -> IsolatedEnvironment:
        """Make a world in a process; wait while too many processes are starting.

        Raises:
            ConfigError: the process cannot start or load the environment, or the environment does not take the options.
            EnvironmentFailed: the environment raised, hung or crashed, or has impossible settings.
        """
        try:
            process = await pool.take(program)
        except FabricError as error:
            raise named(error, name) from error
        world = cls(name, pool, process, timeout_s)
        try:
            world._take_settings(await world._call("make", {"options": dict(options)}))
        except BaseException:
            pool.end(process)
            raise
        return world

    @property
    def pid(self) -> int:
        """The id of its process, which leads a process group."""
        return self._process.pid

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        """Start the episode."""
        answer = await self._call("reset", {"task": task, "seed": seed})
        return Observation(**self._fields("reset", answer, OBSERVATION))

    async def step(self, action: Any) -> Step:
        return Step(**self._fields("step", await self._call("step", {"action": action}), STEP))

    async def play(self, task: dict[str, Any], seed: int, access: Access) -> Played:
        """Let the agent in the process play the whole episode, for as long as the pool allows."""
        arguments = {"task": task, "seed": seed, "base_url": access.base_url, "key": access.key}
        answer = await self._call("play", arguments, timeout_s=self._pool.play_s)
        return Played(**self._fields("play", answer, PLAYED))

    async def snapshot(self) -> dict[str, Any]:
        """Return the state as its process gave it."""
        return self._fields("snapshot", await self._call("snapshot", {}))

    async def snapshot_within(self, share: Share) -> dict[str, Any] | None:
        """Return the state as its process gave it, or None if `share` has no room for it."""
        answer = await self._call("snapshot", {}, share)
        return None if share.is_refused else self._fields("snapshot", answer)

    async def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a state."""
        await self._call("restore", {"snapshot": snapshot})

    async def close(self) -> None:
        """Close the world; its process goes on to another episode if all went well."""
        try:
            if self._process.is_alive:
                await self._call("close", {})
        finally:
            self._pool.give_back(self._process)

    async def _call(
        self, what: str, arguments: Mapping[str, Any], share: Share | None = None, *, timeout_s: float | None = None
    ) -> Any:
        limit, timeout_s = BYTES_MAX.get(what, ROW_BYTES_MAX), timeout_s or self._timeout_s
        try:
            return await self._process.call(what, arguments, timeout_s, bytes_max=limit, share=share)
        except FabricError as error:
            raise named(error, self.name) from error

    def _fields(self, what: str, answer: Any, names: Sequence[str] = ()) -> dict[str, Any]:
        """Return these fields of an answer (all if none are named); raise unless it is an object that has them."""
        if not isinstance(answer, dict) or any(name not in answer for name in names):
            self._process.has_failed = True
            raise EnvironmentFailed(f"environment {self.name!r}: {what} gave {show(answer)}", reason=what)
        return {name: answer[name] for name in names} or answer

    def _take_settings(self, answer: Any) -> None:
        """Take the settings that the class in the process states; keep ours for the others."""
        stated = self._fields("make", answer)
        for name, value in check_settings(f"environment {self.name!r}", stated).items():
            setattr(self, name, value)
        self.is_agent = stated.get("is_agent") is True


def named(error: FabricError, name: str) -> FabricError:
    """Return the same error with the environment's name in front."""
    return type(error)(f"environment {name!r}: {error.message}", **error.facts)
