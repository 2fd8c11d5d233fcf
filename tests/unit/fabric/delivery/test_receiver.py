"""Following a run's weights from a worker: never a wrong bit in the engine, and every fault said and healed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import (
    ChainBroken,
    DigestMismatch,
    EngineError,
    FabricError,
    LayoutMismatch,
    PeerLost,
)
from rollfab.fabric.delivery.node_store import RelayedStore
from rollfab.fabric.delivery.relay_frames import make_address
from rollfab.fabric.delivery.relay_server import RelayServer
from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.format.layout import Layout
from rollfab.fabric.format.manifest import Holder, WeightManifest
from rollfab.fabric.rules.weights.chain import DELTA, KEYFRAME
from rollfab.fabric.versions import reader as chain
from rollfab.fabric.versions import snapshot
from rollfab.fabric.versions.stage import Stage
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.peer_copies import PeerSource
from rollfab.workers.rollout.weights import AtCommit, ReceiverOptions, WeightReceiver
from tests.support.until import until
from tests.support.weights.faulty_weights import RUN, BitsEngine, FaultyStore, assert_holds, bits_of, small_model, train

FAST = ReceiverOptions(poll_s=0.05, retry_s=0.01, retry_s_max=0.02, audit_every=1)
NO_AUDIT = ReceiverOptions(audit_every=0)


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def model() -> torch.nn.Module:
    return small_model()


@pytest.fixture
def publisher(store: FaultyStore) -> Publisher:
    return Publisher(store, RUN)


def receiver_of(store: FaultyStore, engine: BitsEngine, options: ReceiverOptions = FAST) -> WeightReceiver:
    return WeightReceiver(store, RUN, engine, options=options)  # type: ignore[arg-type]


async def test_a_receiver_follows_the_head(store: FaultyStore, publisher: Publisher, model: torch.nn.Module) -> None:
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)
    receiver.start()
    try:
        for version in range(4):
            train(model)
            await publisher.publish(model.named_parameters(), version)
            assert await receiver.wait(version, timeout_s=5)
            assert_holds(engine, model)
    finally:
        await receiver.close()

    assert receiver.error is None
    assert receiver.last is not None
    assert receiver.last.kinds == (DELTA,)


async def test_a_receiver_that_lags_commits_once(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)
    for version in range(4):
        train(model, 1e-5)
        await publisher.publish(model.named_parameters(), version)
        if version == 0:
            assert await receiver.update()

    assert await receiver.update()

    assert receiver.last is not None
    assert receiver.last.kinds == (DELTA, DELTA, DELTA)
    assert_holds(engine, model)
    assert not await receiver.update()


async def test_a_newcomer_gets_keyframe_and_chain(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    for version in range(3):
        await publisher.publish(model.named_parameters(), version)
        train(model, 1e-5)
    await publisher.publish(model.named_parameters(), 3)
    engine = BitsEngine(small_model(1))

    assert await receiver_of(store, engine).update()

    assert_holds(engine, model)


async def test_a_newcomer_keeps_what_has_come_where_the_way_behind_it_was_deleted_meanwhile(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    # Given a keyframe that takes so long that the deltas behind it are gone when it is there
    before = bits_of(model)
    for version in range(3):
        await publisher.publish(model.named_parameters(), version)
        train(model, 1e-5)
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)
    store.lose[(1, DELTA)] = 1000

    # When
    assert await receiver.update()

    # Then it is live, and not fetched again when there is a way on
    assert receiver.version == 0 and receiver.last is not None and receiver.last.kinds == (KEYFRAME,)
    assert all((engine.bits[name] == bits).all() for name, bits in before.items())
    fetched_count = store.fetched.count((0, KEYFRAME))
    store.lose.clear()
    assert await receiver.update()
    assert receiver.version == 2
    assert store.fetched.count((0, KEYFRAME)) == fetched_count


async def test_a_version_of_which_a_part_has_come_is_not_left_out(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a delta of several chunks, fetched one by one, of which the last is lost
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chain, "FETCH_BYTES_MAX", 1)
    for version in range(2):
        await publisher.publish(model.named_parameters(), version)
        train(model, 1e-3)
    (delta,) = await store.manifests(RUN, [(1, DELTA)])
    assert delta is not None and len(delta.chunk_bytes) > 1
    store.tables.chunks.pop((1, DELTA, delta.epoch, len(delta.chunk_bytes) - 1))
    engine = BitsEngine(small_model(1))
    before = {name: bits.copy() for name, bits in engine.bits.items()}

    # When a newcomer has staged the keyframe and the first part of the delta
    with pytest.raises(ChainBroken):
        await receiver_of(store, engine).update()

    # Then nothing was written
    assert all((engine.bits[name] == bits).all() for name, bits in before.items())


async def test_a_receiver_that_kept_up_takes_the_delta_where_there_is_also_a_keyframe(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    engine = BitsEngine(model)
    receiver = receiver_of(store, engine)
    await publisher.publish(model.named_parameters(), 0)
    await receiver.update()
    train(model, 1.0)
    for version in (1, 2, 3):
        train(model, 1.0)
        await publisher.publish(model.named_parameters(), version)
        await receiver.update()
    assert any(kind == KEYFRAME for version, kind in await store.held(RUN) if version > 0)

    assert {name for name in store.fetched if name[1] == KEYFRAME} == {(0, KEYFRAME)}
    assert_holds(engine, model)


@pytest.mark.parametrize("fault", ["spoil", "lose"])
async def test_a_chunk_that_comes_wrong_once_is_fetched_again(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, fault: str
) -> None:
    await publisher.publish(model.named_parameters(), 0)
    getattr(store, fault)[(0, KEYFRAME)] = 2
    engine = BitsEngine(small_model(1))

    assert await receiver_of(store, engine).update()

    assert_holds(engine, model)


@pytest.mark.parametrize(("fault", "error"), [("spoil", DigestMismatch), ("lose", ChainBroken)])
async def test_a_chunk_that_stays_wrong_is_never_applied(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, fault: str, error: type[FabricError]
) -> None:
    engine = BitsEngine(model)
    receiver = receiver_of(store, engine)
    await publisher.publish(model.named_parameters(), 0)
    await receiver.update()
    before = small_model()
    before.load_state_dict(model.state_dict())
    train(model)
    await publisher.publish(model.named_parameters(), 1)
    getattr(store, fault)[(1, DELTA)] = 1000

    with pytest.raises(error, match="chunk 0 of version 1"):
        await receiver.update()

    assert receiver.version == 0
    assert_holds(engine, before)


async def test_a_follower_says_what_is_wrong_and_recovers(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    engine = BitsEngine(model)
    receiver = receiver_of(store, engine)
    receiver.start()
    try:
        await publisher.publish(model.named_parameters(), 0)
        assert await receiver.wait(0, timeout_s=5)
        store.spoil[(1, DELTA)] = 1000
        train(model)
        await publisher.publish(model.named_parameters(), 1)
        await until(lambda: receiver.error is not None)
        assert isinstance(receiver.error, DigestMismatch)

        store.spoil.clear()
        assert await receiver.wait(1, timeout_s=5)
        assert_holds(engine, model)
        await until(lambda: receiver.error is None)
    finally:
        await receiver.close()


async def test_a_follower_survives_what_nobody_foresaw(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    engine, may_stage = BitsEngine(model), False
    receiver, begin = receiver_of(store, engine), Stage.begin

    def without_memory(stage: Stage, manifest: WeightManifest) -> None:
        if not may_stage:
            raise MemoryError
        begin(stage, manifest)

    monkeypatch.setattr(Stage, "begin", without_memory)
    receiver.start()
    try:
        # When there is no memory for a version
        await publisher.publish(model.named_parameters(), 0)
        await until(lambda: receiver.error is not None)
        assert "MemoryError" in str(receiver.error)

        # Then it comes when there is
        may_stage = True
        assert await receiver.wait(0, timeout_s=5)
        await until(lambda: receiver.error is None)
    finally:
        await receiver.close()


async def test_live_weights_that_drifted_are_found_and_healed(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    engine = BitsEngine(model)
    receiver = receiver_of(store, engine)
    await publisher.publish(model.named_parameters(), 0)
    await receiver.update()

    # Given one weight that something else wrote, where the next delta does not reach
    engine.bits["2.bias"][0] ^= 1
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1.0
    await publisher.publish(model.named_parameters(), 1)

    # When
    with pytest.raises(DigestMismatch, match="not the weights of version 1"):
        await receiver.update()
    assert await receiver.update()

    # Then
    assert_holds(engine, model)
    assert receiver.last is not None
    assert receiver.last.kinds[0] == KEYFRAME


async def test_an_audit_looks_at_what_the_engine_computes_with_not_at_a_copy_of_it(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    # Given an engine that computes with other weights than those it was given
    class TwoPlaces(BitsEngine):
        async def read_weights(self) -> Mapping[str, NDArray[Any]]:
            return {name: bits ^ 1 for name, bits in self.bits.items()}

    receiver = receiver_of(store, TwoPlaces(model))
    await publisher.publish(model.named_parameters(), 0)

    with pytest.raises(DigestMismatch, match="not the weights of version 0"):
        await receiver.update()


async def test_a_newcomer_checks_the_whole_state_before_writing(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    await publisher.publish(model.named_parameters(), 0)
    store.is_state_wrong = True
    engine = BitsEngine(small_model(1))

    with pytest.raises(DigestMismatch, match="not the weights of version 0"):
        await receiver_of(store, engine).update()

    assert_holds(engine, small_model(1))


async def test_a_commit_that_broke_off_is_repaired(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    engine = BitsEngine(model)
    receiver = receiver_of(store, engine)
    await publisher.publish(model.named_parameters(), 0)
    await receiver.update()
    train(model)
    await publisher.publish(model.named_parameters(), 1)
    engine.reject = True

    with pytest.raises(EngineError):
        await receiver.update()
    assert await receiver.update()

    assert_holds(engine, model)


async def test_an_engine_of_another_model_is_refused(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    await publisher.publish(model.named_parameters(), 0)
    engine = BitsEngine(model)
    engine.layout = Layout(engine.layout.tensors[1:])

    with pytest.raises(LayoutMismatch, match=r"1 unknown \(0\.bias\)"):
        await receiver_of(store, engine).update()


async def test_a_run_that_begins_anew_is_followed(store: FaultyStore, model: torch.nn.Module) -> None:
    engine = BitsEngine(model)
    receiver = receiver_of(store, engine)
    await Publisher(store, RUN).publish(model.named_parameters(), 9)
    await receiver.update()

    # Given a run that was deleted and made again under its name
    store.broker.keys.held.clear()
    train(model)
    await Publisher(store, RUN).publish(model.named_parameters(), 0)

    assert await receiver.update()

    assert receiver.version == 0
    assert_holds(engine, model)


async def test_a_version_that_was_lost_and_published_again_by_another_trainer_is_fetched_again(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    # Given a receiver that holds version 1, which the broker then forgets, as a replica that takes over may
    await publisher.publish(model.named_parameters(), 0)
    before = store.tables.remember()
    train(model)
    await publisher.publish(model.named_parameters(), 1)
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)
    assert await receiver.update()
    assert_holds(engine, model)
    store.tables.fall_back(before)

    # When a trainer that starts again publishes other weights under the same number
    other = small_model(7)
    await Publisher(store, RUN).publish(other.named_parameters(), 1)

    # Then those are what the engine gets
    assert await receiver.update()
    assert receiver.version == 1
    assert_holds(engine, other)
    assert not await receiver.update()


async def test_what_is_first_written_is_read_back_before_it_counts(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    # Given an engine that loses a write of its first commit
    engine = BitsEngine(small_model(1))
    engine.loses = "2.bias"
    receiver = receiver_of(store, engine, NO_AUDIT)
    await publisher.publish(model.named_parameters(), 1)

    # When the receiver joins
    with pytest.raises(DigestMismatch, match=r"not the weights of version 1 .*2\.bias differs"):
        await receiver.update()

    # Then no turn begins with that, and the next commit mends it
    assert receiver.version == -1
    engine.loses = ""
    assert await receiver.update()
    assert receiver.version == 1
    assert_holds(engine, model)


async def test_a_commit_does_as_the_run_wishes_and_keeps_nothing_of_weights_that_were_in_doubt(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)
    wish = AtCommit(turns="keep", may_reuse_prefix=True)
    found = []
    for version, at_commit in enumerate((wish, wish, AtCommit(), AtCommit(turns="recompute"))):
        receiver.at_commit = at_commit
        train(model)
        await publisher.publish(model.named_parameters(), version)
        assert await receiver.update()
        found.append(engine.commits[-1])
    assert found == [("recompute", False), ("keep", True), ("keep", False), ("recompute", False)]

    # And when the live weights are not what they should be
    receiver.at_commit = wish
    engine.bits["2.bias"][0] ^= 1
    train(model)
    await publisher.publish(model.named_parameters(), 4)
    with pytest.raises(DigestMismatch):
        await receiver.update()
    assert await receiver.update()
    assert engine.commits[-1] == ("recompute", False)
    assert_holds(engine, model)


async def test_an_engine_that_cannot_keep_recomputes_and_it_is_said(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    engine = BitsEngine(small_model(1))
    engine.can_keep = False
    receiver = receiver_of(store, engine)
    for version in range(3):
        train(model)
        await publisher.publish(model.named_parameters(), version)
        assert await receiver.update()
    assert receiver.note == "it has one cache only"
    assert engine.commits == [("recompute", False)] * 3
    assert_holds(engine, model)


async def test_a_receiver_is_known_as_a_holder_while_it_serves_the_run(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    holder = Holder(holder_id="w", version=-1, address="tcp://here", node="n")
    receiver = WeightReceiver(store, RUN, BitsEngine(model), options=FAST, holder=holder)  # type: ignore[arg-type]

    async def held_version(version: int) -> None:
        for _ in range(500):
            if await store.holders(RUN) == [dataclasses.replace(holder, version=version)]:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"holders are {await store.holders(RUN)}")

    receiver.start()
    await held_version(-1)
    for version in (0, 1):
        train(model)
        await publisher.publish(model.named_parameters(), version)
        await held_version(version)
    await receiver.close()
    assert await store.holders(RUN) == []


class Peer:
    """A source that has what the test gives it."""

    def __init__(self, manifest: WeightManifest | None = None, bits: Mapping[str, NDArray[Any]] | None = None) -> None:
        self.manifest, self.bits = manifest, bits
        self.asked_count = 0

    async def version_above(self, run_id: str, layout: Layout, above: int) -> Any:
        self.asked_count += 1
        if self.manifest is None:
            raise PeerLost("it has left")
        return self.manifest, self.bits


async def lost_keyframe(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, *, first: int = 0
) -> tuple[WeightManifest, dict[str, NDArray[Any]]]:
    """Versions `first` (0 or 1) to 2, and the keyframe lost, so that only deltas are left; returns version 1."""
    if first == 0:
        await publisher.publish(model.named_parameters(), 0)
    train(model, 1e-5)
    await publisher.publish(model.named_parameters(), 1)
    (manifest,) = await store.manifests(RUN, [(1, DELTA)])
    assert manifest is not None
    bits = bits_of(model)
    train(model, 1e-5)
    await publisher.publish(model.named_parameters(), 2)
    (keyframe,) = await store.manifests(RUN, [(0, KEYFRAME)])
    assert keyframe is not None
    await store.drop(RUN, [keyframe.link], keyframe.epoch)
    return manifest, bits


async def test_where_no_chain_leads_to_the_head_a_peers_version_does(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    # Given a store that has lost its keyframe, one peer that is gone and one that holds version 1
    gone, peer = Peer(), Peer(*await lost_keyframe(store, publisher, model))
    engine = BitsEngine(small_model(1))
    receiver = WeightReceiver(store, RUN, engine, options=FAST, sources=[gone, peer])  # type: ignore[arg-type]

    # When a newcomer joins
    assert await receiver.update()
    assert (receiver.version, gone.asked_count) == (1, 1)
    for name, bits in (peer.bits or {}).items():
        assert (engine.bits[name] == bits).all()

    # Then the chain goes on from there
    assert await receiver.update()
    assert receiver.version == 2 and receiver.last is not None and receiver.last.kinds == (DELTA,)
    assert_holds(engine, model)
    assert peer.asked_count == 1


@pytest.mark.parametrize("fault", ["bits", "sums", "run", "above", "layout", "line"])
async def test_a_peers_version_that_is_not_the_runs_is_not_taken(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, fault: str
) -> None:
    manifest, bits = await lost_keyframe(store, publisher, model)
    if fault == "bits":
        bits["2.bias"][0] ^= 1
    elif fault == "sums":  # another line's version 1: whole, but not what the store means by it
        bits["2.bias"][0] ^= 1
        manifest = dataclasses.replace(manifest, sums=state_sums(manifest.tensors, bits))
    elif fault == "run":
        manifest = dataclasses.replace(manifest, run_id="another")
    elif fault == "above":
        manifest = dataclasses.replace(manifest, version=3)
    elif fault == "layout":
        manifest = dataclasses.replace(manifest, layout=manifest.layout[1:], layout_digest="")
    else:  # the head's number, published by somebody else
        manifest = dataclasses.replace(manifest, version=2, epoch=manifest.epoch + 1)
    engine = BitsEngine(small_model(1))
    receiver = WeightReceiver(store, RUN, engine, options=FAST, sources=[Peer(manifest, bits)])  # type: ignore[arg-type]

    with pytest.raises(ChainBroken, match="no chain of held weights"):
        await receiver.update()

    assert receiver.version == -1
    assert_holds(engine, small_model(1))


async def test_a_newcomer_copies_the_live_weights_of_a_receiver_that_serves_them(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    # Given a receiver at version 2 that serves what it holds, another holder that is gone, and no keyframe any more
    old = WeightReceiver(store, RUN, BitsEngine(small_model(1)), options=FAST)  # type: ignore[arg-type]
    assert old.stamp() is None
    await publisher.publish(model.named_parameters(), 0)
    assert await old.update()
    await lost_keyframe(store, publisher, model, first=1)
    assert await old.update()
    server = RelayServer(RelayedStore(store, None))
    await server.start()
    server.offer(RUN, old)
    try:
        await store.hold(RUN, Holder("gone", 2, make_address("127.0.0.1", 9, "s")), 60.0)
        await store.hold(RUN, Holder("old", old.version, server.address), 60.0)
        engine = BitsEngine(small_model(1))
        peers = PeerSource(store, "new")
        new = WeightReceiver(store, RUN, engine, options=FAST, sources=[peers])  # type: ignore[arg-type]

        # When a newcomer joins
        assert await new.update()

        # Then it holds the same, and follows by itself
        assert new.stamp() == (2, 1)
        assert_holds(engine, model)
        train(model)
        await publisher.publish(model.named_parameters(), 3)
        assert await new.update()
        assert_holds(engine, model)
    finally:
        await server.close()


# ---- damage in the store says nothing against what is live


@pytest.mark.parametrize("fault", ["spoil", "lose", "sums", "manifest"])
async def test_what_cannot_be_read_puts_nothing_live_in_doubt_and_is_told(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, fault: str
) -> None:
    # Given a receiver at version 0
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)
    await publisher.publish(model.named_parameters(), 0)
    await receiver.update()
    before = bits_of(model)
    train(model)
    await publisher.publish(model.named_parameters(), 1)
    run = store.tables
    right = run.manifests[(1, DELTA)]
    (manifest,) = await store.manifests(RUN, [(1, DELTA)])
    assert manifest is not None

    # When the delta to the next one stays unreadable
    if fault == "sums":
        run.manifests[(1, DELTA)] = dataclasses.replace(manifest, sums=manifest.sums + 1).pack()
    elif fault == "manifest":
        run.manifests[(1, DELTA)] = b"garbage"
    else:
        getattr(store, fault)[(1, DELTA)] = 1000
    for _ in range(4):
        with pytest.raises(FabricError):
            await receiver.update()

    # Then version 0 stays live and sound, and the publisher is told what it is
    assert receiver.is_sound and receiver.stamp() == (0, 1)
    assert all((engine.bits[name] == bits).all() for name, bits in before.items())
    (report,) = await store.damages(RUN)
    problem = {"spoil": "corrupt", "lose": "missing"}.get(fault, "undecodable")
    assert (report.name, report.problem, report.chunks) == (
        (1, DELTA),
        problem,
        (0,) if fault in ("spoil", "lose") else (),
    )

    # And it follows when it is healed
    store.spoil.clear()
    store.lose.clear()
    run.manifests[(1, DELTA)] = right
    assert await receiver.update()
    assert_holds(engine, model)


@pytest.mark.parametrize("way", ["keyframe", "deltas"])
async def test_what_cannot_be_read_is_gone_round(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module, way: str
) -> None:
    # Given a newcomer, and two ways to the head, of which the cheaper one is damaged
    for version in range(9):
        train(model, 1e-5)
        await publisher.publish(model.named_parameters(), version, keyframe=version == 4)
    damaged = (8, DELTA) if way == "deltas" else (4, KEYFRAME)
    if way == "deltas":
        await publisher.publish(model.named_parameters(), 8, keyframe=True)
    store.spoil[damaged] = 1000
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)

    # When
    for _ in range(4):
        with contextlib.suppress(FabricError):
            await receiver.update()

    # Then
    assert receiver.version == 8
    assert_holds(engine, model)
