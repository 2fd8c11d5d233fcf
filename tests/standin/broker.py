"""The stand-in broker: what Redis or Valkey is to the fabric, in this process, on a clock that tests may set.

It runs the fabric's own scripts, and the fabric's own ports speak to it, so what is tested on it is what is deployed.
Only the commands below them are ours, and tests/contracts holds those to a real server. It has no memory limit, no
users, no disk and one node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import NoScriptError, ResponseError

from rollfab.fabric.broker.clients.channel import Argument, Command, checked
from rollfab.fabric.contract.clock import Clock, SystemClock
from tests.standin import stream_commands  # noqa: F401 - registers them
from tests.standin.commands import COMMANDS, Words
from tests.standin.keyspace import Keyspace
from tests.standin.scripts import Interpreter


@cache
def interpreter() -> Interpreter:
    """Shared: to load it takes longer than most tests."""
    return Interpreter()


class Broker:
    """One broker. set_ahead_s: how far somebody has set its machine's time."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.set_ahead_s = 0.0
        self.keys = Keyspace(self.wall_ms)
        self._scripts: set[bytes] = set()  # that it was sent: the interpreter has those of other brokers, too

    def wall_ms(self) -> float:
        """What its machine's clock shows."""
        return self._clock.wall_ms() + self.set_ahead_s * 1000

    def now_ms(self, clock: str) -> float:
        """What one of the fabric's clocks there shows: see fabric/queue/lua/use/look.lua."""
        saved, wall_ms = self.keys.held.get(clock.encode()), int(self.wall_ms())
        if saved is None:
            return wall_ms
        last_wall, last = map(int, saved.split())
        return last + max(0, min(1000, wall_ms - last_wall))

    def carry_out(self, command: Sequence[Any]) -> Any:
        """Do what a command asks, at once."""
        name, *words = encoded(command)
        if name == b"EVALSHA":
            if words[0] not in self._scripts:
                raise NoScriptError("No matching script. Please use EVAL.")
            return interpreter().run(self.keys, words[0], words[1:])
        if name == b"EVAL":
            self._scripts.add(digest := interpreter().load(words[0]))
            return interpreter().run(self.keys, digest, words[1:])
        found = COMMANDS.get(name)
        assert found is not None, f"the stand-in has no {name!r}: add it to tests/standin"
        answer = found(self.keys, words)
        return answer["ok"] if isinstance(answer, dict) else answer

    async def ask(self, command: Sequence[Any]) -> Any:
        """As `carry_out`, for commands that may block."""
        answer = self.carry_out(command)
        if answer is not None:
            return answer
        keys, timeout_s = blocking(encoded(command))
        if not keys:
            return None
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while answer is None and loop.time() < until_s:
            bell = loop.create_future()
            for key in keys:
                self.keys.waiting.setdefault(key, []).append(bell)
            try:
                async with asyncio.timeout_at(until_s):
                    await bell
            except TimeoutError:
                return None
            finally:
                for key in keys:
                    self.keys.waiting[key].remove(bell)
            answer = self.carry_out(command)
        return answer


def encoded(command: Sequence[Any]) -> list[bytes]:
    """A command's words as they are sent."""
    words = [word if type(word) is bytes else _word(word) for word in command]
    if b" " in words[0]:  # the client library's name of a command and its part
        words[:1] = words[0].split()
    return words


def _word(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else repr(value).encode()


def blocking(words: Words) -> tuple[Words, float]:
    """The keys that a command waits for, and how long; no keys: it does not."""
    if words[0] == b"BLPOP":
        return words[1:-1], float(words[-1])
    if words[0] in (b"XREAD", b"XREADGROUP") and b"BLOCK" in words:
        names = words[words.index(b"STREAMS") + 1 :]
        return names[: len(names) // 2], int(words[words.index(b"BLOCK") + 1]) / 1000
    return [], 0.0


class DirectChannel:
    """Channel (see fabric/bus) without a way: a call is carried out whole before anybody else's turn."""

    is_sharded = False

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def ask(self, *command: Argument) -> Any:
        return checked(await self.ask_many([command]))[0]

    async def ask_many(self, commands: Sequence[Command]) -> list[Any]:
        answers: list[Any] = []
        for command in commands:
            try:
                answers.append(await self._broker.ask(command))
            except ResponseError as error:
                answers.append(error)
        return answers

    ask_alone = ask_many


class DirectClient(Redis):
    """The client library's client, whose commands go to a broker of this process."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(connection_pool=ConnectionPool(protocol=2))
        self.broker = broker
        self.connection_pool.broker_name = "stand-in"  # type: ignore[attr-defined]

    def channel(self) -> DirectChannel:
        return DirectChannel(self.broker)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        return _DirectPipeline(self)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = await self.broker.ask(args)
        options.pop("keys", None)
        shape = self.response_callbacks.get(args[0])
        return answer if shape is None else shape(answer, **options)


class _DirectPipeline(Pipeline):
    def __init__(self, client: DirectClient) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, False, None)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack, self.command_stack = self.command_stack, []
        answers: list[Any] = []
        for args, options in stack:
            try:
                answers.append(await self._client.execute_command(*args, **options))
            except ResponseError as error:
                answers.append(error)
        if raise_on_error:
            self.raise_first_error(stack, answers)
        return answers
