"""Joining from a peer's live weights, verified against the broker's manifests.

- The version, its layout, its sums and the deltas between versions come from the broker; only bits come from the peer.
  Every block has a digest against loss on the way; the sums of the whole state decide.
- A peer may move to newer versions half way. Its blocks come in the order of the cut, so the blocks sent before a move
  are a first part of the state: the broker's deltas of that move, applied to that part alone, bring it to the version
  of the rest. So one pass is enough however often the peer moves, and large models can be copied while they are
  trained.
- A peer that gives less than FAIR_BYTES_PER_S (rules/weights/patience.py) of the state, after slow_s, is left.
- Memory: the whole state, a block, and the changes of a move.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..contract.errors import PeerLost, WeightError, WireError
from ..contract.wire import load_json
from ..format.codec import Bits
from ..format.decoder import Decoder
from ..format.manifest import WeightManifest, check_state
from ..format.manifest import block_digest as digest_of
from ..format.regions import Region, cut
from ..ports.weights import WeightStore
from ..rules.weights.patience import FAIR_BYTES_PER_S
from ..versions.commit import commit
from ..versions.rank_parts import ShardMap, ShardSlice, whole
from ..versions.reader import ChainReader
from ..versions.stage import Stage
from .relay_client import Connection
from .relay_frames import BLOCK, Word
from .relay_options import RelayOptions

State = dict[str, Bits]


class Mark(NamedTuple):
    """A move: from `region` on, in the order of the cut, blocks are of `version`."""

    version: int
    region: Region


async def fetch_snapshot(
    store: WeightStore,
    run_id: str,
    address: str,
    *,
    at_least_version: int,
    options: RelayOptions | None = None,
) -> tuple[WeightManifest, State]:
    """Copy a peer's live weights, verified.

    Args:
        store: gives the manifests, and the deltas if the peer moves.
        address: of the peer, a holder's.
        at_least_version: older weights are of no use.

    Returns:
        A manifest of the copied version, and flat stored bits by name.

    Raises:
        PeerLost: the peer is gone, has no such version, or sent wrong data: ask another one.
        BrokerError: the broker could not be asked.
    """
    options = options or RelayOptions()
    started_s = asyncio.get_running_loop().time()
    connection = await Connection.open(address, options)
    try:
        await connection.ask_json(Word.SNAPSHOT, {"run_id": run_id, "at_least_version": at_least_version})
        facts = load_json(await connection.answer(Word.LIVE))
        first = await _manifest(store, run_id, _version(facts))
        if facts.get("layout_digest") != first.layout_digest:
            raise PeerLost(f"a peer has other tensors than run {run_id!r}")
        async with asyncio.timeout_at(started_s + options.slow_s + first.dense_bytes / FAIR_BYTES_PER_S):
            bits, marks = await _collect(connection, first)
        connection.close()
        for before, after in pairwise(marks):
            await _bring(store, first, bits, before.version, after)
        last = first if len(marks) == 1 else await _manifest(store, run_id, marks[-1].version)
        await asyncio.to_thread(check_state, last, bits)
        return last, bits
    except PeerLost:
        raise
    except TimeoutError as error:
        raise PeerLost(f"a peer's snapshot of run {run_id!r} comes too slowly") from error
    except (WireError, WeightError) as error:
        raise PeerLost(f"a peer's snapshot of run {run_id!r} is not right: {error}") from error
    finally:
        connection.close()


def _version(facts: Any) -> int:
    if not isinstance(facts, dict) or type(facts.get("version")) is not int:
        raise PeerLost("a peer does not say which version its weights are")
    return int(facts["version"])


async def _manifest(store: WeightStore, run_id: str, version: int) -> WeightManifest:
    """Return the broker's manifest of a version that the peer has."""
    names = [name for name in await store.held(run_id) if name[0] == version]
    found = await store.manifests(run_id, names[:1])  # the sums are the same in each of its manifests
    if not found or found[0] is None:
        raise PeerLost(f"a peer offers version {version} of run {run_id!r}, which the broker does not hold")
    found[0].check()
    return found[0]


async def _collect(connection: Connection, manifest: WeightManifest) -> tuple[State, list[Mark]]:
    """Receive all blocks, and the marks that say which version they are of."""
    layout = manifest.tensors
    bits = {spec.name: np.zeros(spec.element_count, spec.bits_dtype) for spec in layout.tensors}
    regions = cut(layout)
    marks = [Mark(manifest.version, regions[0])] if regions else []
    decoder = Decoder()
    for index, region in enumerate(regions):
        word, data = await connection.next()
        if word == Word.MOVED:
            marks.append(Mark(_version(load_json(data)), region))
            word, data = await connection.next()
        if word != Word.PART or len(data) < BLOCK.size or BLOCK.unpack_from(data)[0] != index:
            raise PeerLost(f"a peer sent {word.name} where block {index} was due")
        flat = bits[layout.tensors[region.tensor].name]
        await asyncio.to_thread(_take, decoder, data, region, flat)
    await connection.answer(Word.DONE)
    return bits, marks or [Mark(manifest.version, Region.span(0, 0, 0))]


def _take(decoder: Decoder, data: bytes, region: Region, flat: Bits) -> None:
    """Decode one block into its place.

    Raises:
        WireError: it is not the block that was sent, or cannot be decoded.
    """
    body = memoryview(data)[BLOCK.size :]
    if digest_of(body) != BLOCK.unpack_from(data)[1]:
        raise WireError("a block was damaged on the way")
    decoded = decoder.decode(body, element_count=region.element_count, dtype=flat.dtype)
    if not decoded.is_absolute or decoded.indices is not None:
        raise WireError("a block of a snapshot needs a base")
    region.write(flat, decoded.numbers)


async def _bring(store: WeightStore, manifest: WeightManifest, bits: State, have: int, mark: Mark) -> None:
    """Bring the blocks before `mark` from version `have` to the mark's."""
    layout, end = manifest.tensors, mark.region
    slices = list(whole(layout).slices[: end.tensor])
    if end.start:
        slices.append(ShardSlice(Region.span(end.tensor, 0, end.start), layout.tensors[end.tensor].name, 0, end.start))
    unknown = np.zeros(len(slices), dtype=np.uint64)  # sums are made at the end, of everything
    stage = Stage(ShardMap(layout, layout, tuple(slices)), bits, have, unknown)
    reader = ChainReader(store, manifest.run_id)
    staged = await reader.stage(await reader.plan(have, mark.version), stage)
    await asyncio.to_thread(commit, staged, bits)
