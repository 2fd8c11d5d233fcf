"""Encoding, applying and the pause beside the machine's own floor: the same arrays and positions, in the same process.

- Encoding's floor compares two states and gathers positions, old and new bits; applying's reads and writes the changed
  elements in place, with steps and positions ready; the pause's writes what was staged, with as many threads.
- Ours and its floor take turns, each after what leaves the caches as a version does: before applying, a memory copy of
  the model makes the old state live again; before a pause, the version is staged anew.
- Encoding and applying are CPU time of one thread. The pause is time that passes, as the engine waits for it; its CPU
  time is beside it, for a machine that others use too. A floor's threads run already; the commit's start with it.
- A floor asks memory ahead by the distance that was fastest before the measuring. Its loops are compiled as ours are
  (floor_loops.py); C, with vector instructions by hand for comparing, is within a tenth (measured).
- What either wrote is compared with the new state, bit by bit, outside of what is timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import ConfigError, FabricError
from rollfab.fabric.format.codec import Encoded, Encoder
from rollfab.fabric.format.decoder import Decoder
from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.format.kernels import load
from rollfab.fabric.format.kernels.protocol import NUMBA
from rollfab.fabric.format.manifest import Sums, WeightManifest
from rollfab.fabric.format.regions import cut, cut_digest
from rollfab.fabric.rules.weights.chain import DELTA
from rollfab.fabric.versions.commit import COMMIT_THREAD_COUNT_MAX, Staged, Writes, commit
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.snapshot import Identity, Place, encode_part, make_manifest
from rollfab.fabric.versions.stage import Stage

from .codec import Model
from .recording import Bits, Recording

TURN_COUNT = 5  # of one change: one takes some hundredths of a second, in which a shared core may stumble
TRIAL_COUNT = 3
FAR_BYTES = (0, 1024, 2048, 4096, 8192)  # ahead of what is compared
AHEAD_COUNTS = (0, 16, 32, 64, 128, 256)  # elements ahead of the one that is written


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Seconds of ours and of its floor, turn by turn."""

    ours_s: list[float]
    floor_s: list[float]

    @property
    def floor_over_ours(self) -> float:
        """The ratio of the medians."""
        return statistics.median(self.floor_s) / statistics.median(self.ours_s)


@dataclass(frozen=True, kw_only=True)
class FloorRound:
    """One change. pause_cpu: of the same turns as `pause`."""

    encode: Beside
    apply: Beside
    pause: Beside
    pause_cpu: Beside


def measure_floors(recording: Recording, learning_rate: float, round_count: int) -> list[FloorRound]:
    """Measure settled changes at this learning rate, at most `round_count`; none without a compiler.

    Raises:
        FabricError: ours or a floor did not give the new state.
    """
    try:
        load(NUMBA)
    except ConfigError:
        return []
    indices = recording.settled(learning_rate)[:round_count]
    found: list[FloorRound] = []
    model = Model(recording, indices[0])
    with _Floors(recording, model) as floors:
        for index in indices:
            model.advance(index)
            floors.begin()
            found.append(floors.measure())
    return found


class Times(NamedTuple):
    """Seconds of one turn."""

    passed_s: float
    cpu_s: float


class _Version:
    """One change as a version: its blocks as they travel, and as floors get it.

    positions: uint32 (C,), flat in the model. steps: unsigned (C,).
    """

    def __init__(self, recording: Recording, model: Model) -> None:
        layout = recording.layout
        old, new = recording.split(model.old), recording.split(model.new)
        names = [spec.name for spec in layout.tensors]

        part = encode_part(
            layout,
            cut(layout),
            lambda encoder, region: encoder.delta(
                region.read(old[names[region.tensor]]), region.read(new[names[region.tensor]])
            ),
        )
        self.sums: Sums = state_sums(layout, old)
        place = Place(kind=DELTA, base_version=0, sums=self.sums + part.sums)
        identity = Identity(run_id="floors", epoch=1, version=1)
        self.manifest: WeightManifest = make_manifest(identity, layout, part, place, cut=cut_digest(cut(layout)))
        self.chunks = part.chunks
        rows = {row.region: row for row in part.rows}
        self.blocks: list[tuple[slice, memoryview]] = []
        for where, region in zip(model.regions, cut(layout), strict=True):
            if (row := rows.get(region)) is not None:
                chunk = memoryview(part.chunks[row.chunk])
                self.blocks.append((where, chunk[row.offset : row.offset + row.length]))
        self.positions = np.flatnonzero(model.old != model.new).astype(np.uint32)
        self.steps = model.new[self.positions] - model.old[self.positions]


class _Floors:
    """All of it for one model: ours and the floors, by turns."""

    def __init__(self, recording: Recording, model: Model) -> None:
        from . import floor_loops

        self._loops = floor_loops
        self._recording = recording
        self._model = model
        self._encoder, self._decoder = Encoder(), Decoder()
        self._thread_count = min(COMMIT_THREAD_COUNT_MAX, os.cpu_count() or 1)  # as engines commit
        self._pool = ThreadPoolExecutor(self._thread_count, thread_name_prefix="floor")
        starts = [where.start for where in model.regions]
        self._starts = np.array([*starts, len(model.old)], dtype=np.int64)
        room = int(np.diff(self._starts).max()) + floor_loops.SLICE_COUNT
        self._room = np.empty(room, np.uint32), np.empty(room, np.uint16), np.empty(room, np.uint16)
        self._distances: tuple[int, int, int] | None = None

    def __enter__(self) -> _Floors:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def begin(self) -> None:
        """Take the model's change; before the first one, compile everything and find the best distances."""
        self._version = _Version(self._recording, self._model)
        if self._distances is None:
            far = self._fastest(self._encode_floor, [size // self._model.old.itemsize for size in FAR_BYTES])
            ahead = self._fastest(self._apply_floor, AHEAD_COUNTS)
            self._distances = far, ahead, self._fastest(self._pause_floor, AHEAD_COUNTS)
            for ours in (self._encode, self._apply, self._pause):
                ours()

    def measure(self) -> FloorRound:
        """Ours and the floors, TURN_COUNT times each."""
        assert self._distances is not None
        far, apply_ahead, pause_ahead = self._distances
        turns = [
            (
                (self._encode(), self._encode_floor(far)),
                (self._apply(), self._apply_floor(apply_ahead)),
                (self._pause(), self._pause_floor(pause_ahead)),
            )
            for _ in range(TURN_COUNT)
        ]
        encode, apply, pause = zip(*turns, strict=True)
        return FloorRound(
            encode=_beside(encode, is_cpu=True),
            apply=_beside(apply, is_cpu=True),
            pause=_beside(pause, is_cpu=False),
            pause_cpu=_beside(pause, is_cpu=True),
        )

    def _fastest(self, measure: Callable[[int], Times], distances: Sequence[int]) -> int:
        measure(distances[0])  # compiles it
        found = {distance: [measure(distance)[1] for _ in range(TRIAL_COUNT)] for distance in distances}
        return min(found, key=lambda distance: statistics.median(found[distance]))

    def _encode(self) -> Times:
        model = self._model
        return _timed(lambda: [_bytes(self._encoder.delta(model.old[at], model.new[at])) for at in model.regions])

    def _encode_floor(self, far: int) -> Times:
        model, counts = self._model, []

        def find() -> None:
            counts.append(
                self._loops.compare_and_gather(model.old, model.new, self._starts, self._room, np.uint64(far))
            )

        times = _timed(find)
        if counts != [len(self._version.positions)]:
            raise FabricError("the floor of encoding found other changes")
        return times

    def _apply(self) -> Times:
        model = self._model
        model.restore()
        return self._right(
            _timed(lambda: [self._decoder.put(data, model.live[at]) for at, data in self._version.blocks])
        )

    def _apply_floor(self, ahead: int) -> Times:
        version, live = self._version, self._model.live
        self._model.restore()
        return self._right(_timed(lambda: self._loops.read_and_write(live, version.positions, version.steps, ahead)))

    def _pause(self) -> Times:
        staged, bits = self._staged()
        return self._right(_timed(lambda: commit(staged, bits, thread_count=self._thread_count)))

    def _pause_floor(self, ahead: int) -> Times:
        staged, bits = self._staged()
        shares = pieces(staged.writes, bits, self._thread_count)
        write = self._loops.write_pieces
        return self._right(_timed(lambda: list(self._pool.map(lambda share: write(share, ahead), shares))))

    def _staged(self) -> tuple[Staged, dict[str, Bits]]:
        """Stage the change beside the old state, as a receiver does just before the pause."""
        self._model.restore()
        bits = self._recording.split(self._model.live)
        stage = Stage(whole(self._recording.layout), bits, 0, self._version.sums)
        stage.begin(self._version.manifest)
        for chunk in self._version.chunks:
            stage.feed(chunk)
        stage.end()
        return stage.finish(), bits

    def _right(self, times: Times) -> Times:
        if not np.array_equal(self._model.live, self._model.new):
            raise FabricError("what was measured did not give the new weights")
        return times


def pieces(writes: Writes, bits: Mapping[str, Bits], share_count: int) -> list[NDArray[np.uint64]]:
    """Deal writes out in shares of equally many elements: rows of addresses (floor_loops.write_pieces).

    The arrays must live as long as the rows are used.
    """
    total = sum(len(values) for _, values in writes.values())
    bounds = np.linspace(0, total, share_count + 1, dtype=np.int64).tolist()
    shares: list[list[tuple[int, int, int, int]]] = [[] for _ in range(share_count)]
    done = 0
    for name, (positions, values) in writes.items():
        target = bits[name].ctypes.data
        for share, (low, high) in zip(shares, pairwise(bounds), strict=True):
            first, last = max(low - done, 0), min(high - done, len(values))
            if first >= last:
                continue
            address = values.ctypes.data + first * values.itemsize
            if positions is None:
                share.append((target + first * values.itemsize, 0, address, last - first))
            else:
                share.append((target, positions.ctypes.data + first * positions.itemsize, address, last - first))
        done += len(values)
    return [np.array(share, dtype=np.uint64).reshape(-1, 4) for share in shares]


def _timed(work: Callable[[], object]) -> Times:
    passed_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Times(time.perf_counter() - passed_s, time.process_time() - cpu_s)


def _beside(turns: Sequence[tuple[Times, Times]], *, is_cpu: bool) -> Beside:
    """Put together the turns of ours and of its floor."""
    ours, floor = ([each.cpu_s if is_cpu else each.passed_s for each in arm] for arm in zip(*turns, strict=True))
    return Beside(ours_s=ours, floor_s=floor)


def _bytes(encoded: Encoded | None) -> bytes:
    return b"" if encoded is None else encoded.data
