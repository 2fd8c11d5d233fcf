"""The publisher's copy of what receivers hold, kept where the trainer's weights are: on a GPU.

- What comes to the host of a delta is what changed, not the model; versions are the host path's
  (fabric/versions/snapshot.py), byte by byte, and so is when the copy moves.
- What is brought is encoded by threads of the host, while the next group of regions is compared on the device.
- Tensors that are on the host are compared there; a tensor may be elsewhere from one version to the next.
- What is prepared holds copies, so it does not depend on weights that the trainer changes.
- Memory: on the device one copy of the weights, and a few GROUP_BYTES (gpu_compare.py) while preparing; on the host the
  changed bits of the version being prepared, its encoded bytes, and at most WAITING_MAX regions to be encoded. Where
  the device has no room for the copy, it is kept on the host, with a warning.
- What the trainer wrote must be there, or be queued on the device's default stream.
- Tested on the CPU; unverified on a GPU.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from ...fabric.format.codec import Encoded, Encoder
from ...fabric.format.digest import sum_range, tensor_key
from ...fabric.format.kernels.protocol import Changes
from ...fabric.format.layout import Layout
from ...fabric.format.manifest import Sums
from ...fabric.format.regions import Region, cut
from ...fabric.rules.weights.chain import DELTA, KEYFRAME
from ...fabric.versions.snapshot import (
    THREAD_COUNT_MAX,
    Change,
    Check,
    Identity,
    Place,
    Prepared,
    Snapshot,
    encode_part,
    no_check,
)
from .gpu_compare import Flat, Pair, Piece, as_tensor, bring, on_host

log = logging.getLogger(__name__)

WAITING_MAX = 32  # regions brought and not yet encoded: 256 MiB where all of them are whole


class DeviceSnapshot(Snapshot):
    """Weights of one version, as stored bits, each tensor where it is told to be.

    Args:
        bits: flat stored bits by name, numpy's or tensors on a device (on_device.Flat); copied.
        version: the version they are, -1 for none (then only a keyframe can be made).
        devices: where to keep tensors, by name; those not named are kept on the host.
        thread_count: as Snapshot's.
    """

    def __init__(
        self,
        layout: Layout,
        bits: Mapping[str, Flat],
        version: int = -1,
        *,
        devices: Mapping[str, torch.device],
        thread_count: int | None = None,
    ) -> None:
        self.layout = layout
        self.version = version
        self._names = [spec.name for spec in layout.tensors]
        self._regions = cut(layout)
        self._thread_count = thread_count or min(THREAD_COUNT_MAX, os.cpu_count() or 1)
        self._kept = _kept(bits, devices)
        # The first keyframe, which brings every element to the host, makes the sums of weights that have no version.
        self.sums = np.zeros(len(layout.tensors), dtype=np.uint64) if version < 0 else self._state_sums()

    def prepare_delta(self, identity: Identity, new: Mapping[str, Flat], check: Check = no_check) -> Prepared:
        """The version `identity` as what differs between `new` and this snapshot, bit by bit."""
        assert identity.version > self.version >= 0
        feed = Feed()
        regions = feed.through(bring(self._pairs(new, check)))
        part = encode_part(self.layout, regions, feed.encode, self._thread_count)
        return self._assemble(identity, part, Place(kind=DELTA, base_version=self.version, sums=self.sums + part.sums))

    def prepare_keyframe(self, identity: Identity, check: Check = no_check) -> Prepared:
        """This snapshot's own weights, as version `identity`."""
        feed = Feed()
        regions = feed.through(bring(self._own(check)))
        part = encode_part(self.layout, regions, feed.encode, self._thread_count, has_changes=False)
        self.sums = part.sums  # of what is here: as Snapshot's
        return self._assemble(identity, part, Place(kind=KEYFRAME, base_version=-1, sums=part.sums))

    def equals(self, other: Mapping[str, Flat], check: Check = no_check) -> bool:
        """Whether `other` has the same stored bits."""
        return all(_is_same(pair) for pair in self._pairs(other, check))

    def advance(self, prepared: Prepared) -> None:
        """Become the version that was prepared from this snapshot; the head has moved to it."""
        if prepared.manifest.kind == DELTA:
            assert prepared.manifest.base_version == self.version
            for change in prepared.changes:
                _write(change.region.read(self._kept[self._names[change.region.tensor]]), change)
        self.sums = prepared.manifest.sums
        self.version = prepared.manifest.version

    def _pairs(self, new: Mapping[str, Flat], check: Check) -> Iterator[Pair]:
        for region in self._regions:
            check()
            name = self._names[region.tensor]
            yield _pair(region, region.read(self._kept[name]), region.read(new[name]))

    def _own(self, check: Check) -> Iterator[Pair]:
        for region in self._regions:
            check()
            yield Pair(region, None, region.read(self._kept[self._names[region.tensor]]))

    def _state_sums(self) -> Sums:
        """As digest.state_sums, with one region at a time on the host."""
        totals = [0] * len(self._names)
        for region in self._regions:
            own = on_host(region.read(self._kept[self._names[region.tensor]]))
            totals[region.tensor] += sum_range(tensor_key(self._names[region.tensor]), region.start, own)
        return np.array([total % 2**64 for total in totals], dtype=np.uint64)


class Feed:
    """Pieces on their way from the thread that brings them to those that encode them."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(WAITING_MAX)
        self._pieces: dict[Region, Piece] = {}

    def through(self, pieces: Iterable[tuple[Region, Piece]]) -> Iterator[Region]:
        """The regions, each when its piece is there; waits while too many are not yet encoded."""
        for region, piece in pieces:
            self._room.acquire()
            self._pieces[region] = piece
            yield region

    def encode(self, encoder: Encoder, region: Region) -> Encoded | None:
        """The region's block, as the encoder makes it of all its bits; None: nothing changed."""
        try:
            return _encoded(encoder, self._pieces.pop(region))
        finally:
            self._room.release()


def _encoded(encoder: Encoder, piece: Piece) -> Encoded | None:
    if isinstance(piece, Changes):
        encoded: Encoded | None = encoder.sparse(piece)
    elif piece.old is None:
        return encoder.dense(piece.new)
    else:
        encoded = encoder.delta(piece.old, piece.new if piece.is_copy else np.array(piece.new))
        if encoded is None or not piece.is_copy:
            return encoded
    assert encoded is not None
    # What the version keeps must not hold on to all that was brought with it.
    indices = None if encoded.indices is None else np.array(encoded.indices)
    return replace(encoded, indices=indices, values=np.array(encoded.values))


def _kept(bits: Mapping[str, Flat], devices: Mapping[str, torch.device]) -> dict[str, Flat]:
    """Copies, on their devices if all of them have room there."""
    try:
        return {name: _copy(flat, devices.get(name)) for name, flat in bits.items()}
    except torch.OutOfMemoryError as error:
        log.warning("weights.kept_on_host", extra={"error": str(error)})
    return {name: _copy(flat, None) for name, flat in bits.items()}


def _copy(flat: Flat, device: torch.device | None) -> Flat:
    if device is None:
        return np.array(on_host(flat))
    tensor = as_tensor(flat) if isinstance(flat, np.ndarray) else flat
    return tensor.to(device, copy=True)


def _pair(region: Region, old: Flat, new: Flat) -> Pair:
    """Both on one side: on the host, unless they are on the same device."""
    is_together = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.device == new.device
    return Pair(region, old, new) if is_together else Pair(region, on_host(old), on_host(new))


def _is_same(pair: Pair) -> bool:
    try:
        if pair.device is not None:
            return torch.equal(pair.old, pair.new)
    except torch.OutOfMemoryError:
        pass  # on the host then, as what is brought
    return np.array_equal(on_host(pair.old), on_host(pair.new))


def _write(own: Flat, change: Change) -> None:
    """Set what changed in a region; own: the kept bits of that region, written in place."""
    if isinstance(own, np.ndarray):
        own[... if change.indices is None else change.indices] = change.values
        return
    values = as_tensor(change.values)
    if change.indices is None:
        own.copy_(values)
        return
    try:
        own[as_tensor(change.indices).to(own.device).long()] = values.to(own.device)
    except torch.OutOfMemoryError:
        # The head has moved, so this must not fail: by way of the host it takes no memory there.
        whole = np.array(on_host(own))
        whole[change.indices] = change.values
        own.copy_(as_tensor(whole))
