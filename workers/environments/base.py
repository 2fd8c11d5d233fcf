"""The environment protocol, and the adapter that makes plain synchronous environments fit it.

- An environment is one episode's world. It is made with its options, reset once with a task and a seed, stepped once
  per turn with the text the policy wrote, and closed.
- If `recovery` is "replay", the same task, seed and actions give the same observations and rewards: that is how a
  trajectory whose agent worker died goes on elsewhere.
- An environment lives in a process of its own (isolated.py): it may block, hang and crash.
- An environment whose class says that it may be trusted with the agent itself runs inside the agent. If it is `inline`,
  it never blocks, and its methods run on the event loop; if its `isolation` is "none", it is awaited under a time
  limit, and the adapter below takes its calls off the loop.

registry.py finds an environment by its name; the agent worker turns text into tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import reprlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

from ...fabric.chat.choice import read_choice
from ...fabric.contract.errors import EnvironmentFailed, InputError, WireError
from ...fabric.contract.limits import TURN_COUNT_MAX
from ...fabric.contract.sampling import FIELDS, Sampling, check_sampling, is_whole, sampling_from
from ...fabric.contract.text import shown
from .process_main import Refused, facts, said, seed_of

T = TypeVar("T")
Recovery = Literal["replay", "snapshot", "restart"]
Isolation = Literal["none", "process"]
FIVE = 5  # observation, reward, terminated, truncated, info


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSampling(Sampling):
    """An environment's wishes for the sampling of its turns."""

    ends_at_eos: bool = True
    """True if the tokenizer's end of sequence, if it has one, ends a turn too."""


def make_sampling(stated: Mapping[str, Any]) -> TextSampling:
    """Make sampling settings from plain values, as classes state them that do not know rollfab; None means a default.

    Raises:
        InputError: a value or its name does not fit.
    """
    given = {name: value for name, value in stated.items() if value is not None}
    ends_at_eos = given.pop("ends_at_eos", True)
    if not isinstance(ends_at_eos, bool):
        raise InputError(f"sampling: ends_at_eos is {shown(ends_at_eos)}, expected True or False")
    made = sampling_from(check_sampling(given, "sampling", others=["ends_at_eos"]))
    return TextSampling(**{name: getattr(made, name) for name in FIELDS}, ends_at_eos=ends_at_eos)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy reads first: a text; or token ids as they are; or chat messages and tools, in OpenAI's form."""

    text: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """The world's answer to one action. `terminated`: the task ended; `truncated`: a limit cut it off.

    messages: what it says instead of a text, where its observation had messages.
    """

    text: str
    reward: float
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """True if the episode takes no further action."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What an agent gets to reach the model: an OpenAI-compatible API, and a key that ends with its trajectory."""

    base_url: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What an agent says of an episode that it has played. reward: None: it gave none itself. info: as in a Step."""

    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False


class Environment(ABC):
    """One episode's world. Options arrive as keyword arguments of the constructor.

    Attributes:
        name: the name that a run gives.
        recovery: how a trajectory goes on after its agent worker died: "replay" the logged actions on the same seed,
            load a "snapshot", or "restart" as a new attempt.
        sampling: how turns are sampled unless the run says otherwise.
        tool_choice: which of its tools each turn must call, as chat completions have it: "auto", "required" or
            {"type": "function", "function": {"name": …}}.
        turn_count_max: turns after which the trajectory is cut off, unless the run says fewer.
        inline: its methods return at once and may run on the agent's event loop: it is trusted as with "none".
        isolation: "process" gives every episode a process to itself, so that a call that hangs or crashes can be ended.
            "none": it runs in the agent's own process, which trusts it with all its other trajectories.
        memory_bytes_max: memory that such a process may write to, at most the agent's own limit.
        episode_count_max: episodes that such a process serves, one after the other; None: the pool's number.
        is_agent: it is played, not reset and stepped: it asks the model by itself, as often as it likes.
    """

    name: str = ""
    recovery: Recovery = "replay"
    sampling: TextSampling = TextSampling()
    tool_choice: str | Mapping[str, Any] = "auto"
    turn_count_max: int = 64
    inline: bool = False
    isolation: ClassVar[Isolation] = "process"
    memory_bytes_max: ClassVar[int | None] = None
    episode_count_max: ClassVar[int | None] = None
    is_agent: bool = False

    @abstractmethod
    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        """Start the episode of `task`."""

    @abstractmethod
    async def step(self, action: Any) -> Step:
        """Apply the policy's turn: its text, or the assistant's message where the observation had messages."""

    async def play(self, task: dict[str, Any], seed: int, access: Access) -> Played:
        """Play the whole episode, with the model at `access`; called only if `is_agent`, instead of reset and step."""
        raise NotImplementedError(f"environment {self.name!r} is no agent")

    async def snapshot(self) -> dict[str, Any]:
        """Return the state as plain JSON values; called only if `recovery` is "snapshot"."""
        raise NotImplementedError(f"environment {self.name!r} has no snapshots")

    async def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot, on a fresh object that was never reset."""
        raise NotImplementedError(f"environment {self.name!r} has no snapshots")

    async def close(self) -> None:
        """Free all resources. Called once, also after a failure."""
        return


SETTINGS = ("recovery", "turn_count_max", "sampling", "tool_choice")  # of every world, checked alike wherever it runs


def check_settings(where: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return all SETTINGS as a class or world states them, ours for those that it does not state. See check_setting."""
    return {name: check_setting(where, name, stated.get(name)) for name in SETTINGS}


def check_setting(where: str, name: str, value: Any) -> Any:
    """Return the value of one of SETTINGS, as it is used; ours where it is None.

    Raises:
        EnvironmentFailed: it is none; the text names where, the setting, the value and what is expected.
    """
    if value is None:
        return getattr(Environment, name)
    if name == "sampling":
        return _check_sampling(where, value)
    if name == "recovery":
        is_fine = isinstance(value, str) and value in get_args(Recovery)
    elif name == "tool_choice":
        is_fine = read_choice(value) is not None
    else:
        is_fine = is_whole(value) and 1 <= value <= TURN_COUNT_MAX
    if not is_fine:
        raise EnvironmentFailed(f"{where}: {name} is {shown(value)}, expected {_expected(name)}", reason="make")
    return value


def _expected(name: str) -> str:
    """Say what one of SETTINGS takes."""
    return {
        "recovery": f"one of {', '.join(get_args(Recovery))}",
        "tool_choice": '"auto", "required" or {"type": "function", "function": {"name": …}}',
        "turn_count_max": f"a whole number from 1 to {TURN_COUNT_MAX:,}",
    }[name]


def _check_sampling(where: str, value: Any) -> TextSampling:
    """Return sampling of a mapping, or of an object with such attributes, as foreign classes have them."""
    names = (*FIELDS, "ends_at_eos")
    is_mapping = isinstance(value, Mapping)
    stated = value if is_mapping else {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not (stated or is_mapping):
        raise EnvironmentFailed(
            f"{where}: sampling is {shown(value)}, expected a dict or a TextSampling", reason="make"
        )
    try:
        return make_sampling(stated)
    except (InputError, WireError) as error:
        raise EnvironmentFailed(f"{where}: {error.message}", reason="make") from error


class GymEnvironment(Environment):
    """A synchronous Gymnasium or GEM style object as an Environment.

    `make(**options)` returns an object with `reset(seed=…) → (text, info)` and
    `step(text) → (text, reward, terminated, truncated, info)`; `close()` is called if there is one. A task's "seed", if
    given, replaces the trajectory's: all trajectories of a group then meet the same world. Observations that are not
    text are shown as `str`; None before an episode's end, and bytes, are none. Unless `inline`, calls run in a thread,
    so a slow or hung call never stops the loop.
    """

    def __init__(self, make: Callable[..., Any], **options: Any) -> None:
        self._world = make(**options)

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        """Start the episode.

        Raises:
            EnvironmentFailed: the wrapped object did not answer with (observation, info).
        """
        drawn = task_seed(self.name, task, seed)
        answer = await self._call(lambda: self._world.reset(seed=drawn))
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise EnvironmentFailed(
                f"environment {self.name!r}: reset gave {show(answer)}, expected (observation, info)",
                reason="reset",
            )
        return Observation(self._checked("reset", said, answer[0]), self._checked("reset", facts, answer[1]))

    async def step(self, action: str) -> Step:
        """Apply one action.

        Raises:
            EnvironmentFailed: the wrapped object did not answer with five values.
        """
        answer = await self._call(lambda: self._world.step(action))
        if not (isinstance(answer, tuple) and len(answer) == FIVE):
            raise EnvironmentFailed(
                f"environment {self.name!r}: step gave {show(answer)}, "
                "expected (observation, reward, terminated, truncated, info)",
                reason="step",
            )
        text, reward, terminated, truncated, info = answer
        text = self._checked("step", said, text, terminated is True or truncated is True)
        return Step(text, reward, terminated, truncated, self._checked("step", facts, info))

    def _checked(self, what: str, check: Callable[..., T], *answer: Any) -> T:
        try:
            return check(what, *answer)
        except Refused as error:
            raise EnvironmentFailed(f"environment {self.name!r}: {error}", reason=what) from error

    async def snapshot(self) -> dict[str, Any]:
        """Return the wrapped object's own snapshot, if it can make one."""
        if not hasattr(self._world, "snapshot"):
            return await super().snapshot()
        state: dict[str, Any] = await self._call(self._world.snapshot)
        return state

    async def restore(self, snapshot: dict[str, Any]) -> None:
        """Hand the wrapped object one of its own snapshots."""
        await self._call(lambda: self._world.restore(snapshot))

    async def close(self) -> None:
        """Close the wrapped object if it can be closed."""
        close = getattr(self._world, "close", None)
        if close is not None:
            await self._call(close)

    async def _call(self, function: Callable[[], T]) -> T:
        return function() if self.inline else await in_thread(function)


def task_seed(name: str, task: dict[str, Any], seed: int) -> int:
    """Return the task's own seed, or else the trajectory's. name: the environment's.

    Raises:
        EnvironmentFailed: the task's seed is no whole number.
    """
    try:
        return seed_of(task, seed)
    except Refused as error:
        raise EnvironmentFailed(f"environment {name!r}: {error}", reason="reset") from error


def show(value: object) -> str:
    """Show a value of user code in the text of an error: bounded, and even if its own repr raises."""
    brief = reprlib.Repr()
    brief.maxother = brief.maxstring = 200
    return brief.repr(value)


def as_error(raised: BaseException) -> Exception:
    """Turn an exception of user code into an error that can pass through a coroutine and end its call only.

    SystemExit and KeyboardInterrupt would end the process, CancelledError would look like our own cancellation, and a
    StopIteration cannot be raised into a coroutine at all.
    """
    if isinstance(raised, Exception) and not isinstance(raised, (StopIteration, StopAsyncIteration)):
        return raised
    error = RuntimeError(f"{type(raised).__name__}({', '.join(map(repr, raised.args))}) left the code that was called")
    error.__cause__ = raised
    return error


LOOKS = 20  # in one time limit
LOADAVG = Path("/proc/loadavg")
SHARE_MIN = 1 / 8  # of a processor: whoever starts any number of processes has eight times the limit, not more
LATE_S = 0.05  # a look later than this, or than a quarter of the time between looks, means that the loop stood still


@contextlib.asynccontextmanager
async def time_limit(limit_s: float) -> AsyncIterator[None]:
    """Limit the time of work that happens elsewhere, without counting the time in which this loop stands still.

    Count looks, not time: a late look does not count, because input that came meanwhile has not been read yet. Where
    more processes want a processor than there are, a look counts as the part of one that each of them has: work that
    waits for its turn does not hang, and agents run many environments at once.

    Raises:
        TimeoutError: like asyncio.timeout.
    """
    loop, look_s, left = asyncio.get_running_loop(), limit_s / LOOKS, float(LOOKS)
    timers: list[asyncio.TimerHandle] = []
    async with asyncio.timeout(None) as scope:

        def look_later() -> None:
            timers[:] = [loop.call_later(look_s, look, loop.time() + look_s)]

        def look(due_s: float) -> None:
            nonlocal left
            is_late = loop.time() - due_s >= max(LATE_S, look_s / 4)
            left -= 0.0 if is_late else processor_share()
            if left > 1e-9:
                look_later()
            else:
                scope.reschedule(loop.time())

        look_later()
        try:
            yield
        finally:
            timers[0].cancel()


def processor_share() -> float:
    """Return the part of a processor that each of this machine's processes has now that want one: 1 if all have one."""
    try:
        running_count = float(LOADAVG.read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):  # not Linux
        running_count = os.getloadavg()[0]
    return max(SHARE_MIN, min(1.0, (os.cpu_count() or 1) / max(running_count, 1.0)))


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking call in a daemon thread of its own.

    Hung calls would use up a pool, and the process would wait for the pool's threads when it exits.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled by the time limit
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            result, error = function(), None
        except BaseException as caught:  # noqa: BLE001 - user code: its exception ends its call, not our process
            result, error = None, as_error(caught)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return await future
