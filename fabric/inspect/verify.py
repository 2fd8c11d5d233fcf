"""Checks what the broker holds, from outside: every chunk, every block, every state, and every way that leads to it.

- A version's manifests (delta, jumps, keyframe) must name the same sums, and each is staged from its own base: so all
  ways to a version are one state. States are compared by their sums, 64 bits for each tensor.
- Where a keyframe is reached by deltas too, and at the end, the sums are made again from the whole state.
- Nothing is written, and a fault does not end the check: all are named. A version deleted meanwhile is no fault.
- A version that is held must be readable by somebody who has nothing: one that is not is a fault, whatever the cause.
- A manifest to whose base nothing leads any more serves receivers that hold it; its bytes are checked, its state not.
- Memory: two states of the model, and FETCH_BYTES_MAX of encoded bytes. Every checked manifest is fetched once, or
  twice where the next one does not begin where it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..contract.errors import ChainBroken, DigestMismatch, LayoutMismatch, VersionUnknown, WireError
from ..format.codec import Bits
from ..format.manifest import BROKER, Head, Sums, WeightManifest, check_state
from ..ports.weights import WeightStore
from ..rules.weights.chain import KEYFRAME, plan
from ..versions.checked import ABSENT, Chunk, checked_chunks
from ..versions.commit import Staged, commit
from ..versions.rank_parts import whole
from ..versions.stage import Stage

NAMES_SHOWN_MAX = 3

Name = tuple[int, str]
Progress = Callable[[int, int], None]  # bytes checked, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is wrong with a manifest. chunk: None where it is no chunk's. tensors: the names it concerns."""

    version: int
    kind: str
    text: str
    chunk: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(slots=True)
class Verified:
    """The manifests that were looked at, and their faults.

    Attributes:
        checked: manifests whose state was reached and compared. unreached: nothing held leads to their base, or their
            bytes were never on the broker.
        unreadable: versions that nobody who has nothing can read.
        byte_count, chunk_count, block_count: found right.
    """

    checked: list[Name] = field(default_factory=list)
    unreached: list[Name] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    byte_count: int = 0
    chunk_count: int = 0
    block_count: int = 0


async def verify(
    store: WeightStore, run_id: str, version: int | None = None, *, progress: Progress = lambda done, total: None
) -> Verified:
    """Check one version of a run with all manifests that lead into it; version None: all that are held.

    Raises:
        VersionUnknown: it is not held, or nothing is. BrokerError: the broker could not be asked.
    """
    head = await store.head(run_id)
    names = [name for name in await store.held(run_id) if name[0] <= head.version]
    if not names:
        raise VersionUnknown(
            f"nothing is published in run {run_id!r} yet: its trainer does, with"
            " run.publish(model.named_parameters(), version=0)",
            version=version,
            head=head.version,
        )
    if version is not None and version not in {name[0] for name in names}:
        raise VersionUnknown(
            f"version {version} of run {run_id!r} is not held by the broker (head is {head.version}):"
            f" `rollfab weights ls --run {run_id}` shows what is",
            version=version,
            head=head.version,
        )
    walk = _Walk(store, run_id, progress)
    await walk.learn(names)
    await walk.go([name for name in walk.manifests if version is None or name[0] == version])
    wanted = {head.version, *(name[0] for name in names)} if version is None else {version}
    await walk.judge(sorted(wanted), head)
    return walk.found


@dataclass(slots=True)
class _State:
    """The weights of a version, verified."""

    version: int
    bits: dict[str, Bits]
    sums: Sums


class _Walk:
    """Visits bases from the oldest to the newest with one live state, and stages what starts there."""

    def __init__(self, store: WeightStore, run_id: str, progress: Progress) -> None:
        self._store = store
        self._run_id = run_id
        self._progress = progress
        self._live: _State | None = None
        self._bad: set[Name] = set()
        self._counted: set[Name] = set()
        self._total_bytes = 0
        self.manifests: dict[Name, WeightManifest] = {}
        self.found = Verified()

    async def learn(self, names: Sequence[Name]) -> None:
        """Read and check manifests, one by one, so that one that cannot be read is named."""
        for name in names:
            try:
                (manifest,) = await self._store.manifests(self._run_id, [name])
                if manifest is None:
                    continue  # deleted meanwhile
                manifest.check()
            except (WireError, LayoutMismatch) as error:
                self._fault(name, f"its manifest cannot be used: {error}")
                continue
            if (manifest.run_id, manifest.version, manifest.kind) != (self._run_id, *name):
                other = f"version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r}"
                self._fault(name, f"its manifest cannot be used: it is that of {other}")
                continue
            self.manifests[name] = manifest
        ordered = sorted(self.manifests)
        for left, right in pairwise(ordered):
            if left[0] == right[0]:
                self._compare(self.manifests[left], self.manifests[right])

    async def go(self, wanted: Sequence[Name]) -> None:
        """Check these manifests."""
        items = [self.manifests[name] for name in wanted]
        self._total_bytes = sum(item.payload_bytes for item in items)
        keyframes = {item.version: item for item in items if item.kind == KEYFRAME}
        others = [item for item in items if item.kind != KEYFRAME]
        places = sorted({*keyframes, *(item.base_version for item in others)})
        for place, following in zip(places, [*places[1:], None], strict=True):
            if place in keyframes:
                await self._arrive(keyframes[place])
            starting = [item for item in others if item.base_version == place]
            if starting:
                await self._depart(place, starting, following)
        await self._check_whole()

    async def judge(self, versions: Sequence[int], head: Head) -> None:
        """Name the versions that nobody who has nothing can read; those that a collective carried are not meant to."""
        held = {name[0] for name in await self._store.held(self._run_id)} | {head.version}
        for version in versions:
            is_elsewhere = any(
                item.version == version and item.carrier != BROKER and name in self.found.unreached
                for name, item in self.manifests.items()
            )
            if version not in held or is_elsewhere or version in {name[0] for name in self.found.checked}:
                continue
            self.found.unreadable.append(version)
            if version not in {fault.version for fault in self.found.faults}:
                kinds = [name[1] for name in self.manifests if name[0] == version]
                text = "nothing right that is held leads to its base" if kinds else "its manifest is not there"
                self._fault((version, kinds[0] if kinds else head.kind), text)

    async def _arrive(self, keyframe: WeightManifest) -> None:
        """Stage a keyframe and go on from it; if another way led here, it led to the same."""
        if self._live is not None and self._live.version == keyframe.version:
            await self._check_whole()
        state = await self._keyframe(keyframe)
        if state is not None:
            self._live = state

    async def _depart(self, place: int, starting: Sequence[WeightManifest], following: int | None) -> None:
        """Stage all that starts at version `place`; go on by what leads to `following` (None: to the newest)."""
        await self._bring(place)
        onward: Staged | None = None
        for manifest in starting:
            live = self._live if self._live is not None and self._live.version == place else None
            staged = await self._stage(manifest, live)
            if staged is not None and following in (None, manifest.version):
                onward = staged
        if onward is not None:
            self._commit(onward)

    async def _bring(self, goal: int) -> None:
        """Make `goal` live by the cheapest way that is not known to be bad; leaves it as it is where there is none."""
        while self._live is None or self._live.version != goal:
            have = None if self._live is None or self._live.version > goal else self._live.version
            links = [item.link for name, item in self.manifests.items() if name not in self._bad]
            try:
                step = plan(have, goal, links)[0]
            except ChainBroken:
                return
            manifest = self.manifests[(step.version, step.kind)]
            if manifest.kind == KEYFRAME:
                self._live = await self._keyframe(manifest) or self._live
            elif (staged := await self._stage(manifest, self._live)) is not None:
                self._commit(staged)

    def _commit(self, staged: Staged) -> None:
        live = self._live
        assert live is not None
        commit(staged, live.bits)
        live.version, live.sums = staged.version, staged.sums

    async def _keyframe(self, manifest: WeightManifest) -> _State | None:
        staged = await self._stage(manifest, None)
        if staged is None:
            return None
        bits = {spec.name: np.zeros(0, spec.bits_dtype) for spec in manifest.tensors.tensors}
        bits |= {name: np.require(values, requirements="W") for name, (_, values) in staged.writes.items()}
        return _State(manifest.version, bits, staged.sums)

    async def _stage(self, manifest: WeightManifest, live: _State | None) -> Staged | None:
        """Fetch and check a manifest's chunks and blocks; stage it off `live`. None: it has a fault, or no base."""
        name = (manifest.version, manifest.kind)
        can_stage = live is not None or manifest.kind == KEYFRAME
        is_first = name not in self._counted  # of what is fetched again nothing is counted twice
        self._counted.add(name)
        stage = None
        if can_stage:
            bits, have, sums = (live.bits, live.version, live.sums) if live is not None else (None, -1, None)
            stage = Stage(whole(manifest.tensors), bits, have, sums)
        try:
            if stage is not None:
                await asyncio.to_thread(stage.begin, manifest)
            is_whole = await self._feed(manifest, stage, is_first=is_first)
            if is_whole and stage is not None:
                await asyncio.to_thread(stage.end)
        except (DigestMismatch, WireError, LayoutMismatch, ChainBroken) as error:
            self._fault(name, str(error), tensors=tuple(error.facts.get("names", ())))
            is_whole = False
        if is_whole and stage is None:
            self._leave(name)
        if not is_whole or stage is None:
            self._bad.add(name)
            return None
        if is_first:
            self.found.checked.append(name)
        return await asyncio.to_thread(stage.finish)

    async def _feed(self, manifest: WeightManifest, stage: Stage | None, *, is_first: bool) -> bool:
        """Feed all chunks to the stage, in order; returns whether they are there and right."""
        wrong: list[Chunk] = []
        async for chunk in checked_chunks(self._store, manifest):
            if chunk.data is None:
                wrong.append(chunk)
                continue
            if is_first:
                self._count(chunk, len(chunk.data))
            if not wrong and stage is not None:
                await asyncio.to_thread(stage.feed, chunk.data)
        if wrong and await self._is_held(manifest):  # else it was deleted while we looked
            self._note(manifest, wrong)
        return not wrong

    def _note(self, manifest: WeightManifest, wrong: Sequence[Chunk]) -> None:
        name = (manifest.version, manifest.kind)
        if manifest.carrier != BROKER and all(chunk.problem == ABSENT for chunk in wrong):
            self._leave(name)
            return
        for chunk in wrong:
            layout = manifest.tensors.tensors
            tensors = tuple(dict.fromkeys(layout[row.tensor].name for row, _ in chunk.rows))
            text = f"chunk {chunk.index} {chunk.problem}; it holds {_some(tensors)}"
            self._fault(name, text, chunk=chunk.index, tensors=tensors)

    def _leave(self, name: Name) -> None:
        if name not in self.found.unreached:
            self.found.unreached.append(name)

    async def _is_held(self, manifest: WeightManifest) -> bool:
        return (manifest.version, manifest.kind) in await self._store.held(self._run_id)

    async def _check_whole(self) -> None:
        """Make the sums of the live state again, from all its elements."""
        live = self._live
        if live is None:
            return
        for name, manifest in self.manifests.items():
            if name[0] == live.version:
                try:
                    await asyncio.to_thread(check_state, manifest, live.bits)
                except DigestMismatch as error:
                    self._fault(name, str(error), tensors=tuple(error.facts["names"]))
                return

    def _compare(self, left: WeightManifest, right: WeightManifest) -> None:
        """Require that two manifests of one version name one state."""
        name = (right.version, right.kind)
        if left.layout_digest != right.layout_digest:
            self._fault(name, f"it has another layout than the {left.kind} of the same version")
            return
        try:
            right.check_sums(left.sums)
        except DigestMismatch as error:
            tensors = tuple(error.facts["names"])
            text = f"it leads to another state than the {left.kind} of the same version: {_some(tensors)} differ"
            self._fault(name, text, tensors=tensors)

    def _count(self, chunk: Chunk, byte_count: int) -> None:
        found = self.found
        found.chunk_count += 1
        found.byte_count += byte_count
        found.block_count += len(chunk.rows)
        self._progress(found.byte_count, max(found.byte_count, self._total_bytes))

    def _fault(self, name: Name, text: str, *, chunk: int | None = None, tensors: tuple[str, ...] = ()) -> None:
        fault = Fault(version=name[0], kind=name[1], text=text, chunk=chunk, tensors=tensors)
        if fault not in self.found.faults:
            self.found.faults.append(fault)


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
