"""The messages inside a group: the manifest, then the chunks as one stream, then which member lacks which chunk.

    broadcast   int64 (1,)                   bytes of the manifest
    broadcast   uint8 (m,)                   the manifest, as it also goes to the broker
    pass:       broadcast uint8, message by message: the pass' chunks, one behind the other
                combine   uint8 (members, chunks): 1 where a member lacks a chunk
    next pass:  the chunks that somebody lacks, until nobody does, or PASS_COUNT_MAX

- A chunk counts as received only with the digest that the manifest promises; a corrupt chunk comes again.
- The last combine is the confirmation: a member in it that lacks nothing has said so itself.
- Memory: the chunks, and one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...contract.limits import RECORD_BYTES_MAX
from ...format.manifest import WeightManifest
from .group import Group
from .invitations import CollectiveFailed, Offer, Watch, manifest_digest

PASS_COUNT_MAX = 3
MANIFEST_BYTES_MAX = RECORD_BYTES_MAX["WeightManifest"]

Missing = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Collected:
    """A version as a receiver got it. chunks: by index, with the right digests; all of them unless some stayed bad."""

    manifest: WeightManifest
    chunks: dict[int, bytes]


def send(group: Group, manifest: WeightManifest, chunks: Sequence[bytes], watch: Watch) -> Missing:
    """Send a version. Return uint8 (members, chunks or 1): 1 where the member of rank row + 1 lacks the chunk.

    Args:
        watch: called with the number of each message and its bytes before it leaves.

    Raises:
        CollectiveFailed: a member is gone or stands still.
    """
    data = manifest.encode()
    group.broadcast(_tensor(group, np.array([len(data)], dtype=np.int64)))
    group.broadcast(_tensor(group, np.frombuffer(data, dtype=np.uint8).copy()))
    wanted: Sequence[int] = range(len(chunks))
    missing = _nothing_missing(group, len(chunks))
    for _ in range(PASS_COUNT_MAX):
        for index, message in enumerate(_messages([chunks[index] for index in wanted], group.message_bytes)):
            watch(index, message)
            group.broadcast(_tensor(group, message))
        missing = _agree(group, np.zeros_like(missing))
        wanted = _wanted(missing)
        if not wanted:
            break
    return missing


def receive(group: Group, offer: Offer, watch: Watch) -> Collected:
    """Receive a version.

    Args:
        watch: called with the number of each message and its bytes as they came.

    Raises:
        CollectiveFailed: a member is gone or stands still, or the manifest is not the offered one.
    """
    manifest = _receive_manifest(group, offer)
    chunk_count = len(manifest.chunk_bytes)
    good: dict[int, bytes] = {}
    wanted: Sequence[int] = range(chunk_count)
    for _ in range(PASS_COUNT_MAX):
        for index, chunk in zip(wanted, _receive_chunks(group, manifest, wanted, watch), strict=True):
            if index not in good and manifest.proves(index, chunk):
                good[index] = chunk
        missing = _nothing_missing(group, chunk_count)
        missing[group.seat.rank - 1, [index for index in range(chunk_count) if index not in good]] = 1
        wanted = _wanted(_agree(group, missing))
        if not wanted:
            break
    return Collected(manifest, good)


def _receive_manifest(group: Group, offer: Offer) -> WeightManifest:
    length = torch.zeros(1, dtype=torch.int64, device=group.seat.device)
    group.broadcast(length)
    if not 0 < int(length[0]) <= MANIFEST_BYTES_MAX:
        raise CollectiveFailed(f"a manifest of {int(length[0])} bytes was announced")
    tensor = group.empty(int(length[0]))
    group.broadcast(tensor)
    data = tensor.cpu().numpy().tobytes()
    if manifest_digest(data) != offer.manifest_digest:
        raise CollectiveFailed(f"the manifest of version {offer.version} came with another digest than was offered")
    manifest = WeightManifest.decode(data)
    if int(manifest.chunk_bytes.sum()) != offer.payload_bytes or (manifest.chunk_bytes < 0).any():
        raise CollectiveFailed(f"version {offer.version} has another size than was offered")
    if not manifest.has_proofs:
        raise CollectiveFailed(f"version {offer.version} came without hashes of its chunks: upgrade its publisher")
    return manifest


def _messages(chunks: Sequence[bytes], message_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """Cut the chunks, in a row, into arrays of `message_bytes`, the last one shorter; each is valid until the next."""
    buffer = np.empty(message_bytes, dtype=np.uint8)
    filled = 0
    for chunk in chunks:
        rest = np.frombuffer(chunk, dtype=np.uint8)
        while len(rest):
            part = rest[: message_bytes - filled]
            buffer[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == message_bytes:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _receive_chunks(group: Group, manifest: WeightManifest, wanted: Sequence[int], watch: Watch) -> Iterator[bytes]:
    """Yield the chunks of a pass, unchecked, each as soon as its last byte is here."""
    sizes = [int(manifest.chunk_bytes[index]) for index in wanted]
    left, message_index = sum(sizes), 0
    rest = memoryview(b"")
    for size in sizes:
        parts: list[memoryview] = []
        while size:
            if not rest:
                array = _receive_message(group, min(left, group.message_bytes))
                watch(message_index, array)
                rest, left, message_index = array.data, left - len(array), message_index + 1
            parts.append(rest[:size])
            size, rest = size - len(parts[-1]), rest[size:]
        yield b"".join(parts)


def _receive_message(group: Group, byte_count: int) -> NDArray[np.uint8]:
    tensor = group.empty(byte_count)
    group.broadcast(tensor)
    array: NDArray[np.uint8] = tensor.cpu().numpy()
    return array


def _nothing_missing(group: Group, chunk_count: int) -> Missing:
    return np.zeros(
        (group.seat.size - 1, max(1, chunk_count)), dtype=np.uint8
    )  # also a version without chunks is confirmed


def _agree(group: Group, missing: Missing) -> Missing:
    tensor = _tensor(group, missing)
    group.combine(tensor)
    agreed: Missing = tensor.cpu().numpy()
    return agreed


def _wanted(missing: Missing) -> list[int]:
    """Return the chunks that any member lacks, ascending."""
    return [int(index) for index in np.flatnonzero(missing.any(axis=0))]


def _tensor(group: Group, array: NDArray[Any]) -> torch.Tensor:
    """Bring an array to the group's device; on the CPU as a view."""
    return torch.from_numpy(array).to(group.seat.device)
