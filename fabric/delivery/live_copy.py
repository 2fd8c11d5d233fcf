"""Live weights, copied block by block for joiners, without making the engine wait.

- A block is copied between two looks at the source: if a commit began meanwhile it is copied again, so every block
  sent is of one version. The engine never waits for a joiner; a joiner waits for a commit.
- If the weights move to a newer version half way, the joiner is told, and the blocks that follow are of the newer one;
  peer_copy.py brings the earlier blocks to the same version.
- Memory: one block, its copy and its encoding for each snapshot that is being made.
- A joiner that takes data too slowly is dropped (RelayOptions.slow_s): another one may want its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ..contract.errors import PeerLost, WireError
from ..contract.wire import dump_json
from ..format.codec import Bits, Encoder
from ..format.layout import Layout
from ..format.manifest import block_digest
from ..format.regions import Region, cut
from .relay_frames import BLOCK, Word, frame, send, while_busy
from .relay_options import RelayOptions

COPY_COUNT_MAX = 200  # looks at a source that is always being written: some seconds, more than a commit takes
COMMIT_POLL_S = 0.02


class SnapshotSource(Protocol):
    """Live weights of one run that may be copied while they are used."""

    @property
    def layout(self) -> Layout:
        """Return the layout of the weights."""
        ...

    def stamp(self) -> tuple[int, int] | None:
        """Return (version, commits begun so far), or None while a commit runs or the live version is in doubt.

        It must change before a commit writes its first byte. Called often, from any thread.
        """
        ...

    def bits(self) -> Mapping[str, Bits]:
        """Return flat stored bits by name, for reading; called in a thread, once for every block."""
        ...


class LiveServer:
    """Serves snapshots of the runs that are on offer."""

    def __init__(self, options: RelayOptions) -> None:
        self._options = options
        self._sources: dict[str, SnapshotSource] = {}
        self._running_count = 0

    def offer(self, run_id: str, source: SnapshotSource | None) -> None:
        """Serve a run from now on, or no more."""
        if source is None:
            self._sources.pop(run_id, None)
        else:
            self._sources[run_id] = source

    async def serve(self, writer: asyncio.StreamWriter, request: Any) -> int:
        """Answer one request; returns the bytes sent.

        Raises:
            WireError: it is not a request. PeerLost: the joiner is gone.
        """
        try:
            run_id, at_least_version = str(request["run_id"]), int(request["at_least_version"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"not a request for a snapshot: {error}") from error
        joiner = _Joiner(writer, self._options)
        source = self._sources.get(run_id)
        stamp = source.stamp() if source is not None else None
        if source is None or stamp is None or stamp[0] < at_least_version:
            held = "no such version" if stamp is None else f"version {stamp[0]}"
            await joiner.refuse(f"it has {held} of run {run_id}")
            return joiner.sent_bytes
        if self._running_count >= self._options.snapshot_count_max:
            await joiner.refuse("it serves as many snapshots as it may")
            return joiner.sent_bytes
        self._running_count += 1
        try:
            await self._stream(joiner, source, stamp[0])
        finally:
            self._running_count -= 1
        return joiner.sent_bytes

    async def _stream(self, joiner: _Joiner, source: SnapshotSource, version: int) -> None:
        layout = source.layout
        facts = {"version": version, "layout_digest": layout.digest}
        await joiner.send(Word.LIVE, dump_json(facts))
        encoder = Encoder()
        for index, region in enumerate(cut(layout)):
            copying = _copy(source, layout.tensors[region.tensor].name, region)
            wait_s, stall_s = self._options.busy_s, self._options.patience_s
            copied = await while_busy(joiner.writer, copying, every_s=wait_s, stall_s=stall_s)
            if copied is None or copied[0] < version:
                await joiner.refuse("its weights are not of one version any more")
                return
            if copied[0] != version:
                version = copied[0]
                await joiner.send(Word.MOVED, dump_json({"version": version}))
            data = await asyncio.to_thread(_encode, encoder, copied[1])
            await joiner.send(Word.PART, BLOCK.pack(index, block_digest(data)), data)
        await joiner.send(Word.DONE)


class _Joiner:
    """A peer that asked for a snapshot, and the bytes it has taken so far."""

    def __init__(self, writer: asyncio.StreamWriter, options: RelayOptions) -> None:
        self.writer = writer
        self.sent_bytes = 0
        self._options = options
        self._sending_s = 0.0

    async def send(self, word: Word, *parts: bytes) -> None:
        """Send one frame. Raises PeerLost: the joiner is gone, or takes too little."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await send(self.writer, frame(word, *parts), self._options.patience_s)
        self._sending_s += loop.time() - started_s
        self.sent_bytes += sum(len(part) for part in parts)
        if self._sending_s > self._options.body_s(self.sent_bytes):
            raise PeerLost(f"a joiner took {self.sent_bytes:,} bytes in {self._sending_s:.0f} s")

    async def refuse(self, why: str) -> None:
        """Tell the joiner why it gets nothing."""
        await self.send(Word.REFUSED, f"{why}: ask another one".encode())


async def _copy(source: SnapshotSource, name: str, region: Region) -> tuple[int, Bits] | None:
    """Return the version and the bits of a block, all of that version; None if the source never stood still."""
    for _ in range(COPY_COUNT_MAX):
        stamp = source.stamp()
        if stamp is None:
            await asyncio.sleep(COMMIT_POLL_S)
            continue
        copy = await asyncio.to_thread(_read, source, name, region)
        if source.stamp() == stamp:
            return stamp[0], copy
    return None


def _read(source: SnapshotSource, name: str, region: Region) -> Bits:
    return np.array(region.read(source.bits()[name]))


def _encode(encoder: Encoder, bits: Bits) -> bytes:
    return encoder.dense(bits).data
