"""Asking another relay: connections that prove themselves, and chunks that are verified before anyone sees them.

- A peer can delay chunks, never change them: they are checked against the hashes of our own manifest. Chunks without a
  hash are not asked for: the broker gives them.
- Every wait has an end (RelayOptions); any fault of a peer is PeerLost, and its connection is closed.
- Connections are kept between requests, because over long ways a new one costs several round trips. A kept connection
  that does not answer may have been cut on the way: a fresh one is tried before the relay counts as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ..contract.errors import PeerLost, WireError
from ..contract.wire import dump_json
from ..format.manifest import WeightManifest
from ..host.network import network_cause
from .node_cache import chunk_name
from .relay_frames import HELLO, INDEX, MAGIC, VERSION, Word, frame, proof, read_address, read_body, read_head, send
from .relay_options import RelayOptions

BUFFER_BYTES = 1 << 20  # read ahead of the chunk that is being checked
REQUEST_COUNT_MAX = 4096  # chunks asked for at once: such a frame has some hundred kilobytes
IDLE_COUNT_MAX = 4  # one relay is asked by a few tasks at a time


class Connection:
    """An open, proven connection to one relay."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, options: RelayOptions) -> None:
        self._reader = reader
        self._writer = writer
        self._options = options
        self._head: tuple[Word, int] | None = None  # of a frame whose body was not read yet

    @classmethod
    async def open(cls, address: str, options: RelayOptions) -> Connection:
        """Connect.

        Raises:
            PeerLost: nobody there, silent, of another version, or it refuses us.
        """
        try:
            host, port, secret = read_address(address)
            async with asyncio.timeout(options.parent_stall_s):
                reader, writer = await asyncio.open_connection(host, port, limit=BUFFER_BYTES)
        except (OSError, TimeoutError, WireError, ValueError) as error:  # ValueError: no host can have such a name
            cause = network_cause(error) if isinstance(error, OSError) else str(error)
            raise PeerLost(f"a peer cannot be reached: {cause}") from error
        connection = cls(reader, writer, options)
        try:
            nonce = _read_hello(await connection.answer(Word.HELLO))
            await connection.ask(Word.AUTH, proof(secret, nonce))
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_usable(self) -> bool:
        """True if the other side has not closed it."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def ask(self, word: Word, *parts: bytes) -> None:
        """Send one frame.

        Raises:
            PeerLost: the other side does not take it.
        """
        await send(self._writer, frame(word, *parts), self._options.parent_stall_s)

    async def ask_json(self, word: Word, facts: Mapping[str, Any]) -> None:
        """Send one frame of facts. Raises PeerLost, as `ask`."""
        await self.ask(word, dump_json(dict(facts)))

    async def listen(self) -> None:
        """Wait for the head of the next frame, for `next`. Raises PeerLost: silent for parent_stall_s, or as `next`."""
        if self._head is not None:
            return
        try:
            self._head = await read_head(self._reader, self._options.parent_stall_s)
        except WireError as error:
            raise PeerLost(f"a peer is not a relay of ours: {error}") from error

    async def next(self) -> tuple[Word, bytes]:
        """Return the next frame that is not BUSY.

        Raises:
            PeerLost: silent for parent_stall_s, busy for patience_s, too slow, gone, refusing, or not one of us.
        """
        word, size = await self._next_head()
        try:
            async with asyncio.timeout(self._options.body_s(size)):
                data = await read_body(self._reader, size, self._options.parent_stall_s)
        except TimeoutError as error:
            raise PeerLost(f"a peer took {self._options.body_s(size):g} s for {size:,} bytes") from error
        if word == Word.REFUSED:
            raise PeerLost(f"a peer refuses: {data.decode(errors='replace')}")
        return word, data

    async def _next_head(self) -> tuple[Word, int]:
        try:
            async with asyncio.timeout(self._options.patience_s):
                while True:
                    await self.listen()
                    assert self._head is not None
                    head, self._head = self._head, None
                    if head[0] != Word.BUSY:
                        return head
        except TimeoutError as error:
            raise PeerLost(f"a peer has been busy for {self._options.patience_s:g} s") from error

    async def answer(self, expected: Word) -> bytes:
        """Return the next frame, which must be that word. Raises PeerLost: it is another, or as `next`."""
        word, data = await self.next()
        if word != expected:
            raise PeerLost(f"a peer sent {word.name} where {expected.name} was due")
        return data

    def close(self) -> None:
        """Drop the connection, with any frame under way."""
        self._writer.transport.abort()


class RelayClient:
    """A relay as its children see it."""

    def __init__(self, address: str, options: RelayOptions) -> None:
        self._address = address
        self._options = options
        self._idle: list[Connection] = []
        self._is_closed = False

    async def chunks(
        self, manifest: WeightManifest, indices: Sequence[int]
    ) -> AsyncGenerator[tuple[int, bytes | None], None]:
        """Yield chunks as they come, in any order, verified; None for chunks that the relay does not have.

        Raises:
            PeerLost: the rest will not come from there.
        """
        parts = [indices[first : first + REQUEST_COUNT_MAX] for first in range(0, len(indices), REQUEST_COUNT_MAX)]
        if not parts:
            return
        connection = await self._ask_first(_request(manifest, parts[0]))
        is_done = False
        try:
            for number, part in enumerate(parts):
                left = set(part)
                if number:
                    await connection.ask_json(Word.CHUNKS, _request(manifest, part))
                while left:
                    index, data = await _next_chunk(connection, manifest, left)
                    left.discard(index)
                    yield index, data
                await connection.answer(Word.DONE)
            is_done = True
        finally:
            if is_done and not self._is_closed and len(self._idle) < IDLE_COUNT_MAX:
                self._idle.append(connection)
            else:
                connection.close()

    async def _ask_first(self, request: Mapping[str, Any]) -> Connection:
        """Send the request; return the connection: a kept one that begins to answer, else a fresh one."""
        while self._idle:
            connection = self._idle.pop()
            try:
                if connection.is_usable:
                    await connection.ask_json(Word.CHUNKS, request)
                    await connection.listen()
                    return connection
            except PeerLost:
                self._drop_idle()  # they are older
            except BaseException:
                connection.close()
                raise
            connection.close()
        connection = await Connection.open(self._address, self._options)
        try:
            await connection.ask_json(Word.CHUNKS, request)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Drop the connections; a connection in use goes when it is done."""
        self._is_closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _request(manifest: WeightManifest, indices: Sequence[int]) -> dict[str, Any]:
    link = manifest.link
    rows = [[index, *chunk_name(manifest, index)] for index in indices]
    return {
        "run_id": manifest.run_id,
        "version": link.version,
        "kind": link.kind,
        "epoch": link.epoch,
        "chunks": rows,
    }


async def _next_chunk(connection: Connection, manifest: WeightManifest, left: set[int]) -> tuple[int, bytes | None]:
    word, data = await connection.next()
    if word not in (Word.CHUNK, Word.MISSING) or len(data) < INDEX.size:
        raise PeerLost(f"a peer sent {word.name} where a chunk was due")
    (index,) = INDEX.unpack_from(data)
    if index not in left:
        raise PeerLost(f"a peer sent chunk {index}, which was not asked for")
    if word == Word.MISSING:
        return index, None
    chunk = data[INDEX.size :]
    if not await asyncio.to_thread(manifest.proves, index, chunk):
        raise PeerLost(f"a peer sent other bytes than chunk {index} of version {manifest.version}")
    return index, chunk


def _read_hello(data: bytes) -> bytes:
    """Read the nonce of a greeting. Raises PeerLost: it is not a greeting of ours."""
    with contextlib.suppress(struct.error):
        magic, version, nonce = HELLO.unpack(data)
        if magic == MAGIC and version == VERSION:
            return bytes(nonce)
    raise PeerLost(f"a peer does not speak version {VERSION} of the relay's protocol: upgrade the older side")
