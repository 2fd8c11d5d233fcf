"""A weight store that can fail, an engine that only holds weights, and a model small enough to compare bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import BrokerError, EngineError, EngineUnsupported
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.rules.weights.chain import DELTA, KEYFRAME
from rollfab.fabric.versions.commit import Staged, commit
from rollfab.fabric.versions.reader import fetch_weights
from rollfab.fabric.versions.store import RedisWeightStore
from rollfab.trainer.publish.publisher import Publisher, PublishReport
from rollfab.trainer.publish.tensors import ComparesOn, Named, Parts, hold
from rollfab.workers.engines.base import TurnsAtCommit
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from tests.standin.broker import Broker, DirectClient
from tests.standin.weight_tables import WeightTables

RUN = "publish"
FAST = ReceiverOptions(poll_s=0.05, retry_s=0.01, retry_s_max=0.02, audit_every=1)


def collect(named: Named, compares_on: ComparesOn = "host") -> Parts:
    """What a publisher of its own publishes."""
    held = hold(named, compares_on)
    return held.parts(held.layout, held.boxes)


class FaultyStore(RedisWeightStore):
    """A store that can fail, lose answers, and spoil or lose chunks on their way out."""

    def __init__(self) -> None:
        self.broker = Broker()
        super().__init__(DirectClient(self.broker))
        self.tables = WeightTables(self.broker, RUN)
        self.fail_at = ""
        self.lose_answer_at = ""
        self.spoil: dict[tuple[int, str], int] = {}  # (version, kind) → how many reads come out wrong
        self.lose: dict[tuple[int, str], int] = {}
        self.fetched: list[tuple[int, str]] = []
        self.is_state_wrong = False
        self.room: int | None = None

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        self._fail("put_chunks")
        await super().put_chunks(manifest, first_index, chunks)
        self._lose_answer("put_chunks")

    async def put_manifest(self, manifest: WeightManifest) -> None:
        self._fail("put_manifest")
        await super().put_manifest(manifest)
        self._lose_answer("put_manifest")

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        self._fail("advance_head")
        await super().advance_head(manifest, shard_count)
        self._lose_answer("advance_head")

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        found = await super().manifests(run_id, names)
        if not self.is_state_wrong:
            return found
        return [item and dataclasses.replace(item, sums=item.sums + 1) for item in found]

    async def room_bytes(self) -> int | None:
        return self.room

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        name = (manifest.version, manifest.kind)
        self.fetched.extend([name] * len(indices))
        found = await super().chunks(manifest, indices)
        if self.spoil.get(name, 0) > 0:
            self.spoil[name] -= 1
            found = [None if chunk is None else bytes([chunk[0] ^ 1]) + chunk[1:] for chunk in found]
        if self.lose.get(name, 0) > 0:
            self.lose[name] -= 1
            found = [None for _ in found]
        return found

    def _fail(self, name: str) -> None:
        if self.fail_at == name:
            self.fail_at = ""
            raise BrokerError("the broker is away")

    def _lose_answer(self, name: str) -> None:
        if self.lose_answer_at == name:
            self.lose_answer_at = ""
            raise BrokerError("the answer was lost")


class BitsEngine:
    """The part of an engine that holds weights. `reject` makes the next commit stop half-way.

    loses: a tensor whose writes do nothing.
    commits: what was to become of turns and prefixes, of every commit. can_keep: whether it can keep a KV cache.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.layout, _, bits = collect(model.named_parameters())
        self.bits = {name: array.copy() for name, array in bits.items()}
        self.reject = False
        self.loses = ""
        self.can_keep = True
        self.commits: list[tuple[TurnsAtCommit, bool]] = []

    def weight_bits(self) -> Mapping[str, NDArray[Any]]:
        return self.bits

    async def read_weights(self) -> Mapping[str, NDArray[Any]]:
        return {name: array.copy() for name, array in self.bits.items()}

    async def apply(self, staged: Staged, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False) -> float:
        if turns == "keep" and not self.can_keep:
            raise EngineUnsupported("it has one cache only")
        self.commits.append((turns, may_reuse_prefix))
        if self.reject:
            self.reject = False
            name, (_, values) = next(iter(staged.writes.items()))
            self.bits[name][: len(values)] += 1
            raise EngineError("the engine could not write")
        kept = self.bits[self.loses].copy() if self.loses else None
        commit(staged, self.bits)
        if kept is not None:
            self.bits[self.loses][:] = kept
        return 0.0


class Trainer:
    """A model that is trained and published to a store that can fail. how: of its publishers."""

    def __init__(self, store: FaultyStore | None = None, **how: Any) -> None:
        self.store, self.model = store or FaultyStore(), small_model()
        self._how = how
        self.start()

    def start(self) -> None:
        """Publish by a new publisher, as a trainer does that starts again."""
        self.publisher = Publisher(self.store, RUN, **self._how)

    async def publish(self, *versions: int, rate: float = 1e-3, **settings: Any) -> PublishReport:
        """Train and publish, once for each version; return what was said of the last."""
        for version in versions:
            train(self.model, rate)
            report = await self.publisher.publish(self.model.named_parameters(), version, **settings)
        return report

    async def manifest(self, version: int, kind: str) -> WeightManifest:
        (found,) = await self.store.manifests(RUN, [(version, kind)])
        assert found is not None
        return found

    async def check(self, version: int | None = None) -> None:
        """Assert that what is published is the model."""
        await assert_published(self.store, self.model, version)


class Scene(Trainer):
    """A trainer, and a receiver of its weights. store: that both use."""

    def __init__(self, store: FaultyStore | None = None) -> None:
        super().__init__(store)
        self.engine = BitsEngine(small_model(1))
        self.receiver = self.join()

    def join(self, engine: BitsEngine | None = None, options: ReceiverOptions = FAST, **tools: Any) -> WeightReceiver:
        """Another receiver, with the scene's engine or its own."""
        return WeightReceiver(self.store, RUN, engine or self.engine, options=options, **tools)  # type: ignore[arg-type]

    def is_live(self, bits: Mapping[str, NDArray[Any]]) -> bool:
        return all((self.engine.bits[name] == each).all() for name, each in bits.items())

    async def lose_keyframe(self) -> tuple[WeightManifest, dict[str, NDArray[Any]]]:
        """Publish versions 1 and 2 and lose the keyframe, so that only deltas are left; return version 1."""
        await self.publish(1, rate=1e-5)
        found = await self.manifest(1, DELTA), bits_of(self.model)
        await self.publish(2, rate=1e-5)
        keyframe = await self.manifest(0, KEYFRAME)
        await self.store.drop(RUN, [keyframe.link], keyframe.epoch)
        return found


def published(store: FaultyStore) -> tuple[int, dict[Any, bytes], dict[Any, bytes]]:
    """The head, all manifests and all chunks."""
    return store.tables.head_version, dict(store.tables.manifests), dict(store.tables.chunks)


def small_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 5)).to(
        torch.bfloat16
    )


def train(model: torch.nn.Module, rate: float = 1e-3) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * rate


def bits_of(model: torch.nn.Module) -> dict[str, NDArray[Any]]:
    return {name: array.copy() for name, array in collect(model.named_parameters()).bits.items()}


def assert_holds(engine: BitsEngine, model: torch.nn.Module) -> None:
    for name, expected in bits_of(model).items():
        np.testing.assert_array_equal(engine.bits[name], expected)


async def assert_published(store: RedisWeightStore, model: torch.nn.Module, version: int | None = None) -> None:
    found = await fetch_weights(store, RUN, version)
    for name, expected in bits_of(model).items():
        np.testing.assert_array_equal(found[name].reshape(-1), expected)
