"""The broker's own limit: the very commands of our queues, replayed by a client that neither encodes nor looks.

- A tape is recorded through a tap between our client and a private broker: every command of one pass of the lanes,
  step by step. The lanes go in step, so within a step no command depends on the answer to another.
- A replay sends them again for another run, 16 commands in one write and two writes under way. Only sending and reading
  are timed. Stream entries get their names from the broker, so those are looked up and put in between the steps.
- A replay must do to the broker what the recording did: `check_replay` compares the counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

import hiredis
import redis

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.keys import ShardKeys

from .life import Lane, Shape, Tally, lanes_of, live, open_run

WINDOW = 16  # commands in one write
TAPE_RUN = "tape"
CONNECTION_COMMANDS = {b"CLIENT", b"HELLO", b"AUTH", b"SELECT", b"PING", b"INFO"}

Command = list[bytes]
Entries = dict[bytes, list[bytes]]  # stream → names of its entries, in order


@dataclass
class Tape:
    """The commands of each step, the entries that the recording saw in its streams, and where its fences begin."""

    shape: Shape
    first_fence: bytes = b""
    steps: list[list[Command]] = field(default_factory=list)
    entries: Entries = field(default_factory=dict)

    @property
    def command_count(self) -> int:
        return sum(map(len, self.steps))


async def record(shape: Shape) -> Tape:
    """Record one pass of `shape` on a private broker."""
    tape = Tape(shape)
    with EmbeddedBroker.start() as broker, TemporaryDirectory(prefix="rollfab-tap-") as directory:
        tap = _Tap(Path(unquote(urlsplit(broker.url).path)), Path(directory) / "tap.sock")
        async with await RedisFabric.open(broker.url, client_name="bench") as fabric:
            warm = Shape(lane_count=1, batch_count=1, group_size=1, turn_count=1)
            await live(lanes_of(fabric, await open_run(fabric, "warm"), warm, Tally()), 1)  # loads the scripts
            run = await open_run(fabric, TAPE_RUN)
        async with tap, await RedisFabric.open(tap.url, client_name="bench-tape") as fabric:
            lanes = lanes_of(fabric, run, shape, Tally())
            with _Door(broker.url) as door:
                tape.first_fence = door.ask(b"HGET", ShardKeys(TAPE_RUN, 0).run.encode(), b"first_fence")
                for steps in zip(*(lane.steps() for lane in lanes), strict=True):
                    tap.commands = []
                    for _, step in steps:
                        await step()
                    tape.steps.append(tap.commands)
                    _note_entries(door, _streams(lanes), tape.entries)
    return tape


def replay(tape: Tape, url: str, run_id: str) -> float:
    """Seconds that the bare broker takes for the tape. The run must be open, and the scripts loaded."""
    old, new = f"{{{TAPE_RUN}.".encode(), f"{{{run_id}.".encode()
    entries: Entries = {}
    duration_s = 0.0
    with _Door(url) as door:
        # Its commands name claims by their fences
        door.ask(b"HSET", ShardKeys(run_id, 0).run.encode(), b"first_fence", tape.first_fence)
        for step in tape.steps:
            names = {
                stream: dict(zip(known, entries.get(stream.replace(old, new), ()), strict=False))
                for stream, known in tape.entries.items()
            }
            packed = [_packed(_renamed(command, names, old, new)) for command in step]
            duration_s += door.send_all(packed)
            _note_entries(door, [stream.replace(old, new) for stream in tape.entries], entries)
    return duration_s


async def check_replay(fabric: RedisFabric, tape: Tape, run_id: str) -> None:
    """Every job of the tape was done; anything else is a mistake of the replay, and its time means nothing."""
    shape, counters = tape.shape, (await fabric.board.run_status(run_id)).counters
    trajectory_count = shape.lane_count * shape.batch_count
    assert counters.get("turns_settled", 0) == trajectory_count * shape.turn_count, counters
    assert counters["trajectories_completed"] == trajectory_count, counters
    assert counters["groups_consumed"] == trajectory_count // shape.group_size, counters


def _renamed(command: Command, names: dict[bytes, dict[bytes, bytes]], old: bytes, new: bytes) -> Command:
    known = next((names[word] for word in command if word in names), {})
    return [known.get(word) or word.replace(old, new) for word in command]


def _packed(command: Sequence[bytes]) -> bytes:
    words: Any = tuple(command)  # its declared type is a tuple of one
    return bytes(hiredis.pack_command(words))


def _streams(lanes: Sequence[Lane]) -> list[bytes]:
    keys = ShardKeys(TAPE_RUN, 0)
    return [keys.completed.encode(), *(keys.inbox(lane.agent_id).encode() for lane in lanes)]


def _note_entries(door: _Door, streams: Sequence[bytes], entries: Entries) -> None:
    """Add what is new in the streams; entries that were deleted meanwhile stay noted."""
    for stream in streams:
        known = entries.setdefault(stream, [])
        after = b"(" + known[-1] if known else b"-"
        known += [name for name, _ in door.ask(b"XRANGE", stream, after, b"+")]


class _Door:
    """One connection, used raw."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, protocol=2)
        self._connection: Any = self._client.connection_pool.get_connection()

    def send_all(self, packed: Sequence[bytes]) -> float:
        """Send commands and read all answers, unseen but for errors; returns seconds."""
        windows = [packed[start : start + WINDOW] for start in range(0, len(packed), WINDOW)]
        joined = [b"".join(window) for window in windows]
        start_s = time.perf_counter()
        for index, window in enumerate(joined):
            self._connection.send_packed_command([window])
            if index:
                self._read(len(windows[index - 1]))
        if windows:
            self._read(len(windows[-1]))
        return time.perf_counter() - start_s

    def _read(self, count: int) -> None:
        for _ in range(count):
            self._connection.read_response()

    def ask(self, *command: bytes) -> Any:
        self._connection.send_packed_command([_packed(command)])
        return self._connection.read_response()

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.disconnect()
        self._client.close()


class _Tap:
    """Passes bytes between clients and a broker's socket, and notes the commands."""

    def __init__(self, broker: Path, path: Path) -> None:
        self.url = f"unix://{path}"
        self.commands: list[Command] = []
        self._broker = broker
        self._path = path
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _Tap:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._pipes:
            task.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        broker, to_broker = await asyncio.open_unix_connection(self._broker)
        for task in (
            asyncio.ensure_future(self._pass(client, to_broker, hiredis.Reader())),
            asyncio.ensure_future(self._pass(broker, to_client, None)),
        ):
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, noted: hiredis.Reader | None
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                if noted is not None:
                    noted.feed(data)
                    while (command := noted.gets()) is not False:
                        if command[0].upper() not in CONNECTION_COMMANDS:
                            self.commands.append(command)
                target.write(data)
                await target.drain()
        finally:
            target.close()
            with contextlib.suppress(OSError):
                await target.wait_closed()
