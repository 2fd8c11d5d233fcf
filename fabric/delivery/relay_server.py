"""A relay: serves a node's chunks to other nodes, and snapshots of live weights to joiners.

- Chunks come out of the node's cache; missing chunks are fetched by the node's own way (node_store.py), so however many
  children ask at the same moment, each chunk comes down each edge of the tree once.
- A child's share is bounded: connections, one piece in memory for each, and the time that it may leave a piece waiting.
  Connections that have not shown the secret are counted apart, and cannot keep out those that have.
- Without a cache nothing is fetched for a child: a chunk would come from above once for each child.
- A waiting child hears so every quarter of its patience, so that it does not take a slow way above for a dead relay.
- Only children that know the secret are answered.
- A block of live weights is copied between two looks at the source: if a commit began meanwhile it is copied again, so
  every block sent is of one version. The engine never waits for a joiner; a joiner waits for a commit.
- If the weights move to a newer version half way, the joiner is told, and the blocks that follow are of the newer one;
  peer_copy.py brings the earlier blocks to the same version.
- A snapshot that is being made takes one block, its copy and its encoding of memory.
- A joiner that takes data too slowly is dropped (RelayOptions.slow_s): another one may want its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..contract.errors import FabricError, PeerLost, WireError
from ..contract.wire import dump_json, load_json
from ..format.codec import Bits, Encoder
from ..format.layout import Layout
from ..format.manifest import WeightManifest, block_digest, pieces
from ..format.regions import Region, cut
from ..host.helpers import end_all
from .node_cache import ChunkName, check_chunk_name, chunk_name
from .node_store import RelayedStore
from .relay_frames import (
    BLOCK,
    BYTES_MAX,
    HELLO,
    INDEX,
    MAGIC,
    VERSION,
    Word,
    frame,
    make_address,
    proof,
    read_body,
    read_frame,
    read_head,
    send,
    while_busy,
)
from .relay_options import RelayOptions

log = logging.getLogger(__name__)

MANIFEST_COUNT_MAX = 16  # of versions being fetched now; each has up to some hundred kilobytes
INDEX_MAX = (1 << 8 * INDEX.size) - 1
NONCE_BYTES = 16
SECRET_BYTES = 16
COPY_COUNT_MAX = 200  # looks at a source that is always being written: some seconds, more than a commit takes
COMMIT_POLL_S = 0.02


class ChunkRequest(NamedTuple):
    """Chunks of one version. names: by index."""

    run_id: str
    version: int
    kind: str
    epoch: int
    names: dict[int, ChunkName]

    @classmethod
    def read(cls, data: bytes) -> ChunkRequest:
        """Read a request. Raises WireError: it is not one."""
        facts = load_json(data)
        try:
            names = {int(row[0]): ChunkName(row[1], int(row[2]), str(row[3])) for row in facts["chunks"]}
            request = cls(str(facts["run_id"]), int(facts["version"]), str(facts["kind"]), int(facts["epoch"]), names)
        except (IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"not a request for chunks: {error}") from error
        for index, name in names.items():
            check_chunk_name(name)
            if not 0 <= index <= INDEX_MAX:
                raise WireError(f"not a request for chunks: no version has a chunk {index}")
        return request


class RelayServer:
    """Serves from one node. Make it with `start`, tell the broker its `address`, end it with `close`.

    Args:
        store: the node's.
        may_fetch: whether chunks that the node's cache lacks are fetched for a child; not without a cache.
        secret: opens the relay; a new one by default.

    Attributes:
        address: for Holder.address; a peer that has it may ask.
        served_bytes: of chunks and blocks, since the start.
    """

    def __init__(
        self,
        store: RelayedStore,
        *,
        options: RelayOptions | None = None,
        may_fetch: bool = True,
        secret: str = "",
    ) -> None:
        self.address = ""
        self.served_bytes = 0
        self._store = store
        self._options = options or RelayOptions()
        self._may_fetch = may_fetch and store.has_cache
        self._secret = secret or secrets.token_hex(SECRET_BYTES)
        self._live = LiveServer(self._options)
        self._manifests: OrderedDict[tuple[str, int, str, int], WeightManifest] = OrderedDict()
        self._children: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}  # oldest first
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, public_host: str = "") -> None:
        """Listen. port 0: a free one. public_host: how other nodes reach this one, if not by `host`.

        Raises:
            OSError: nobody can listen there.
        """
        assert self._server is None
        self._server = await asyncio.start_server(self._accept, host, port)
        self.address = make_address(public_host or host, self._server.sockets[0].getsockname()[1], self._secret)
        log.info("relay.started", extra={"host": public_host or host})

    def offer(self, run_id: str, source: SnapshotSource | None) -> None:
        """Serve snapshots of these live weights from now on; None: no more."""
        self._live.offer(run_id, source)

    async def close(self) -> None:
        """Stop listening and drop the children; they go elsewhere."""
        if self._server is not None:
            self._server.close()
        await end_all(self._children)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._children.add(task)
        self._unproven[task] = None
        if len(self._unproven) > self._options.unproven_count_max:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.cancel()
        try:
            if await self._prove(reader, writer):
                self._unproven.pop(task, None)
                await self._attend(reader, writer)
        except FabricError as error:
            log.debug("relay.child_left", extra={"error": str(error)})
        except asyncio.CancelledError:
            pass  # `close`; asyncio's server would report it as an error
        finally:
            self._children.discard(task)
            self._unproven.pop(task, None)
            writer.transport.abort()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether a child knows the secret. Raises PeerLost, WireError: it does not say so in time, or rightly."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        await self._send(writer, frame(Word.HELLO, HELLO.pack(MAGIC, VERSION, nonce)))
        try:
            async with asyncio.timeout(self._options.patience_s):
                word, size = await read_head(reader, self._options.patience_s)
                is_proof = (word, size) == (Word.AUTH, BYTES_MAX[Word.AUTH])  # of a stranger nothing else is read
                data = await read_body(reader, size, self._options.patience_s) if is_proof else b""
        except TimeoutError as error:
            raise PeerLost("a child did not prove itself in time") from error
        if not hmac.compare_digest(data, proof(self._secret, nonce)):
            log.warning("relay.refused", extra={"peer": str(writer.get_extra_info("peername"))})
            await self._refuse(writer, "the secret is not the one in this relay's address: ask the broker again")
            return False
        return True

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one child, from its proof to its end."""
        if len(self._children) - len(self._unproven) > self._options.child_count_max:
            return await self._refuse(writer, "it has as many children as it may: ask another one")
        while True:
            word, data = await read_frame(reader, self._options.idle_s)
            if word == Word.CHUNKS:
                await self._serve_chunks(writer, ChunkRequest.read(data))
            elif word == Word.SNAPSHOT:
                self.served_bytes += await self._live.serve(writer, load_json(data))
            else:
                raise WireError(f"a child sent {word.name}")

    async def _serve_chunks(self, writer: asyncio.StreamWriter, request: ChunkRequest) -> None:
        sizes = ((index, name.size) for index, name in request.names.items())
        for piece in pieces(sizes, self._options.piece_bytes):
            wait_s, stall_s = self._options.busy_s, self._options.patience_s
            found = await while_busy(writer, self._find(request, piece), every_s=wait_s, stall_s=stall_s)
            for index, data in zip(piece, found, strict=True):
                if data is None:
                    await self._send(writer, frame(Word.MISSING, INDEX.pack(index)))
                else:
                    await self._send(writer, frame(Word.CHUNK, INDEX.pack(index), data))
                    self.served_bytes += len(data)
        await self._send(writer, frame(Word.DONE))

    async def _find(self, request: ChunkRequest, piece: Sequence[int]) -> list[bytes | None]:
        """Return chunks from the cache, else from above; None for chunks that neither has."""
        found = dict(zip(piece, await self._store.cached([request.names[index] for index in piece]), strict=True))
        missing = [index for index, data in found.items() if data is None]
        if missing and self._may_fetch:
            with contextlib.suppress(FabricError):  # the child has other ways
                manifest = await self._manifest(request)
                known = [index for index in missing if manifest is not None and _has(manifest, request, index)]
                if manifest is not None and known:
                    found.update(zip(known, await self._store.chunks(manifest, known), strict=True))
        return [found[index] for index in piece]

    async def _manifest(self, request: ChunkRequest) -> WeightManifest | None:
        """Return the version's manifest, from the broker or remembered."""
        key = (request.run_id, request.version, request.kind, request.epoch)
        if key not in self._manifests:
            (manifest,) = await self._store.manifests(request.run_id, [(request.version, request.kind)])
            if manifest is None or manifest.epoch != request.epoch:
                return None
            self._manifests[key] = manifest
            while len(self._manifests) > MANIFEST_COUNT_MAX:
                self._manifests.popitem(last=False)
        self._manifests.move_to_end(key)
        return self._manifests[key]

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        await send(writer, data, self._options.patience_s)

    async def _refuse(self, writer: asyncio.StreamWriter, why: str) -> None:
        await self._send(writer, frame(Word.REFUSED, why.encode()))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _has(manifest: WeightManifest, request: ChunkRequest, index: int) -> bool:
    """Whether the child means the same chunk as we do."""
    is_there = 0 <= index < len(manifest.chunk_digests)
    return is_there and chunk_name(manifest, index)[:2] == request.names[index][:2]


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
