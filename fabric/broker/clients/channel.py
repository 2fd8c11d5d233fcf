"""Many commands, few round trips.

- Commands that tasks ask for at the same time travel together: a hundred trajectories that settle at once cost one
  round trip. One shared round trip is under way at a time; commands asked meanwhile wait for it and go with the next.
- Answers are bytes, numbers and lists as the broker sends them (RESP2), with none of the client library's shaping;
  packing and parsing are done by hiredis.
- Lost connections are retried as the pool says (broker/connection.py), with all commands of the round trip: it must be
  safe to repeat them, as it is with the scripts.

The queues choose the commands and know what the answers mean.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import hiredis
from redis import exceptions
from redis.asyncio import Redis

Argument = str | bytes | int | float
Command = Sequence[Argument]

COMMAND_COUNT_MAX = 256  # of one shared round trip: bounds how many wait for its slowest command


class Channel:
    """Asks one broker, over connections of the client's pool."""

    is_sharded: ClassVar[bool] = False  # a command may name keys of any slot

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._open: _Batch | None = None
        self._turn = asyncio.Lock()  # one shared round trip at a time: commands asked meanwhile join the next

    async def ask(self, *command: Argument) -> Any:
        """Return the answer to one command; raise its error."""
        return checked(await self.ask_many([command]))[0]

    async def ask_many(self, commands: Sequence[Command]) -> list[Any]:
        """Return answers in order, an error as an exception object in its place. No command may block."""
        if not commands:
            return []  # a connection that sends nothing gets no answer, and would warn of the broker's silence
        batch = self._open
        if batch is None or len(batch.commands) >= COMMAND_COUNT_MAX:
            batch = self._open = _Batch()
            batch.task = asyncio.ensure_future(self._flush(batch))
        return await batch.join(commands)

    async def ask_alone(self, commands: Sequence[Command]) -> list[Any]:
        """Do the same as `ask_many`, in a round trip of its own: for commands that block."""
        packed = b"".join([_packed(command) for command in commands])
        pool: Any = self._client.connection_pool
        connection = await pool.get_connection()

        async def round_trip() -> list[Any]:
            connection.note(commands)
            await connection.send_packed_command(packed)
            try:
                # One timer for all answers; one for each would cost more than reading them.
                async with asyncio.timeout(connection.socket_timeout):
                    return [await _answer(connection) for _ in commands]
            except TimeoutError as error:
                raise exceptions.TimeoutError(f"no answer within {connection.socket_timeout} s") from error

        try:
            answers: list[Any] = await connection.retry.call_with_retry(round_trip, lambda _: connection.disconnect())
            return answers
        finally:
            await pool.release(connection)

    async def _flush(self, batch: _Batch) -> None:
        async with self._turn:
            if self._open is batch:
                self._open = None
            if batch.is_abandoned:
                return
            batch.is_sent = True
            try:
                batch.deliver(await self.ask_alone(batch.commands))
            except Exception as error:  # noqa: BLE001 - each task that waits raises it; the channel goes on
                batch.fail(error)


class _Batch:
    """The commands that several tasks ask in one round trip."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.task: asyncio.Future[None] | None = None
        self.is_sent = False  # from here on nobody joins
        self._waiting: list[tuple[slice, asyncio.Future[list[Any]]]] = []

    async def join(self, commands: Sequence[Command]) -> list[Any]:
        """Add these commands and wait for their answers."""
        start = len(self.commands)
        self.commands += commands
        answers: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((slice(start, len(self.commands)), answers))
        try:
            return await answers
        except asyncio.CancelledError:
            self._leave()
            raise

    @property
    def is_abandoned(self) -> bool:
        """True if every task that asked was cancelled."""
        return all(answers.done() for _, answers in self._waiting)

    def _leave(self) -> None:
        """Note that a task was cancelled: a round trip that nobody waits for must not outlive the client."""
        if self.is_sent and self.is_abandoned and self.task is not None:
            self.task.cancel()

    def deliver(self, found: list[Any]) -> None:
        for part, answers in self._waiting:
            if not answers.done():
                answers.set_result(found[part])

    def fail(self, error: Exception) -> None:
        for _, answers in self._waiting:
            if not answers.done():
                answers.set_exception(error)


def _packed(command: Command) -> bytes:
    words: Any = tuple(command)  # its declared type is a tuple of one
    return bytes(hiredis.pack_command(words))


async def _answer(connection: Any) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except exceptions.ResponseError as error:
        return error


def checked(answers: list[Any]) -> list[Any]:
    """Return the answers, or raise the first error among them."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def stream_entries(answer: Any) -> list[tuple[str, bytes, list[bytes]]]:
    """Read an XREAD or XREADGROUP answer: (stream, entry id, fields and values in turn); a deleted entry has none."""
    return [(name.decode(), entry_id, fields or []) for name, entries in answer or () for entry_id, fields in entries]
