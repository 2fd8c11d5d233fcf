"""The frames that relays exchange over TCP: length-prefixed, bounded, versioned, with a shared secret.

    offset  size  content
    0       1     the kind of frame (Word)
    1       4     length of the body, little-endian, at most BYTES_MAX of that word

    server                                  client
    HELLO   magic, version, nonce     →
                                      ←     AUTH    HMAC-SHA256 of the nonce under the server's secret
                                      ←     CHUNKS | SNAPSHOT   (JSON), one at a time, any number
    answers                           →
    REFUSED (text), then the end      →

- The secret itself never travels here. Peers learn it with the address, from the broker: a user who may read weights
  there may read them here. Bytes travel in the clear, as they do to a broker without TLS: keep relays inside a trusted
  network.
- Every wait has an end: a peer that sends nothing for `stall_s` is lost. A server that is busy says so meanwhile.
- Nothing is allocated on a header's word beyond the bound of its frame; before its proof a client may send AUTH alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import struct
from collections.abc import Awaitable
from enum import IntEnum
from typing import TypeVar
from urllib.parse import urlsplit

from ..contract.errors import PeerLost, WireError
from ..host.helpers import end_all

T = TypeVar("T")

MAGIC = b"rollfab-relay"
VERSION = 2  # chunks are named by hash
FRAME = struct.Struct("<BI")
HELLO = struct.Struct("<13sH16s")  # magic, version, nonce
INDEX = struct.Struct("<I")  # before the bytes of a chunk
BLOCK = struct.Struct("<IQ")  # before the bytes of a block: its number, and their xxh3-64
ADDRESS_CHARS_MAX = 512
HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
SECRET = re.compile(r"[A-Za-z0-9_-]{1,128}")
READ_BYTES = 1 << 18  # each piece of this size that arrives, or is taken, shows that the peer lives


class Word(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    AUTH = 2
    CHUNKS = 3  # JSON: run_id, version, kind, epoch, chunks: rows [index, hash, size, xxh3-64]
    SNAPSHOT = 4  # JSON: run_id, at_least_version
    CHUNK = 10  # INDEX, bytes
    MISSING = 11  # INDEX
    BUSY = 12  # wait
    DONE = 13  # all was said
    REFUSED = 14  # text: why, and what to do
    LIVE = 20  # JSON: version, layout_digest; of the blocks that follow
    PART = 21  # BLOCK, bytes
    MOVED = 22  # JSON: the newer version of the blocks that follow


BYTES_MAX = {
    Word.HELLO: HELLO.size,
    Word.AUTH: hashlib.sha256().digest_size,
    Word.CHUNKS: 1 << 20,
    Word.SNAPSHOT: 1 << 12,
    Word.CHUNK: 16 << 20,
    Word.MISSING: INDEX.size,
    Word.BUSY: 0,
    Word.DONE: 0,
    Word.REFUSED: 1 << 12,
    Word.LIVE: 1 << 12,
    Word.PART: 16 << 20,
    Word.MOVED: 1 << 12,
}


def make_address(host: str, port: int, secret: str) -> str:
    """Make the address that a holder tells the broker: where its relay is, and the secret that opens it."""
    return f"relay://{secret}@{f'[{host}]' if ':' in host else host}:{port}"


def read_address(address: str) -> tuple[str, int, str]:
    """Take an address apart: host, port and secret.

    Raises:
        WireError: not the address of a relay. Its text does not repeat the secret.
    """
    try:
        parts = urlsplit(address)
        host, port, secret = parts.hostname, parts.port, parts.username
    except ValueError:
        host = port = secret = None
    if not address.startswith("relay://") or not host or not port or not secret:
        raise WireError("a holder's address is not one of a relay: relay://secret@host:port")
    if len(address) > ADDRESS_CHARS_MAX or not HOST.fullmatch(host) or not SECRET.fullmatch(secret):
        raise WireError("a holder's address is not one of a relay: it has a host or secret that none has")
    return host, port, secret


def proof(secret: str, nonce: bytes) -> bytes:
    """Make the 32 bytes that show that a client knows the server's secret."""
    return hmac.digest(secret.encode(), MAGIC + nonce, "sha256")


def frame(word: Word, *parts: bytes | memoryview) -> bytes:
    """Build one frame. Raises AssertionError for a frame above its bound: that would be our fault."""
    size = sum(len(part) for part in parts)
    assert size <= BYTES_MAX[word], f"{word.name} of {size} bytes"
    return b"".join((FRAME.pack(word, size), *parts))


async def read_frame(reader: asyncio.StreamReader, stall_s: float) -> tuple[Word, bytes]:
    """Read the next frame.

    Raises:
        PeerLost: the other side is gone, or was silent for `stall_s`. WireError: it does not speak like us.
    """
    word, size = await read_head(reader, stall_s)
    return word, await read_body(reader, size, stall_s)


async def read_head(reader: asyncio.StreamReader, stall_s: float) -> tuple[Word, int]:
    """Read the kind of the next frame, and how many bytes follow. Raises the same as `read_frame`."""
    code, size = FRAME.unpack(await read_body(reader, FRAME.size, stall_s))
    try:
        word = Word(code)
    except ValueError as error:
        raise WireError(f"a relay sent word {code}, which version {VERSION} does not know") from error
    if size > BYTES_MAX[word]:
        raise WireError(f"a relay sent {word.name} of {size:,} bytes, at most {BYTES_MAX[word]:,} are allowed")
    return word, int(size)


async def read_body(reader: asyncio.StreamReader, size: int, stall_s: float) -> bytes:
    """Read `size` bytes, however long they take while some come. Raises PeerLost, as `read_frame`."""
    parts: list[bytes] = []
    while size:
        try:
            async with asyncio.timeout(stall_s):
                part = await reader.read(min(size, READ_BYTES))
        except (OSError, TimeoutError) as error:
            raise PeerLost(f"a peer is silent or gone: {error or f'nothing for {stall_s:g} s'}") from error
        if not part:
            raise PeerLost("a peer closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


async def send(writer: asyncio.StreamWriter, data: bytes, stall_s: float) -> None:
    """Write, and wait until the other side has taken most of it, however long it takes while some bytes go.

    Raises:
        PeerLost: it took less than READ_BYTES within `stall_s`, or is gone.
    """
    view = memoryview(data)
    try:
        for start in range(0, len(view), READ_BYTES):
            async with asyncio.timeout(stall_s):
                writer.write(view[start : start + READ_BYTES])
                await writer.drain()
    except (OSError, TimeoutError) as error:
        raise PeerLost(f"a peer does not take what it asked for: {error or f'for {stall_s:g} s'}") from error


async def while_busy(writer: asyncio.StreamWriter, work: Awaitable[T], *, every_s: float, stall_s: float) -> T:
    """Wait for `work`, and tell the other side every `every_s` that we do.

    Raises:
        PeerLost: the other side is gone, as `send`; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=every_s)
            if not task.done():
                await send(writer, frame(Word.BUSY), stall_s)
        return task.result()
    finally:
        await end_all([task])
