"""The weight store as the processes of a node see it: each chunk is fetched once, by the process that comes first.

- Found chunks were verified; fetched ones are verified before the node sees them. A chunk that is corrupt in the broker
  itself is handed on as it is, and not kept: the reader reports it.
- One process fetches a version at a time (see fetch lock below), the others take the files as they appear. The kernel
  gives the lock to the next process when its owner dies. One process may pass an owner that shows neither a chunk nor a
  beat for stall_s. An owner beats while it fetches, for as long as a piece may take (RelayOptions.piece_s).
- Chunks of a collective are kept by this process until they are live, as nobody else may have them, and lie in the
  cache like any other chunk.
- The cache is a help, never a need: if it is missing, full or taken away, chunks come from above.
- Nothing here waits longer than it takes to fetch, and stall_s for each owner that is stuck. After STALL_COUNT_MAX
  times stall_s without a single chunk or beat a process fetches for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from ..contract.clock import Clock, SystemClock
from ..format.manifest import Damage, Head, Holder, WeightManifest, pieces
from ..ports.weights import DAMAGE_TTL_S, Range, WeightStore
from ..rules.weights.chain import Link
from .node_cache import FETCH_LOCK, ChunkCache, ChunkName, chunk_name
from .relay_options import RelayOptions
from .relay_parents import Parents

log = logging.getLogger(__name__)

STALL_COUNT_MAX = 4
STALLED_COUNT_MAX = 256  # tokens remembered; a stalled owner is rare

CAPACITY_BYTES_MIN = 8 << 30
MEMORY_SHARE = 16  # of the machine's memory, for kept chunks; it is filled only until those are live

Found = dict[int, bytes | None]  # by index; None: not held any more
Version = tuple[str, int, str]  # run, version, kind


class PassingStore:
    """WeightStore (see ports) that hands every call to `inner`; decorators override what they do themselves."""

    def __init__(self, inner: WeightStore) -> None:
        self.inner = inner

    async def open_publisher(self, run_id: str) -> int:
        return await self.inner.open_publisher(run_id)

    async def head(self, run_id: str) -> Head:
        return await self.inner.head(run_id)

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        return await self.inner.wait_head(run_id, above, timeout_s)

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        await self.inner.put_chunks(manifest, first_index, chunks)

    async def put_manifest(self, manifest: WeightManifest) -> None:
        await self.inner.put_manifest(manifest)

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        await self.inner.advance_head(manifest, shard_count)

    async def held(self, run_id: str) -> list[tuple[int, str]]:
        return await self.inner.held(run_id)

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        return await self.inner.manifests(run_id, names)

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        return await self.inner.chunks(manifest, indices)

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        return await self.inner.chunk_ranges(manifest, ranges)

    async def mend(self, manifest: WeightManifest, chunks: Mapping[int, bytes], epoch: int) -> None:
        await self.inner.mend(manifest, chunks, epoch)

    async def drop(self, run_id: str, links: Sequence[Link], epoch: int) -> None:
        await self.inner.drop(run_id, links, epoch)

    async def hold(self, run_id: str, holder: Holder, ttl_s: float) -> None:
        await self.inner.hold(run_id, holder, ttl_s)

    async def release_hold(self, run_id: str, holder_id: str) -> None:
        await self.inner.release_hold(run_id, holder_id)

    async def holders(self, run_id: str, *, addressed: bool = True) -> list[Holder]:
        return await self.inner.holders(run_id, addressed=addressed)

    async def offer(self, run_id: str, data: bytes, ttl_s: float) -> None:
        await self.inner.offer(run_id, data, ttl_s)

    async def offers(self, run_id: str) -> bytes | None:
        return await self.inner.offers(run_id)

    async def answer(self, run_id: str, round_id: str, member: str, data: bytes, ttl_s: float) -> None:
        await self.inner.answer(run_id, round_id, member, data, ttl_s)

    async def answers(self, run_id: str, round_id: str) -> dict[str, bytes]:
        return await self.inner.answers(run_id, round_id)

    async def report_damage(self, run_id: str, damage: Damage, ttl_s: float = DAMAGE_TTL_S) -> None:
        await self.inner.report_damage(run_id, damage, ttl_s)

    async def damages(self, run_id: str) -> list[Damage]:
        return await self.inner.damages(run_id)

    async def clear_damages(self, run_id: str, damages: Sequence[Damage]) -> None:
        await self.inner.clear_damages(run_id, damages)

    async def tend(self, run_id: str, epoch: int, ttl_s: float) -> None:
        await self.inner.tend(run_id, epoch, ttl_s)

    async def tended(self, run_id: str) -> int | None:
        return await self.inner.tended(run_id)

    async def room_bytes(self) -> int | None:
        return await self.inner.room_bytes()


def default_capacity_bytes() -> int:
    """Return a sixteenth of the machine's memory, at least 8 GiB: a bound, not a reservation."""
    return max(CAPACITY_BYTES_MIN, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MEMORY_SHARE)


class RelayedStore(PassingStore):
    """WeightStore (see ports) that looks into the node's cache first.

    Args:
        inner: the broker's store.
        cache: of the node; None: every chunk comes from above.
        parents: the relays above this node, asked before the broker.
        capacity_bytes: the most bytes of chunks that `keep` takes; None: `default_capacity_bytes`.
    """

    def __init__(
        self,
        inner: WeightStore,
        cache: ChunkCache | None,
        *,
        parents: Parents | None = None,
        options: RelayOptions | None = None,
        clock: Clock | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        super().__init__(inner)
        self.capacity_bytes = default_capacity_bytes() if capacity_bytes is None else capacity_bytes
        self._kept: dict[Version, dict[ChunkName, bytes]] = {}  # oldest first
        self._cache = cache
        self._parents = parents
        self._options = options or RelayOptions()
        self._clock = clock or SystemClock()
        self._stalled: dict[bytes, None] = {}  # tokens of owners not to wait for, oldest first

    @property
    def has_cache(self) -> bool:
        """Whether fetched chunks stay for other processes and nodes: a relay without a cache is of no use to them."""
        return self._cache is not None

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the chunks that were given to `keep` and not forgotten."""
        return sum(_size(chunks) for chunks in self._kept.values())

    async def keep(self, manifest: WeightManifest, chunks: Mapping[int, bytes]) -> bool:
        """Keep proven chunks, by index, beside those of the same version kept before; return whether all are there.

        The oldest versions make room: their chunks then come from the cache or from above. A version that is larger
        than the whole capacity is not kept.
        """
        mine = {chunk_name(manifest, index): data for index, data in chunks.items()}
        merged = self._kept.pop(_version(manifest), {}) | mine
        if _size(merged) > self.capacity_bytes:
            return False
        while self._kept and self.kept_bytes + _size(merged) > self.capacity_bytes:
            self._kept.pop(next(iter(self._kept)))
        self._kept[_version(manifest)] = merged
        if self._cache is not None:
            for name, data in mine.items():
                await asyncio.to_thread(_keep, self._cache, name, data)
        return all(chunk_name(manifest, index) in merged for index in range(len(manifest.chunk_bytes)))

    def forget(self, run_id: str, up_to_version: int) -> None:
        """Drop the kept chunks of versions that are live, or of no use any more."""
        self._kept = {
            name: chunks for name, chunks in self._kept.items() if name[0] != run_id or name[1] > up_to_version
        }

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        kept = self._kept.get(_version(manifest), {})
        names = {index: chunk_name(manifest, index) for index in indices if kept}
        found: Found = {index: kept[name] for index, name in names.items() if name in kept}
        missing = [index for index in indices if index not in found]
        if self._cache is None:
            await self._fetch(manifest, missing, found)
        else:
            found |= await self._complete(self._cache, manifest, missing)
        return [found[index] for index in indices]

    async def cached(self, names: Sequence[ChunkName]) -> list[bytes | None]:
        """Return the chunks that the node has, verified; None for the rest."""
        if self._cache is None:
            return [None] * len(names)
        return await asyncio.to_thread(lambda cache: [cache.read(name) for name in names], self._cache)

    async def close(self) -> None:
        """Drop connections and leave the cache; the inner store stays open."""
        if self._parents is not None:
            await self._parents.close()
        if self._cache is not None:
            await asyncio.to_thread(self._cache.close)

    async def _complete(self, cache: ChunkCache, manifest: WeightManifest, indices: Sequence[int]) -> Found:
        """Get all of `indices`: from the cache, from the process that is fetching, or fetched by us."""
        names = {index: chunk_name(manifest, index) for index in indices}
        found: Found = dict(await asyncio.to_thread(_read, cache, names))
        patience = _Patience(self._clock, self._options.stall_s)
        while missing := {index: name for index, name in names.items() if index not in found}:
            lock = None if patience.is_out else self._take_lock(cache, manifest)
            if not isinstance(lock, Owner):
                async with self._beating(lock, found):
                    # The owner before us may have finished between our look and our lock.
                    found.update(await asyncio.to_thread(_read, cache, missing))
                    await self._fetch(manifest, [index for index in missing if index not in found], found)
                break
            appeared = {index: name for index, name in missing.items() if cache.has(name)}
            if appeared:
                patience.renew()
                found.update(await asyncio.to_thread(_read, cache, appeared))
            elif patience.has_stalled(lock):
                self._pass(manifest, lock.token)
            else:
                await self._clock.sleep(self._options.poll_s)
        return found

    @asynccontextmanager
    async def _beating(self, lock: FetchLock | None, found: Found) -> AsyncIterator[None]:
        """Hold the lock, and beat for as long as chunks come."""
        if lock is None:
            yield
            return
        beating = asyncio.create_task(self._beat(lock, found))
        try:
            yield
        finally:
            beating.cancel()
            lock.release()

    async def _beat(self, lock: FetchLock, found: Found) -> None:
        pause_s = self._options.stall_s / 4
        count, left_s = len(found), self._options.piece_s
        while left_s > 0:
            await asyncio.sleep(pause_s)  # not the clock's sleep: a loop that stands still must not beat
            lock.beat()
            left_s = self._options.piece_s if len(found) > count else left_s - pause_s
            count = len(found)

    def _take_lock(self, cache: ChunkCache, manifest: WeightManifest) -> FetchLock | Owner | None:
        """Return the lock, or its owner; None if nobody can keep locks here."""
        link = manifest.link
        try:
            key = f"{manifest.run_id} {link.version} {link.kind} {link.epoch}"
            return take_fetch_lock(cache.directory, key, self._stalled)
        except OSError as error:
            log.warning("relay.no_fetch_lock", extra={"run_id": manifest.run_id, "error": str(error)})
            return None

    def _pass(self, manifest: WeightManifest, token: bytes) -> None:
        """Stop waiting for the owner of a fetch lock."""
        log.warning("relay.owner_stalled", extra={"run_id": manifest.run_id, "policy_version": manifest.version})
        self._stalled[token] = None
        while len(self._stalled) > STALLED_COUNT_MAX:
            del self._stalled[next(iter(self._stalled))]

    async def _fetch(self, manifest: WeightManifest, indices: Sequence[int], found: Found) -> None:
        """Get chunks from above, keep them as they come, and add them to `found`."""
        if not indices:
            return
        async with aclosing(self._arriving(manifest, indices)) as arriving:
            async for index, data in arriving:
                found[index] = data
                if data is not None and self._cache is not None:
                    await asyncio.to_thread(_keep, self._cache, chunk_name(manifest, index), data)

    async def _arriving(
        self, manifest: WeightManifest, indices: Sequence[int]
    ) -> AsyncGenerator[tuple[int, bytes | None], None]:
        """Yield chunks from the parents, verified, then the rest from the broker, unchecked."""
        left, sizes = dict.fromkeys(indices), manifest.chunk_bytes.tolist()
        if self._parents is not None:
            async with aclosing(self._parents.chunks(manifest, indices)) as arriving:
                async for index, data in arriving:
                    del left[index]
                    yield index, data
        for piece in pieces(((index, sizes[index]) for index in left), self._options.piece_bytes):
            for index, chunk in zip(piece, await self.inner.chunks(manifest, piece), strict=True):
                yield index, chunk


class _Patience:
    """How long to wait for a sign of life: stall_s for one owner, STALL_COUNT_MAX times that for all of them."""

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._owner = Owner(b"", 0)
        self._since_s = self._renewed_s = clock.now_s()

    @property
    def is_out(self) -> bool:
        """Whether to stop waiting for anybody."""
        return self._clock.now_s() - self._renewed_s >= STALL_COUNT_MAX * self._stall_s

    def renew(self) -> None:
        """Start anew: a chunk came."""
        self._since_s = self._renewed_s = self._clock.now_s()

    def has_stalled(self, owner: Owner) -> bool:
        """Whether the owner has given no sign of life for too long."""
        if owner != self._owner:
            self._since_s = self._clock.now_s()
            if owner.token == self._owner.token:  # a beat; another owner shows only that nobody has come through
                self._renewed_s = self._since_s
            self._owner = owner
        return self._clock.now_s() - self._since_s >= self._stall_s


def _version(manifest: WeightManifest) -> Version:
    return manifest.run_id, manifest.version, manifest.kind


def _size(chunks: Mapping[ChunkName, bytes]) -> int:
    return sum(map(len, chunks.values()))


def _read(cache: ChunkCache, names: Mapping[int, ChunkName]) -> dict[int, bytes]:
    read = {index: cache.read(name) for index, name in names.items()}
    return {index: data for index, data in read.items() if data is not None}


def _keep(cache: ChunkCache, name: ChunkName, data: bytes) -> None:
    """Keep a chunk if its bytes are right."""
    if name.matches(data):
        cache.write(name, data)


# ---------------------------------------------------------------- fetch lock
#
# Locks that say which process fetches for the node; the kernel takes them from the dead.
#
# - A lock is an flock on one of a fixed number of files, so nothing has to be cleaned up after a process.
# - Each lock shows a token of its own, and beats while its owner is at work. A process that has waited too long for a
#   sign of life calls that token stalled, and may then take the lock behind it; so one process passes a frozen owner,
#   not all of them.
# - No call here waits.


SLOT_COUNT = 64  # versions that share a slot wait for each other for nothing, which only costs a moment
DEPTH = 4  # so many stalled owners in a row are passed one by one; behind them each process fetches for itself
TOKEN_BYTES = 8


class Owner(NamedTuple):
    """The owner of a fetch lock. beat_ns: when it gave its last sign of life, by the file's clock."""

    token: bytes
    beat_ns: int


class FetchLock:
    """The right to fetch, until `release`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def beat(self) -> None:
        """Give a sign of life."""
        os.utime(self._handle)

    def release(self) -> None:
        """Let the next process have the lock."""
        os.close(self._handle)


def take_fetch_lock(directory: Path, key: str, stalled: Collection[bytes]) -> FetchLock | Owner:
    """Take the lock to fetch `key`, or return its owner.

    Args:
        directory: of the node's cache.
        key: names the version to fetch.
        stalled: tokens not to wait for any longer.

    Raises:
        OSError: the directory is gone, or full.
    """
    slot = xxhash.xxh3_64_intdigest(key.encode()) % SLOT_COUNT
    with contextlib.ExitStack() as held:
        mine: int | None = None
        for depth in range(DEPTH):
            handle = os.open(directory / f"{FETCH_LOCK}{slot}-{depth}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, handle)
            if _lock(handle):
                mine = handle if mine is None else mine
                continue
            token = os.pread(handle, TOKEN_BYTES, 0)
            if token not in stalled:  # also when we have a lock: the process that passed a stalled owner is at work
                return Owner(token, os.fstat(handle).st_mtime_ns)
        if mine is None:
            raise OSError(f"all {DEPTH} fetch locks of {key!r} are stalled")
        os.pwrite(mine, secrets.token_bytes(TOKEN_BYTES), 0)
        return FetchLock(os.dup(mine))  # the lock lasts as long as one copy of its handle


def _lock(handle: int) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
