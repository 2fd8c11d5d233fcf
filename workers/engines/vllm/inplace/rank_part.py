"""One rank's part of a model, in vLLM's worker process: staged in a thread beside the live weights, then committed.

- The thread only reads live weights; only a commit writes them, and it comes after the rank's answer.
- A newer order, or a commit of another kind, makes what was staged before it void.
- Sums of the live part are carried from commit to commit; where they are not known they are made anew.
- Whatever goes wrong in staging is this rank's answer: vLLM itself hears nothing of it.
- On a GPU the part is copied to the host first, while vLLM makes no step; unverified there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path

from .....fabric.contract.errors import WeightError
from .....fabric.format.layout import Layout, TensorSpec
from .....fabric.format.manifest import Sums
from .....fabric.format.regions import Region
from .....fabric.versions.commit import Staged
from .....fabric.versions.rank_parts import ShardMap, ShardSlice
from .....fabric.versions.stage import Stage
from .....fabric.versions.vote import failed_vote, vote
from ...base import Bits
from .pieces import Piece, integers
from .placement import Placement
from .rank_answers import StageOrder, give_answer
from .version_files import MappedVersion

log = logging.getLogger(__name__)


class RankPart:
    """What rank `rank` holds of a model."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self._placement = placement
        self._rank = rank
        self._memories = {memory.name: memory for memory in placement.memories.values()}
        self._lock = threading.Lock()
        self._ticket = ""  # of the newest order
        self._staged: Staged | None = None
        self._version = -1  # that `_sums` are of
        self._sums: Sums | None = None

    @cached_property
    def _map(self) -> ShardMap:
        return shard_map(self._placement)

    def begin(self, order: StageOrder) -> None:
        """Stage in a thread; the answer says how it went. Never raises."""
        self.forget(order.ticket)
        sums = self._sums if order.have == self._version else None
        try:
            # Now: later who asked may have closed the files, and a GPU's weights may be asleep.
            versions, live = [MappedVersion(path) for path in order.files], self._live()
        except Exception as error:  # whatever it is, the others wait for this rank's answer
            log.warning("weights.part_not_staged", exc_info=True)
            _fail(order, self._rank, error)
            return
        threading.Thread(target=self._work, args=(order, versions, live, sums), name="stage-part", daemon=True).start()

    def commit(self, ticket: str) -> None:
        """Write what was staged under this ticket, in place.

        Raises:
            WeightError: nothing is; nothing was written.
        """
        with self._lock:
            staged = self._staged if ticket == self._ticket else None
        if staged is None:
            raise WeightError(f"rank {self._rank} has not staged what it is to commit: stage it again")
        for name, (indices, values) in staged.writes.items():
            flat, bits = self._memories[name].flat, integers(values)
            if indices is None:
                flat.copy_(bits)
            else:
                flat.index_copy_(0, integers(indices).to(flat.device), bits.to(flat.device))
        self.forget()
        self._version, self._sums = staged.version, staged.sums

    def forget(self, ticket: str = "") -> None:
        """Whatever is staged, or being staged, is void. ticket: of what comes next."""
        with self._lock:
            self._ticket, self._staged = ticket, None

    def was_written(self) -> None:
        """Somebody else has written the live weights."""
        self.forget()
        self._version, self._sums = -1, None

    def _work(
        self, order: StageOrder, versions: Sequence[MappedVersion], live: dict[str, Bits], sums: Sums | None
    ) -> None:
        try:
            stage = Stage(self._map, live, order.have, sums)
            read_bytes = sum(version.stage(stage, self._map) for version in versions)
            staged = stage.finish()
            with self._lock:
                if self._ticket != order.ticket:
                    return
                self._staged = staged
            with contextlib.suppress(OSError):  # nobody waits for it any more
                give_answer(Path(order.answers), vote(self._rank, self._map, staged, read_bytes))
        except Exception as error:  # the vote of this rank: all ranks stay where they are, and the worker tries again
            log.warning("weights.part_not_staged", exc_info=True)
            _fail(order, self._rank, error)

    def _live(self) -> dict[str, Bits]:
        """Stored bits of the part, flat: the memory itself on a CPU, a copy on a GPU."""
        flats = {spec.name: self._memories[spec.name].flat.cpu().numpy() for spec in self._map.local.tensors}
        return {spec.name: flats[spec.name].view(spec.bits_dtype) for spec in self._map.local.tensors}


def _fail(order: StageOrder, rank: int, error: Exception) -> None:
    with contextlib.suppress(OSError):
        give_answer(Path(order.answers), failed_vote(rank, error))


# ---------------------------------------------------------------- rank map
#
# What a rank of vLLM holds, as a map by which it can fetch and stage its own part (fabric/versions/rank_parts.py).
#
# - Made from the recorded placement, so it is what vLLM's own loader does, whatever the architecture.
# - The rank's own tensors have the names of its parameters; padding is part of them, and nobody's slice.
# - The same on every device; unverified on a GPU.


def shard_map(placement: Placement) -> ShardMap:
    """The map of one rank; checked.

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
    """A piece as equal runs; one slice for each place in the dimensions further out than those."""
    dims = list(zip(piece.shape, piece.source_strides, piece.target_strides, strict=True))
    run, _, step = dims.pop() if dims and dims[-1][1] == 1 else (1, 1, 1)
    count, stride, target_stride = dims.pop() if dims else (1, run, run)
    for place in product(*(range(length) for length, _, _ in dims)):
        first = sum(index * dim[1] for index, dim in zip(place, dims, strict=True))
        offset = sum(index * dim[2] for index, dim in zip(place, dims, strict=True))
        region = Region(number, piece.source_offset + first, run, stride, count)
        yield ShardSlice(region, target, piece.target_offset + offset, target_stride, step)
