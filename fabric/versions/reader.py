"""Reading versions from a store: choosing manifests, then fetching their chunks, checked, again if one is wrong.

- A chunk reaches a stage only with the digest its manifest promises; after FETCH_COUNT_MAX tries the reader gives up.
- The next chunks are fetched while the last are decoded; at most 2 * FETCH_BYTES_MAX encoded bytes are in memory.
- Decoding runs in a thread, so the caller's loop stays free.
- The next plan avoids a version that could not be read; a report tells the publisher, which heals it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import ChainBroken, DigestMismatch, FabricError, VersionUnknown, WireError
from ..format.codec import Bits
from ..format.layout import Layout, TensorSpec
from ..format.manifest import DAMAGE_CHUNK_COUNT_MAX, Damage, WeightManifest, pieces
from ..host.helpers import end_all
from ..ports.weights import WeightStore
from ..rules.weights.chain import KEYFRAME, Link, plan, readable_versions
from .held import readable
from .rank_parts import whole
from .stage import Stage, check_chunk

B = TypeVar("B")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

FETCH_BYTES_MAX = 16 << 20  # per round trip: long enough to hide the trip, small beside any model
FETCH_COUNT_MAX = 3
READ_COUNT_MAX = 64  # of versions that are deleted while they are read
STILL_COUNT_MAX = 2  # and while nothing is deleted: by ways around unreadable versions
NATIVE = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}  # numpy's types


class ChunkSink(Protocol[T_co]):
    """A receiver of versions chunk by chunk, oldest first: a Stage, or a collector of chunks for others to stage."""

    def begin(self, manifest: WeightManifest) -> None:
        """Begin the next version; every chunk of it follows, in order, then `end`."""
        ...

    def feed(self, data: bytes) -> None:
        """Take the next chunk, whose digest was found right."""
        ...

    def end(self) -> None:
        """End the version: it is complete."""
        ...

    def finish(self) -> T_co:
        """Return all versions together."""
        ...


class ChainReader:
    """Plans and stages versions of one run; remembers manifests, which never change once the head is past them."""

    def __init__(self, store: WeightStore, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        self._known: dict[tuple[int, str], WeightManifest] = {}
        self._unreadable: set[Link] = set()  # a chunk of these was gone, stayed corrupt, or could not be decoded
        self._damages: dict[tuple[int, str], Damage] = {}

    async def require(self, goal: int, head: int) -> None:
        """Require the head, or another version that a newcomer can read.

        Raises:
            VersionUnknown: it is neither; the text lists the readable versions.
        """
        names = [name for name in await self._store.held(self.run_id) if name[0] <= head]
        await self._learn(names)
        there = sorted(readable_versions(head, [item.link for item in self._known.values()]))
        if goal not in there and (goal != head or head < 0):
            known = f"held are {_ranges(there)}" if there else "nothing is published yet: publish a version first"
            what = f"version {goal} of run {self.run_id!r}" if goal >= 0 else f"the head of run {self.run_id!r}"
            raise VersionUnknown(f"{what} is not held: {known}", version=goal, head=head)

    async def plan(self, have: int | None, goal: int, *, epoch: int | None = None) -> list[WeightManifest]:
        """Return manifests that lead from `have` to `goal`, in the order to stage them.

        Avoid versions that could not be read before, unless there is no other way.

        Args:
            epoch: of the publisher in charge when the goal was seen to be published. None: it cannot have been lost
                since then.

        Raises:
            ChainBroken: the store holds no such chain; or it may be of weights that were never published.
        """
        manifests = await self._chain(have, goal)
        if epoch is not None:
            await self._check_published(goal, epoch)
        return manifests

    async def _check_published(self, goal: int, epoch: int) -> None:
        """Require that the goal has been published all the time.

        A broker that lost its last writes may hold manifests by which another publisher is about to publish the same
        versions anew.
        """
        head = await self._store.head(self.run_id)
        if head.epoch != epoch or head.version < goal:
            self._known.clear()
            raise ChainBroken(
                f"version {goal} of run {self.run_id!r} was read while another publisher took over or the broker lost"
                " its last writes: plan again from the head",
                version=goal,
            )

    async def _chain(self, have: int | None, goal: int) -> list[WeightManifest]:
        names = [name for name in await self._store.held(self.run_id) if name[0] <= goal]
        self._known = {name: self._known[name] for name in names if name in self._known}
        if have is not None:
            # A receiver that keeps up needs one small delta: look for it before reading all manifests.
            await self._learn([name for name in names if name[0] > have and name[1] != KEYFRAME])
            with contextlib.suppress(ChainBroken):
                deltas = plan(have, goal, [link for link in self._links() if link.kind != KEYFRAME])
                if len(deltas) <= 1:
                    return self._manifests(deltas)
        await self._learn(names)
        with contextlib.suppress(ChainBroken):
            return self._manifests(plan(have, goal, self._links()))
        self._unreadable.clear()
        return self._manifests(plan(have, goal, self._links()))

    async def stage(self, manifests: Sequence[WeightManifest], stage: ChunkSink[T], *, enough: int | None = None) -> T:
        """Fetch, check and stage versions. The stage's live weights are only read.

        Args:
            enough: be content with this version, or one above it, if a later one was deleted while they came: another
                way leads on from there, and the staged chunks need not come again. None: with the last alone.

        Raises:
            LayoutMismatch, ChainBroken, DigestMismatch, WireError: as in Stage; nothing was written.
        """
        at: list[WeightManifest] = []
        try:
            for index, manifest in enumerate(manifests):
                at = [manifest]
                is_enough = enough is not None and index > 0 and manifests[index - 1].version >= enough
                if not await self._staged(manifest, stage, may_be_gone=is_enough):
                    break
                await asyncio.to_thread(stage.end)
        except BaseException as error:
            if isinstance(error, (DigestMismatch, WireError)) and "chunk" not in error.facts:
                self.doubt(at)
            self._known.clear()  # a manifest may have been damaged on the way, or be of a head that was lost
            raise
        return await asyncio.to_thread(stage.finish)

    def doubt(self, manifests: Sequence[WeightManifest]) -> None:
        """Avoid these manifests if possible: they could not be used, though their chunks are right."""
        self._known.clear()
        for manifest in manifests:
            self._note(manifest, "undecodable")

    def take_damages(self) -> list[Damage]:
        """Return reports of all that could not be read since the last call."""
        found, self._damages = [*self._damages.values()], {}
        return found

    async def _staged(self, manifest: WeightManifest, stage: ChunkSink[Any], *, may_be_gone: bool) -> bool:
        """Stage all chunks of a version, in order; the next are on their way while the last are decoded.

        Return False if its first chunks are gone, as they may be; the stage knows nothing of the version then.
        """
        is_begun = False

        def feed(chunks: Sequence[bytes]) -> None:
            nonlocal is_begun
            if not is_begun:
                is_begun = True
                stage.begin(manifest)
            for chunk in chunks:
                stage.feed(chunk)

        batches = pieces(enumerate(manifest.chunk_bytes.tolist()), FETCH_BYTES_MAX)
        try:
            await fetch_ahead(batches, partial(self._fetch, manifest), feed)
        except ChainBroken:
            if is_begun or not may_be_gone:
                raise
            return False
        return True

    async def _fetch(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes]:
        """Fetch chunks with the right digests.

        Raises:
            ChainBroken: a chunk is gone. DigestMismatch: a chunk stays corrupt.
        """
        good: dict[int, bytes] = {}
        failure: ChainBroken | DigestMismatch | None = None
        for _ in range(FETCH_COUNT_MAX):
            wanted = [index for index in indices if index not in good]
            if not wanted:
                return [good[index] for index in indices]
            found = await self._store.chunks(manifest, wanted)
            failure = await asyncio.to_thread(_sort_out, manifest, dict(zip(wanted, found, strict=True)), good)
        if failure is not None:
            bad = [index for index in indices if index not in good]
            self._note(manifest, "missing" if isinstance(failure, ChainBroken) else "corrupt", bad)
            raise failure
        return [good[index] for index in indices]

    def _note(self, manifest: WeightManifest, problem: str, chunks: Sequence[int] = ()) -> None:
        link = manifest.link
        self._unreadable.add(link)
        damage = Damage(link.version, link.kind, link.epoch, tuple(chunks[:DAMAGE_CHUNK_COUNT_MAX]), problem)
        self._damages[damage.name] = damage

    async def _learn(self, names: Sequence[tuple[int, str]]) -> None:
        unknown = [name for name in names if name not in self._known]
        if unknown:
            found = await readable(self._store, self.run_id, unknown)
            self._known |= found
            for name in unknown:
                if name not in found:
                    self._damages[name] = Damage(*name, problem="undecodable")

    def _links(self) -> list[Link]:
        return [item.link for item in self._known.values() if item.link not in self._unreadable]

    def _manifests(self, links: Sequence[Link]) -> list[WeightManifest]:
        return [self._known[(link.version, link.kind)] for link in links]


async def report_damages(store: WeightStore, run_id: str, damages: Sequence[Damage], reporter: str = "") -> None:
    """Report unreadable versions to the publisher; a report that fails now is made again by the next reader."""
    with contextlib.suppress(FabricError):
        for damage in damages:
            await store.report_damage(run_id, replace(damage, reporter=reporter))


async def fetch_ahead(
    batches: Sequence[list[B]], fetch: Callable[[list[B]], Coroutine[Any, Any, T]], feed: Callable[[T], None]
) -> None:
    """Feed fetched batches, in order; `feed` runs in a thread, and the next batch comes meanwhile."""
    task = asyncio.create_task(fetch(batches[0] if batches else []))
    try:
        for following in [*batches[1:], []]:
            found = await task
            task = asyncio.create_task(fetch(following))
            await asyncio.to_thread(feed, found)
        await task
    finally:
        await end_all([task])


async def fetch_bits(
    store: WeightStore, run_id: str, version: int | None = None
) -> tuple[WeightManifest, dict[str, Bits]]:
    """Return a version's manifest and its flat stored bits by name, all verified. version None: the head.

    Raises:
        VersionUnknown: it was never published, or can no longer be read.
        ChainBroken: a chunk on the way to it is missing, or is deleted again and again while it is read.
        DigestMismatch: a chunk stays corrupt, and there is no way around it.
    """
    reader = ChainReader(store, run_id)
    held, still_count = await store.held(run_id), 0
    for _ in range(READ_COUNT_MAX):
        try:
            return await _read(reader, store, version)
        except (ChainBroken, DigestMismatch, WireError) as error:
            # A version deleted while it is read is no fault: plan again for a newer head, or another way.
            failure, before, held = error, held, await store.held(run_id)
            still_count = still_count + 1 if held == before else 0
            if still_count == STILL_COUNT_MAX:
                break
        finally:
            await report_damages(store, run_id, reader.take_damages())
    raise failure


async def _read(reader: ChainReader, store: WeightStore, version: int | None) -> tuple[WeightManifest, dict[str, Bits]]:
    head = await store.head(reader.run_id)
    goal = head.version if version is None else version
    await reader.require(goal, head.version)
    manifests = await reader.plan(None, goal, epoch=head.epoch)
    staged = await reader.stage(manifests, Stage(whole(manifests[-1].tensors), None))
    layout = manifests[-1].tensors
    return manifests[-1], _with_empty(layout, {name: values for name, (_, values) in staged.writes.items()})


class Weights(dict[str, NDArray[Any]]):
    """Arrays by name, with their dtypes: where numpy lacks a dtype (bfloat16, float8), the array holds its bits.

    Args:
        dtypes: name → dtype, torch's name without the prefix.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str]) -> None:
        super().__init__(arrays)
        self.dtypes = dict(dtypes)

    def __setitem__(self, name: str, array: NDArray[Any]) -> None:
        self.dtypes.setdefault(name, array.dtype.name)
        super().__setitem__(name, array)

    def __reduce__(self) -> tuple[Any, ...]:
        return Weights, (dict(self), self.dtypes)

    def copy(self) -> Weights:
        """Return the same arrays in another mapping."""
        return Weights(self, self.dtypes)


async def fetch_weights(store: WeightStore, run_id: str, version: int | None = None) -> Weights:
    """Return a version's tensors by name, in their shapes, bit-exact; dtypes that numpy lacks (bfloat16, …) as bits.

    The result can be published again, and has the same bits then.

    Raises:
        VersionUnknown, ChainBroken, DigestMismatch: as in `fetch_bits`.
    """
    manifest, bits = await fetch_bits(store, run_id, version)
    specs = manifest.tensors.tensors
    arrays = {spec.name: _as_array(spec, bits[spec.name]) for spec in specs}
    return Weights(arrays, {spec.name: spec.dtype for spec in specs})


def _as_array(spec: TensorSpec, bits: Bits) -> NDArray[Any]:
    return (bits.view(spec.dtype) if spec.dtype in NATIVE else bits).reshape(spec.shape)


def _with_empty(layout: Layout, bits: dict[str, Bits]) -> dict[str, Bits]:
    """Add to `bits` the tensors that have no elements, which no version carries."""
    empty = {spec.name: np.zeros(0, spec.bits_dtype) for spec in layout.tensors if spec.element_count == 0}
    return {**bits, **empty}


def _sort_out(
    manifest: WeightManifest, found: dict[int, bytes | None], good: dict[int, bytes]
) -> ChainBroken | DigestMismatch | None:
    """Move right chunks to `good`; return why the others are wrong."""
    failure: ChainBroken | DigestMismatch | None = None
    for index, data in found.items():
        if data is None:
            failure = ChainBroken(
                f"chunk {index} of version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r} is not held"
                " any more: plan again from the head",
                version=manifest.version,
                chunk=index,
            )
            continue
        try:
            check_chunk(manifest, index, data)
            good[index] = data
        except DigestMismatch as error:
            failure = error
    return failure


def _ranges(versions: Sequence[int]) -> str:
    """Write ascending versions as text: 3-5, 8."""
    parts: list[list[int]] = []
    for version in versions:
        if parts and version == parts[-1][-1] + 1:
            parts[-1][1:] = [version]
        else:
            parts.append([version])
    return ", ".join("-".join(str(end) for end in part) for part in parts)
