"""The messages inside a group: the manifest, then the chunks as one stream, then which member lacks which chunk.

    broadcast   u64                          bytes of the manifest
    broadcast   uint8 (m,)                   the manifest, as it also goes to the broker; cut into messages
    pass:       broadcast uint8, message by message: the pass' chunks, one behind the other
                combine   uint8 (members, chunks): 1 where a member lacks a chunk
    next pass:  the chunks that somebody lacks, until nobody does, or PASS_COUNT_MAX

- A chunk counts as received only with the digest that the manifest promises; a corrupt chunk comes again.
- The last combine is the confirmation: a member in it that lacks nothing has said so itself.
- Memory: the chunks, and one message. Copying and checking is done beside the event loop.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...contract.limits import RECORD_BYTES_MAX
from ...format.manifest import WeightManifest
from .group import Group
from .invitations import CollectiveFailed, Offer, Watch, manifest_digest

PASS_COUNT_MAX = 3
MANIFEST_BYTES_MAX = RECORD_BYTES_MAX["WeightManifest"]
LENGTH = struct.Struct("<Q")

Bytes = NDArray[np.uint8]
Missing = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Collected:
    """A version as a receiver got it. chunks: by index, with the right digests; all of them unless some stayed bad."""

    manifest: WeightManifest
    chunks: dict[int, bytes]


async def send(group: Group, manifest: WeightManifest, chunks: Sequence[bytes], watch: Watch) -> Missing:
    """Send a version. Return uint8 (members, chunks or 1): 1 where the member of rank row + 1 lacks the chunk.

    Args:
        watch: called with the number of each message of chunks and its bytes before it leaves.

    Raises:
        CollectiveFailed: a member is gone or stands still.
    """
    data = manifest.encode()
    for part in (LENGTH.pack(len(data)), data):
        for message in _messages([part], group.memory):
            await group.broadcast(len(message))
    wanted: Sequence[int] = range(len(chunks))
    missing = _nothing_missing(group, len(chunks))
    for _ in range(PASS_COUNT_MAX):
        messages = enumerate(_messages([chunks[index] for index in wanted], group.memory))
        while (found := await asyncio.to_thread(next, messages, None)) is not None:
            watch(*found)
            await group.broadcast(len(found[1]))
        missing = await _agree(group, np.zeros_like(missing))
        wanted = _wanted(missing)
        if not wanted:
            break
    return missing


async def receive(group: Group, offer: Offer, watch: Watch) -> Collected:
    """Receive a version.

    Args:
        watch: called with the number of each message of chunks and its bytes as they came.

    Raises:
        CollectiveFailed: a member is gone or stands still, or the manifest is not the offered one.
    """
    manifest = await _receive_manifest(group, offer)
    chunk_count = len(manifest.chunk_bytes)
    good: dict[int, bytes] = {}
    wanted: Sequence[int] = range(chunk_count)
    for _ in range(PASS_COUNT_MAX):
        sieve = _Sieve(manifest, wanted, good)
        for index, byte_count in enumerate(_sizes(sum(int(manifest.chunk_bytes[each]) for each in wanted), group)):
            message = await group.broadcast(byte_count)
            watch(index, message)
            await asyncio.to_thread(sieve.take, message)
        await asyncio.to_thread(sieve.take, np.empty(0, dtype=np.uint8))  # also chunks without bytes, in no message
        missing = _nothing_missing(group, chunk_count)
        missing[group.seat.rank - 1, [index for index in range(chunk_count) if index not in good]] = 1
        wanted = _wanted(await _agree(group, missing))
        if not wanted:
            break
    return Collected(manifest, good)


async def _receive_manifest(group: Group, offer: Offer) -> WeightManifest:
    (length,) = LENGTH.unpack((await group.broadcast(LENGTH.size)).tobytes())
    if not 0 < length <= MANIFEST_BYTES_MAX:
        raise CollectiveFailed(f"a manifest of {length} bytes was announced")
    data = b"".join([(await group.broadcast(size)).tobytes() for size in _sizes(length, group)])
    if manifest_digest(data) != offer.manifest_digest:
        raise CollectiveFailed(f"the manifest of version {offer.version} came with another digest than was offered")
    manifest = WeightManifest.decode(data)
    if int(manifest.chunk_bytes.sum()) != offer.payload_bytes or (manifest.chunk_bytes < 0).any():
        raise CollectiveFailed(f"version {offer.version} has another size than was offered")
    if not manifest.has_proofs:
        raise CollectiveFailed(f"version {offer.version} came without hashes of its chunks: upgrade its publisher")
    return manifest


def _sizes(byte_count: int, group: Group) -> Iterator[int]:
    """Yield the bytes of each message that a stream is cut into."""
    for start in range(0, byte_count, len(group.memory)):
        yield min(len(group.memory), byte_count - start)


def _messages(chunks: Sequence[bytes], buffer: Bytes) -> Iterator[Bytes]:
    """Fill the buffer with the chunks, in a row, and again; yield what is filled, which is valid until the next."""
    filled = 0
    for chunk in chunks:
        rest = np.frombuffer(chunk, dtype=np.uint8)
        while len(rest):
            part = rest[: len(buffer) - filled]
            buffer[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


class _Sieve:
    """Cuts the messages of a pass into chunks, and puts those that are right among the good ones."""

    def __init__(self, manifest: WeightManifest, wanted: Sequence[int], good: dict[int, bytes]) -> None:
        self._manifest = manifest
        self._wanted = list(wanted)[::-1]  # the next one is the last
        self._good = good
        self._parts: list[Bytes] = []  # of a chunk that is not yet whole

    def take(self, message: Bytes) -> None:
        """Take the next message, whose bytes may change afterwards."""
        while self._wanted:
            index = self._wanted[-1]
            left = int(self._manifest.chunk_bytes[index]) - sum(map(len, self._parts))
            part, message = message[:left], message[left:]
            if len(part) < left:
                self._parts.append(part.copy())
                return
            chunk = b"".join([*(each.data for each in self._parts), part.data])
            self._parts = []
            self._wanted.pop()
            if index not in self._good and self._manifest.proves(index, chunk):
                self._good[index] = chunk


def _nothing_missing(group: Group, chunk_count: int) -> Missing:
    return np.zeros(
        (group.seat.size - 1, max(1, chunk_count)), dtype=np.uint8
    )  # also a version without chunks is confirmed


async def _agree(group: Group, missing: Missing) -> Missing:
    return (await group.combine(missing.reshape(-1))).reshape(missing.shape)


def _wanted(missing: Missing) -> list[int]:
    """Return the chunks that any member lacks, ascending."""
    return [int(index) for index in np.flatnonzero(missing.any(axis=0))]
