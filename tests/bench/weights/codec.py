"""Bytes and CPU time of one recorded change in every code: ours, and how others do it. One process, one thread each.

- CPU time of this process, not wall: what else the machine does counts less. Applying takes turns with a memory copy of
  the same bytes (np.copyto of the whole model), which makes the old state live again; both are medians of these turns.
- Encoding includes finding what changed; applying includes decoding, and ends with the new bits in place. Digests and
  manifests are in neither: they are part of publish-to-live. Ours moves the tensor's sum too, which is in its time.
- Every code applies in place, block by block; so does ours where nobody reads the weights meanwhile, as a newcomer's
  staged ones. Beside live weights a block is taken first and written afterwards: a row of its own. There it is still in
  the caches when it is written; staged whole and committed later it is not (see publish-to-live).
- Whatever was applied is compared with the new state, bit by bit, outside of what is timed.
- The entropy floor is the empirical entropy of gaps and of steps over the whole change, each drawn independently; by
  block it is what inspecting a version shows (fabric/versions/entropy.py), stricter, as blocks differ.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass

import numpy as np

from rollfab.fabric.contract.errors import ConfigError, FabricError
from rollfab.fabric.format.codec import Encoder
from rollfab.fabric.format.decoder import Decoder
from rollfab.fabric.format.kernels import load
from rollfab.fabric.format.kernels.protocol import NUMBA, NUMPY, Kernels, Scratch
from rollfab.fabric.format.layout import Layout
from rollfab.fabric.format.regions import Region, cut
from rollfab.fabric.versions.commit import scatter
from rollfab.fabric.versions.entropy import Floor, block_floor, entropy_bits

from .baselines import Bits, Codec, baselines
from .recording import Recording, places

APPLY_COUNT = 5  # of one change in one code: one takes some hundredths of a second, in which a shared core may stumble


@dataclass(frozen=True, kw_only=True)
class Round:
    """One change in one code, CPU seconds. copy_s: of the memory copies beside it."""

    byte_count: int
    encode_s: float
    apply_s: float
    copy_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All changes at one learning rate. rounds: by code, one for each change; floors: bytes, pooled and by block."""

    learning_rate: float
    element_count: int
    changed_counts: list[int]
    floor_bytes: list[float]
    block_floor_bytes: list[float]
    rounds: dict[str, list[Round]]


def ours() -> list[Codec]:
    """Our code with every make of its inner loops that is installed, the fastest first."""
    found = []
    for make, name in ((NUMBA, "ours, compiled"), (NUMPY, "ours, numpy")):
        try:
            found.append(_ours(name, load(make)))
        except ConfigError:  # there is no compiler here; numpy there is always
            continue
    return [*found, _ours("ours, taken, then written", load(), is_staged=True)]


def _ours(name: str, kernels: Kernels, *, is_staged: bool = False) -> Codec:
    encoder, decoder, scratch = Encoder(kernels), Decoder(kernels), Scratch()

    def encode(old: Bits, new: Bits) -> bytes | None:
        encoded = encoder.delta(old, new)
        return None if encoded is None else encoded.data

    def put(data: bytes, live: Bits) -> None:
        decoder.put(data, live)

    def stage(data: bytes, live: Bits) -> None:
        room = scratch.array("positions", len(live), np.dtype(np.int64)), scratch.array("values", len(live), live.dtype)
        taken = decoder.take(data, live, len(live), live.dtype, out=room)
        if taken.positions is None:
            np.copyto(live, taken.values)
        else:
            scatter(live, taken.positions, taken.values, kernels=kernels)

    return Codec(name, encode, stage if is_staged else put)


def headline(measured: Measured) -> str:
    """The name of our code whose figures count: with the fastest loops that are installed."""
    return next(iter(measured.rounds))


class Model:
    """Two neighbouring states and a live copy of the older one, cut as a publisher cuts them.

    Memory: three copies of the model.
    """

    def __init__(self, recording: Recording, index: int) -> None:
        self.old = recording.at(index)
        self.new = self.old.copy()
        self.live = self.old.copy()
        self._recording = recording
        self._index = index
        recording.apply(self.new, index)
        self.regions = _slices(recording.layout)

    def advance(self, index: int) -> None:
        """Become the change `index`, not before the one it is."""
        for step in range(self._index, index):
            self._recording.apply(self.old, step)
            self._recording.apply(self.new, step + 1)
        self._index = index
        np.copyto(self.live, self.old)

    def restore(self) -> float:
        """Make live the old state again: the memory copy that speeds are compared with; CPU seconds."""
        started_s = time.process_time()
        np.copyto(self.live, self.old)
        return time.process_time() - started_s


def measure_codecs(recording: Recording, learning_rate: float, round_count: int) -> Measured:
    """Every code on every settled change at this learning rate, `round_count` of them.

    Raises:
        FabricError: a code did not give back the new state, or nothing was recorded.
    """
    indices = recording.settled(learning_rate)[:round_count]
    if not indices:
        raise FabricError(f"no updates at learning rate {learning_rate} were recorded")
    codecs = [*ours(), *baselines()]
    rounds: dict[str, list[Round]] = {codec.name: [] for codec in codecs}
    floors, block_floors = [], []
    model = Model(recording, indices[0])
    for codec in codecs:
        measure_code(codec, model)  # compiles what is compiled, touches all pages
    for index in indices:
        model.advance(index)
        floors.append(floor_bytes(model, recording.layout))
        block_floors.append(_block_floor(model).byte_count)
        for codec in codecs:
            rounds[codec.name].append(measure_code(codec, model))
    return Measured(
        learning_rate=learning_rate,
        element_count=recording.layout.element_count,
        changed_counts=[recording.changes[index].changed_count for index in indices],
        floor_bytes=floors,
        block_floor_bytes=block_floors,
        rounds=rounds,
    )


def measure_code(codec: Codec, model: Model) -> Round:
    """One change in one code.

    Raises:
        FabricError: it did not give back the new state.
    """
    gc.collect()
    model.restore()
    started_s = time.process_time()
    encoded = [codec.encode(model.old[place], model.new[place]) for place in model.regions]
    encode_s = time.process_time() - started_s
    turns = [(model.restore(), _apply(codec, model, encoded)) for _ in range(APPLY_COUNT)]
    return Round(
        byte_count=sum(len(data) for data in encoded if data is not None),
        encode_s=encode_s,
        apply_s=statistics.median(apply_s for _, apply_s in turns),
        copy_s=statistics.median(copy_s for copy_s, _ in turns),
    )


def _apply(codec: Codec, model: Model, encoded: list[bytes | None]) -> float:
    """CPU seconds. Raises FabricError: what is live is not the new state then."""
    started_s = time.process_time()
    for place, data in zip(model.regions, encoded, strict=True):
        if data is not None:
            codec.apply(data, model.live[place])
    passed_s = time.process_time() - started_s
    if not np.array_equal(model.live, model.new):
        raise FabricError(f"{codec.name} did not give back the new weights")
    return passed_s


def floor_bytes(model: Model, layout: Layout) -> float:
    """Bytes that a code of gaps and steps needs at least, when both are drawn independently from their histograms."""
    gaps, steps = [], []
    for place in places(layout).values():
        old, new = model.old[place], model.new[place]
        positions = np.flatnonzero(old != new)
        gaps.append(np.diff(positions, prepend=-1).astype(np.uint32))
        steps.append(new[positions] - old[positions])
    all_gaps, all_steps = np.concatenate(gaps), np.concatenate(steps)
    return len(all_gaps) * (entropy_bits(all_gaps) + entropy_bits(all_steps)) / 8


def _block_floor(model: Model) -> Floor:
    encoder, decoder, total = Encoder(), Decoder(), Floor()
    for place in model.regions:
        encoded = encoder.delta(model.old[place], model.new[place])
        if encoded is not None:
            count = place.stop - place.start
            total += block_floor(decoder.decode(encoded.data, element_count=count, dtype=model.old.dtype), count)
    return total


def _slices(layout: Layout) -> list[slice]:
    starts = [place.start for place in places(layout).values()]

    def where(region: Region) -> slice:
        assert region.is_contiguous
        return slice(starts[region.tensor] + region.start, starts[region.tensor] + region.stop)

    return [where(region) for region in cut(layout)]
