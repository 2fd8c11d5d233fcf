"""Stages one rank's part of a model in a thread beside the live weights, in vLLM's worker process, then commits it.

- The thread only reads live weights, and of them only what it needs (lane.py); only a commit writes them, and it comes
  after the rank's answer. It ends before the weights' memory may go (`stop`).
- All memory that a commit takes is taken in staging (prepared.py): where there is none, the vote fails.
- A newer order, or a commit of another kind, makes what was staged before it void.
- Sums of the live part are carried from commit to commit; where they are not known they are made anew, in slices.
- Whatever goes wrong in staging is this rank's answer: vLLM itself hears nothing of it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path

import torch

from .....fabric.contract.errors import WeightError
from .....fabric.format.layout import Layout, TensorSpec
from .....fabric.format.manifest import Sums
from .....fabric.format.regions import Region
from .....fabric.versions.commit import Writes, check_writes
from .....fabric.versions.rank_parts import ShardMap, ShardSlice
from .....fabric.versions.stage import Stage
from .....fabric.versions.vote import Vote, failed_vote, vote
from ..common.arena import PARCEL, unpack
from ..common.shared import open_shared
from .lane import DeviceBits, Lane, LiveBits
from .pieces import Piece
from .placement import Placement
from .prepared import GoOn, Layers, Prepared, checkpoint_puts, local_puts, prepare
from .rank_answers import StageOrder, give_answer
from .version_files import MappedVersion

log = logging.getLogger(__name__)

WORK_S_MIN = 0.0002  # less at a time is not worth a rest, which takes 0.1 ms at least
REST_FACTOR = 2.0
REST_S_MAX = 0.001


def no_layers(prepared: Prepared, go_on: Callable[[], None]) -> Callable[[], None]:
    """Pack nothing: every layer computes with its weights themselves."""
    return lambda: None


class Pace:
    """Rests between pieces of work, so that the thread that computes steps finds the interpreter free.

    Otherwise that thread waits for it at every operation of a step, which Python's switch interval cannot mend.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._never = threading.Event()

    def rest(self) -> None:
        """Rest REST_FACTOR times as long as the last piece took, up to REST_S_MAX: long pieces are compiled loops."""
        took_s = time.monotonic() - self._since_s
        if took_s < WORK_S_MIN:
            return
        self._never.wait(min(REST_FACTOR * took_s, REST_S_MAX))
        self._since_s = time.monotonic()


class RankPart:
    """The part of a model that rank `rank` holds. layers: see prepared.Layers."""

    def __init__(self, placement: Placement, rank: int, *, layers: Layers = no_layers) -> None:
        self._placement = placement
        self._rank = rank
        self._layers = layers
        self._memories = {memory.name: (key, memory) for key, memory in placement.memories.items()}
        devices = [memory.flat.device for memory in placement.memories.values()]
        self._lane = Lane(devices[0] if devices else torch.device("cpu"))
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ticket = ""  # of the newest order
        self._staged: Prepared | None = None
        self._version = -1  # that `_sums` are of
        self._sums: Sums | None = None

    @cached_property
    def _map(self) -> ShardMap:
        return shard_map(self._placement)

    def begin(self, order: StageOrder) -> None:
        """Stage in a thread; the answer says how it went. Never raises."""
        self.stop()
        self.forget(order.ticket)
        try:
            # Mapped now: by the time the thread runs, the asker may have closed the files.
            versions = [MappedVersion(path) for path in order.files]
            parcel = mapped_parcel(order.parcel) if order.parcel else None
        except Exception as error:  # told as this rank's answer, for which the others wait; the worker tries again
            log.warning("weights.part_not_staged", exc_info=True)
            self._fail(order, error)
            return

        def aside() -> None:
            stand_aside(self._lane)
            self.work(order, versions, parcel)

        self._thread = threading.Thread(target=aside, name="stage-part", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End staging that is under way; what is staged already stays. Nothing is read afterwards."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self.forget()
            thread.join()

    def problem(self, ticket: str) -> str:
        """Say why what was staged under this ticket cannot be committed; "" if it can."""
        with self._lock:
            is_staged = self._staged is not None and ticket == self._ticket
        return "" if is_staged else f"rank {self._rank} has not staged what it is to commit: stage it again"

    def commit(self, ticket: str) -> None:
        """Write what was staged under this ticket, in place; takes no memory, and cannot fail half-way.

        Raises:
            WeightError: nothing is; nothing was written.
        """
        with self._lock:
            staged = self._staged if ticket == self._ticket else None
        if staged is None:
            raise WeightError(self.problem(ticket))
        staged.write()
        self.forget()
        self._version, self._sums = (-1, None) if staged.sums is None else (staged.version, staged.sums)

    def prepare_writes(self, writes: Writes, version: int = -1, go_on: GoOn = lambda: None) -> Prepared:
        """Make a commit of writes by the checkpoint's names, ready to be written.

        Raises:
            LayoutMismatch: they are not this model's.
        """
        check_writes(self._placement.layout, writes)
        puts = []
        for put in checkpoint_puts(self._placement, writes, self._lane):
            puts.append(put)
            go_on()
        return prepare(version, puts, self._lane, self._layers, go_on=go_on)

    def take(self, writes: Writes) -> Callable[[], None]:
        """Prepare writes that nobody has ordered; the result, when called, commits them."""
        self.stop()
        prepared = self.prepare_writes(writes)

        def commit() -> None:
            self.forget()
            self._version, self._sums = -1, None
            prepared.write()

        return commit

    def forget(self, ticket: str = "") -> None:
        """Make void whatever is staged, or being staged. ticket: of what comes next."""
        with self._lock:
            self._ticket, self._staged = ticket, None

    def work(self, order: StageOrder, versions: Sequence[MappedVersion], parcel: Writes | None) -> None:
        """Stage, keep what is staged, and answer; this is what the thread does."""
        try:
            with torch.no_grad(), self._lane.aside():
                staged, told = self._work(order, versions, parcel)
            with self._lock:
                if self._ticket == order.ticket:
                    self._staged = staged
            self._go_on(order)
        except Exception as error:  # the vote of this rank: all ranks stay where they are, and the worker tries again
            log.warning("weights.part_not_staged", exc_info=True)
            self._fail(order, error)
            return
        with contextlib.suppress(OSError):  # nobody waits for it any more
            give_answer(Path(order.answers), told)

    def _work(
        self, order: StageOrder, versions: Sequence[MappedVersion], parcel: Writes | None
    ) -> tuple[Prepared, Vote]:
        pace = Pace()

        def go_on() -> None:
            self._go_on(order)
            pace.rest()

        if parcel is not None:
            return self.prepare_writes(parcel, order.have, go_on), Vote.of_none(self._rank, order.have)
        kind = LiveBits if self._lane.device.type == "cpu" else DeviceBits
        live = {
            spec.name: kind(self._memories[spec.name][1].flat, spec.bits_dtype, self._lane, go_on)
            for spec in self._map.local.tensors
        }
        sums = self._sums if versions and order.have == self._version else None  # without versions: an audit
        stage = Stage(self._map, live, order.have, sums)
        read_bytes = sum(version.stage(stage, self._map, go_on) for version in versions)
        staged = stage.finish()
        puts = list(local_puts(self._memories, staged.writes, self._lane))
        told = vote(self._rank, self._map, staged, read_bytes)
        return prepare(staged.version, puts, self._lane, self._layers, staged.sums, go_on), told

    def _go_on(self, order: StageOrder) -> None:
        with self._lock:
            if self._ticket != order.ticket:
                raise WeightError("it was told to do something else")

    def _fail(self, order: StageOrder, error: Exception) -> None:
        with contextlib.suppress(OSError):
            give_answer(Path(order.answers), failed_vote(self._rank, error))


def stand_aside(lane: Lane) -> None:
    """Compute in this thread alone, on any core that the engine has: on a CPU, its own core and helpers are busy."""
    if lane.device.type != "cpu":
        return
    torch._C.set_num_threads(1)  # vLLM has put a function in the place of torch's own that only warns
    if hasattr(os, "sched_setaffinity"):
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        os.sched_setaffinity(0, set().union(*map(_cores, threads)))


def _cores(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except OSError:  # it has ended
        return set()


def mapped_parcel(path: str) -> Writes:
    """Read the writes of a parcel's file.

    Raises:
        WeightError, WireError: it is none. OSError: it is not on this machine, or gone.
    """
    handle = open_shared(path, PARCEL)
    try:
        return unpack(mmap.mmap(handle, 0, access=mmap.ACCESS_COPY))  # private: nobody writes into the sender's
    finally:
        os.close(handle)


# ---------------------------------------------------------------- rank map
#
# The map of a rank of vLLM, by which it can fetch and stage its own part (fabric/versions/rank_parts.py).
#
# - Made from the recorded placement, so it is what vLLM's own loader does, whatever the architecture.
# - The rank's own tensors have the names of its parameters; padding is part of them, and nobody's slice.
# - The same on every device; unverified on a GPU.


def shard_map(placement: Placement) -> ShardMap:
    """Make the map of one rank, and check it.

    Raises:
        LayoutMismatch: two tensors share a place.
    """
    specs: dict[int, TensorSpec] = {}
    slices: list[ShardSlice] = []
    for number, spec in enumerate(placement.layout.tensors):
        for piece in placement.pieces[spec.name]:
            memory = placement.memories[piece.memory]
            dtype = str(memory.tensor.dtype).removeprefix("torch.")
            specs[piece.memory] = TensorSpec(memory.name, dtype, (memory.flat.numel(),))
            slices += _slices(number, piece, memory.name)
    made = ShardMap(placement.layout, Layout(tuple(specs.values())), tuple(sorted(slices)))
    made.check()
    return made


def _slices(number: int, piece: Piece, target: str) -> Iterator[ShardSlice]:
    """Cut a piece into equal runs: one slice for each place in the dimensions further out than those."""
    dims = list(zip(piece.shape, piece.source_strides, piece.target_strides, strict=True))
    run, _, step = dims.pop() if dims and dims[-1][1] == 1 else (1, 1, 1)
    count, stride, target_stride = dims.pop() if dims else (1, run, run)
    for place in product(*(range(length) for length, _, _ in dims)):
        first = sum(index * dim[1] for index, dim in zip(place, dims, strict=True))
        offset = sum(index * dim[2] for index, dim in zip(place, dims, strict=True))
        region = Region(number, piece.source_offset + first, run, stride, count)
        yield ShardSlice(region, target, piece.target_offset + offset, target_stride, step)
