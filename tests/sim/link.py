"""A process' connection to the broker: the Fabric that it is given, and all that a network does to it.

- A call is carried out by the broker, not by the caller: it goes on when the caller is stopped or killed meanwhile.
- A call may be lost on the way, carried out without its answer arriving, carried out twice (the client repeats what it
  got no answer to), or long after the caller gave up. Whoever calls sees BrokerError, or nothing unusual.
- Chunks of weights may arrive spoilt: they carry digests for that.
- Calls of a process that was killed are refused here; those already on their way are carried out.
- Every call that was carried out is shown to the checkers, in the order of the broker.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.ports.queue import Fabric
from tests.sim.virtual_loop import Process

BLOCKING = {
    "trajectories.wait",
    "turns.wait",
    "turns.results",
    "rollouts.receive",
    "board.events",
    "board.wait_lease",
    "weights.wait_head",
    "rewards.take",
}

Observe = Callable[[Process, str, str, Any, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one call."""

    travel_s: float = 0.001
    is_request_lost: bool = False
    is_answer_lost: bool = False
    is_twice: bool = False
    late_s: float = 0.0  # carried out this long after the caller was told that it failed

    @property
    def is_clear(self) -> bool:
        """Nothing happens to it that the caller would notice."""
        return not (self.is_request_lost or self.is_answer_lost or self.is_twice or self.late_s) and self.travel_s < 0.1


CHUNKS = "weights.chunks"


@dataclass(slots=True)
class Network:
    """The weather for all connections: while it is rough, this share of calls meets a fate."""

    random: Random
    trouble_fraction: float
    travel_s: float
    is_rough: bool = False

    def fate(self) -> Fate:
        """What happens to the next call."""
        travel_s = self.random.uniform(0.5, 1.5) * self.travel_s
        if not self.is_rough or self.random.random() >= self.trouble_fraction:
            return Fate(travel_s=travel_s)
        kind = self.random.randrange(5)
        return Fate(
            travel_s=self.random.uniform(0.1, 1.0) if kind == 0 else travel_s,
            is_request_lost=kind == 1,
            is_answer_lost=kind == 2,
            is_twice=kind == 3,
            late_s=self.random.uniform(0.05, 4.0) if kind == 4 else 0.0,
        )

    def spoilt(self, name: str, result: Any) -> Any:
        """A result as it arrives: chunks of weights come with a wrong byte, or not at all, now and then."""
        if name != CHUNKS or not self.is_rough or self.random.random() >= 0.1:
            return result
        place = self.random.randrange(1 << 16)
        return [_spoil(chunk, place) if self.random.random() < 0.5 else None for chunk in result]


def _spoil(chunk: bytes | None, place: int) -> bytes | None:
    if not chunk:
        return chunk
    place %= len(chunk)
    return chunk[:place] + bytes((chunk[place] ^ 0x10,)) + chunk[place + 1 :]


class Link:
    """Fabric (see ports) of one process."""

    def __init__(
        self, process: Process, broker: Process, fabric: Fabric, network: Network, observe: Observe, rewards: Any
    ) -> None:
        self.process = process
        self.is_cut = False
        self._broker = broker
        self._fabric = fabric
        self._network = network
        self._observe = observe
        self.board: Any = _Port(self, "board", fabric.board)
        self.weights: Any = _Port(self, "weights", fabric.weights)
        self.rewards: Any = _Port(self, "rewards", rewards)

    def trajectories(self, run: RunConfig) -> Any:
        return _Port(self, "trajectories", self._fabric.trajectories(run), run.run_id)

    def turns(self, run: RunConfig) -> Any:
        return _Port(self, "turns", self._fabric.turns(run), run.run_id)

    def rollouts(self, run: RunConfig) -> Any:
        return _Port(self, "rollouts", self._fabric.rollouts(run), run.run_id)

    async def close(self) -> None:
        return

    async def call(
        self, name: str, function: Callable[..., Awaitable[Any]], args: Any, kwargs: Any, run_id: str = ""
    ) -> Any:
        """Have the broker do something. run_id: that it is about; "": not said."""
        if self.process.is_dead:
            raise BrokerError("the simulated process was killed")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        request = _Request(name, function, args, kwargs, reply, run_id)
        task = loop.create_task(self._serve(request), context=self._broker.context)
        if name in BLOCKING:  # the broker sees the connection go; anything else is carried out once it was sent
            reply.add_done_callback(lambda reply: task.cancel() if reply.cancelled() else None)
        return await reply

    async def _serve(self, request: _Request) -> None:
        fate = self._network.fate()
        if not fate.is_clear:
            self._mark_trouble(fate.travel_s)
        await asyncio.sleep(fate.travel_s)
        if self.is_cut or fate.is_request_lost:
            await asyncio.sleep(0.05)
            request.fail("the connection is cut")
            return
        if fate.late_s:
            request.fail("no answer in time")
            await asyncio.sleep(fate.late_s)
        try:
            result = await self._carry_out(request)
            if fate.is_twice:
                request.forget(result)
                result = await self._carry_out(request)
        except Exception as error:  # noqa: BLE001 - what is none of ours ends the caller, and that is a finding
            request.answer(error=error)
            return
        if self.is_cut or fate.is_answer_lost or fate.late_s:
            request.forget(result)
            self._mark_trouble(0.0)
            request.fail("the answer was lost")
        elif not request.answer(self._network.spoilt(request.name, result)):
            request.forget(result)

    def _mark_trouble(self, duration_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + duration_s + 0.1
        self.process.trouble_s = max(self.process.trouble_s, until_s)

    async def _carry_out(self, request: _Request) -> Any:
        result = await request.function(*request.args, **request.kwargs)
        self._observe(self.process, request.run_id, request.name, result, request.args, request.kwargs)
        return result


@dataclass(slots=True)
class _Request:
    name: str
    function: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply: asyncio.Future[Any]
    run_id: str = ""

    def answer(self, result: Any = None, *, error: Exception | None = None) -> bool:
        """False when nobody waits for it any more."""
        if self.reply.done():
            return False
        if error is None:
            self.reply.set_result(result)
        else:
            self.reply.set_exception(error)
        return True

    def fail(self, why: str) -> None:
        self.answer(error=BrokerError(f"{self.name}: {why}"))

    def forget(self, result: Any) -> None:
        """The caller never sees the result. A consumer's own notes are made when it does, so they are taken back."""
        if self.name == "rollouts.receive":
            stream: Any = self.function.__self__  # type: ignore[attr-defined]
            for delivery in result:
                stream.put_back(delivery)


class _Port:
    """A port whose calls go through the link, whatever their names are; what is not a call stays local."""

    def __init__(self, link: Link, prefix: str, inner: Any, run_id: str = "") -> None:
        self._link = link
        self._run_id = run_id
        self._prefix = prefix
        self._inner = inner

    def __getattr__(self, method: str) -> Any:
        function = getattr(self._inner, method)
        if not inspect.iscoroutinefunction(function):
            return function
        name = f"{self._prefix}.{method}"

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._link.call(name, function, args, kwargs, self._run_id)

        setattr(self, method, call)
        return call
