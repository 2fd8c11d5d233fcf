"""Publishing weights: a model's tensors, as stored bits, become the next version of a run.

- The first version of a publisher is a keyframe, later ones are deltas to the version before; when the deltas since the
  last keyframe have grown as large as it, a keyframe of the same version is published beside the delta.
- Everything is checked before anything is written: names, shapes and dtypes against the run's, the version against
  the head, the epoch against other publishers.
- The snapshot moves only when the head has moved. A version whose sending failed is finished by the next `publish`.
- The tensors must not change until `publish` returns.
- Memory: one copy of the weights on the host, and the encoded version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..fabric.clock import Clock, SystemClock
from ..fabric.errors import FabricError, InputError, LayoutMismatch, WeightError
from ..fabric.ports_weights import WeightStore
from ..fabric.rules.chain import Link, garbage, keyframe_due
from ..fabric.rules.publish import TAKEN_OVER, not_newer, refusal
from ..fabric.weights.codec import Bits
from ..fabric.weights.layout import Layout, TensorSpec
from ..fabric.weights.snapshot import Identity, Prepared, Snapshot

log = logging.getLogger(__name__)

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What publishing a version took. density: changed elements as a fraction of all. keyframe_bytes: of the keyframe
    published beside a delta, 0 without."""

    version: int
    kind: str
    payload_bytes: int
    dense_bytes: int
    changed_count: int
    density: float
    encode_s: float
    keyframe_bytes: int = 0


class Publisher:
    """Publishes versions of one run.

    Args:
        shard_count: of the run; every shard learns the head.
        state_every: versions divisible by this carry a digest of the whole state (about 0.1 s per GB).
    """

    def __init__(
        self, store: WeightStore, run_id: str, shard_count: int = 1, *, state_every: int = 1, clock: Clock | None = None
    ) -> None:
        assert state_every >= 1
        self._store = store
        self._run_id = run_id
        self._shard_count = shard_count
        self._state_every = state_every
        self._clock = clock or SystemClock()
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._layout: Layout | None = None
        self._snapshot: Snapshot | None = None
        self._pending: tuple[Snapshot, Prepared, PublishReport] | None = None
        self._links: list[Link] = []
        self._report: PublishReport | None = None

    async def publish(self, named: Named, version: int) -> PublishReport:
        """Make `named` the run's version `version`.

        Args:
            named: name → tensor, or pairs: torch tensors or numpy arrays; numpy uint16 is taken as bfloat16 bits.
            version: above the head.

        Raises:
            InputError: no tensors, or something that is not one.
            LayoutMismatch: names, shapes or dtypes are not the run's; nothing was written.
            VersionConflict: not newer than the head, or another publisher took over.
            BrokerError: not sent; the next call finishes it.
        """
        if isinstance(version, bool) or not isinstance(version, (int, np.integer)):
            raise InputError(f"version is {version!r}, expected a whole number above the head's", version=version)
        version = int(version)
        if version < 0:
            raise InputError(f"version {version} is below 0: versions count up from 0", version=version)
        async with self._lock:
            layout, bits = await asyncio.to_thread(collect_bits, named)
            await self._open()
            if self._layout is not None:
                self._layout.check(layout)
            await self._mind_a_lost_head()
            if self._pending is not None:
                await self._send(*self._pending)
            if (repeated := await self._check_version(version, bits)) is not None:
                return repeated
            snapshot, prepared, report = await self._prepare(layout, bits, version)
            await self._send(snapshot, prepared, report)
            keyframe_bytes = await self._tend()
            return PublishReport(**{**_fields(report), "keyframe_bytes": keyframe_bytes})

    async def _open(self) -> None:
        """Take charge of the run, once, and learn what is published."""
        if self._epoch:
            return
        epoch = await self._store.open_publisher(self._run_id)
        head = await self._store.head(self._run_id)
        found = await self._store.manifests(self._run_id, await self._store.held(self._run_id))
        manifests = [manifest for manifest in found if manifest is not None]
        self._links = [manifest.link for manifest in manifests]
        self._layout = next((item.tensors for item in manifests if item.version == head.version), None)
        self._epoch = epoch

    async def _mind_a_lost_head(self) -> None:
        """A broker that lost its last writes (a replica took over) may lack what we built on: begin anew from here.

        The next version is then a keyframe, which needs nothing before it.
        """
        if self._snapshot is None:
            return
        head = await self._store.head(self._run_id)
        if head.epoch != self._epoch or head.version >= self._snapshot.version:
            return
        facts = {"run_id": self._run_id, "head_version": head.version, "policy_version": self._snapshot.version}
        log.warning("weights.head_went_back", extra=facts)
        found = await self._store.manifests(self._run_id, await self._store.held(self._run_id))
        self._links = [manifest.link for manifest in found if manifest is not None]
        self._snapshot = self._pending = self._report = None

    async def _check_version(self, version: int, bits: Mapping[str, Bits]) -> PublishReport | None:
        """Require a version above the head; returns the report when just this was published before."""
        head = await self._store.head(self._run_id)
        if head.epoch != self._epoch:
            link = Link(version=version, base_version=-1, kind="", epoch=self._epoch, payload_bytes=0, chunk_count=0)
            raise refusal(TAKEN_OVER, self._run_id, link, head_version=head.version, epoch=head.epoch)
        if version > head.version:
            return None
        report, snapshot = self._report, self._snapshot
        is_mine = report is not None and snapshot is not None and version == report.version == head.version
        if is_mine and snapshot is not None and await asyncio.to_thread(snapshot.equals, bits):
            return report
        raise not_newer(self._run_id, version, head.version)

    async def _prepare(
        self, layout: Layout, bits: Mapping[str, Bits], version: int
    ) -> tuple[Snapshot, Prepared, PublishReport]:
        identity = Identity(run_id=self._run_id, epoch=self._epoch, version=version)
        started_s = self._clock.now_s()
        snapshot = self._snapshot
        if snapshot is None:
            snapshot = await asyncio.to_thread(Snapshot, layout, bits)
            prepared = await asyncio.to_thread(snapshot.prepare_keyframe, identity)
        else:
            has_state = version % self._state_every == 0
            prepared = await asyncio.to_thread(snapshot.prepare_delta, identity, bits, has_state_digest=has_state)
        manifest = prepared.manifest
        report = PublishReport(
            version=version,
            kind=manifest.kind,
            payload_bytes=manifest.payload_bytes,
            dense_bytes=manifest.dense_bytes,
            changed_count=manifest.changed_count,
            density=manifest.changed_count / max(1, manifest.element_count),
            encode_s=self._clock.now_s() - started_s,
        )
        return snapshot, prepared, report

    async def _send(self, snapshot: Snapshot, prepared: Prepared, report: PublishReport) -> None:
        """Chunks, manifest, head; then the snapshot follows. Every part may be repeated."""
        manifest = prepared.manifest
        self._pending = None
        try:
            await self._store.put_chunks(manifest, 0, prepared.chunks)
            await self._store.put_manifest(manifest)
            await self._store.advance_head(manifest, self._shard_count)
        except WeightError:
            raise  # refused for good: not to be tried again
        except BaseException:
            # Whether the head has moved is unknown; the next publish repeats this version first, which is harmless.
            self._pending = (snapshot, prepared.detached(), report)
            raise
        snapshot.advance(prepared)
        self._snapshot, self._layout, self._report = snapshot, snapshot.layout, report
        self._links.append(manifest.link)
        log.info("weights.published", extra={"run_id": self._run_id, **_fields(report)})

    async def _tend(self) -> int:
        """Publish a keyframe of the head where one is due, delete what nobody needs; returns the keyframe's bytes.

        The version is out already, so a failure here is a warning; the next publish tries again.
        """
        snapshot = self._snapshot
        assert snapshot is not None
        keyframe_bytes = 0
        try:
            if keyframe_due(snapshot.version, self._links):
                identity = Identity(run_id=self._run_id, epoch=self._epoch, version=snapshot.version)
                keyframe = await asyncio.to_thread(snapshot.prepare_keyframe, identity)
                await self._store.put_chunks(keyframe.manifest, 0, keyframe.chunks)
                await self._store.put_manifest(keyframe.manifest)
                self._links.append(keyframe.manifest.link)
                keyframe_bytes = keyframe.manifest.payload_bytes
            dropped = garbage(snapshot.version, self._links)
            await self._store.drop(self._run_id, dropped)
            self._links = [link for link in self._links if link not in dropped]
        except FabricError as error:
            log.warning("weights.tending_failed", extra={"run_id": self._run_id, "error": str(error)})
        return keyframe_bytes


def collect_bits(named: Named) -> tuple[Layout, dict[str, Bits]]:
    """Layout and flat stored bits of torch tensors or numpy arrays; no copy where they lie contiguous on the host.

    Raises:
        InputError: no tensors, or something that is not one. LayoutMismatch: a name twice, tied tensors, odd dtypes.
    """
    pairs = _pairs(named)
    if not pairs:
        raise InputError("no tensors to publish: was the iterator of parameters used up before?")
    specs: list[TensorSpec] = []
    bits: dict[str, Bits] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in pairs:
        spec, array, storage = _from_torch(name, tensor) if hasattr(tensor, "detach") else _from_numpy(name, tensor)
        other = owners.setdefault(storage, name) if spec.element_count else name
        if other != name:
            raise LayoutMismatch(
                f"tensors {other!r} and {name!r} are tied (one storage): publish tied parameters once, as"
                " model.named_parameters() does and state_dict() does not",
                names=[other, name],
            )
        specs.append(spec)
        bits[name] = array
    return Layout(tuple(specs)), bits


def _pairs(named: Named) -> list[tuple[str, Any]]:
    try:
        pairs = [(name, tensor) for name, tensor in (named.items() if isinstance(named, Mapping) else named)]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{type(named).__name__} cannot be published: give model.named_parameters(), a mapping, or pairs of name"
            " and tensor"
        ) from error
    for name, _ in pairs:
        if not isinstance(name, str):
            raise InputError(f"a tensor's name is {name!r}: names are texts")
    return pairs


def _from_torch(name: str, tensor: Any) -> tuple[TensorSpec, Bits, tuple[Any, ...]]:
    import torch  # here, because the client must stay importable without it

    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "full_tensor"):
        raise InputError(
            f"tensor {name!r} is not a plain dense tensor with data (meta, sparse or sharded): gather it first, for"
            " sharded ones with .full_tensor()",
            name=name,
        )
    spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    storage = (str(tensor.device), tensor.data_ptr(), spec.byte_count)
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return spec, flat.numpy().view(spec.bits_dtype), storage


def _from_numpy(name: str, tensor: Any) -> tuple[TensorSpec, Bits, tuple[Any, ...]]:
    if not isinstance(tensor, np.ndarray):
        raise InputError(
            f"tensor {name!r} is a {type(tensor).__name__}: publish torch tensors or numpy arrays", name=name
        )
    dtype = "bfloat16" if tensor.dtype == np.uint16 else tensor.dtype.name
    spec = TensorSpec(name, dtype, tensor.shape)
    array = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
    return spec, array.reshape(-1).view(spec.bits_dtype), ("numpy", tensor.ctypes.data, spec.byte_count)


def _fields(report: PublishReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in PublishReport.__slots__}
