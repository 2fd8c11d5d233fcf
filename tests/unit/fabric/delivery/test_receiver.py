"""Following a run's weights from a worker: never a wrong bit in the engine, and every fault said and healed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import (
    BrokerError,
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
from rollfab.workers.rollout.peer_copies import PeerSource
from rollfab.workers.rollout.weights import AtCommit, ReceiverOptions
from tests.support.until import until
from tests.support.weights.checked_stage import checked_stages
from tests.support.weights.faulty_weights import RUN, BitsEngine, Scene, assert_holds, bits_of, small_model

NO_AUDIT = ReceiverOptions(audit_every=0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture(autouse=True)
def checked() -> Iterator[contextlib.ExitStack]:
    """Stages look at themselves after every version, until it is closed: by whoever spoils live weights."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(checked_stages())
        yield stack


@contextlib.asynccontextmanager
async def following(scene: Scene) -> AsyncIterator[None]:
    """The receiver looks for new versions by itself."""
    scene.receiver.start()
    try:
        yield
    finally:
        await scene.receiver.close()


async def test_a_receiver_follows_the_head(scene: Scene) -> None:
    async with following(scene):
        for version in range(4):
            await scene.publish(version)
            assert await scene.receiver.wait(version, timeout_s=5)
            assert_holds(scene.engine, scene.model)
    assert scene.receiver.error is None
    assert scene.receiver.last is not None and scene.receiver.last.kinds == (DELTA,)


async def test_a_receiver_that_lags_commits_once(scene: Scene) -> None:
    await scene.publish(0)
    assert await scene.receiver.update()
    await scene.publish(1, 2, 3, rate=1e-5)
    assert await scene.receiver.update()
    assert scene.receiver.last is not None and scene.receiver.last.kinds == (DELTA, DELTA, DELTA)
    assert_holds(scene.engine, scene.model)
    assert not await scene.receiver.update()


async def test_a_newcomer_keeps_what_has_come_where_the_way_behind_it_was_deleted_meanwhile(scene: Scene) -> None:
    # Given a keyframe that takes so long that the deltas behind it are gone when it is there
    await scene.publish(0)
    before = bits_of(scene.model)
    await scene.publish(1, 2, rate=1e-5)
    scene.store.lose[(1, DELTA)] = 1000

    # When
    assert await scene.receiver.update()

    # Then it is live, and not fetched again when there is a way on
    assert scene.receiver.version == 0
    assert scene.receiver.last is not None and scene.receiver.last.kinds == (KEYFRAME,)
    assert scene.is_live(before)
    fetched_count = scene.store.fetched.count((0, KEYFRAME))
    scene.store.lose.clear()
    assert await scene.receiver.update()
    assert scene.receiver.version == 2
    assert_holds(scene.engine, scene.model)
    assert scene.store.fetched.count((0, KEYFRAME)) == fetched_count


async def test_a_version_of_which_a_part_has_come_is_not_left_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a delta of several chunks, fetched one by one, of which the last is lost
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chain, "FETCH_BYTES_MAX", 1)
    await scene.publish(0, 1)
    delta = await scene.manifest(1, DELTA)
    assert len(delta.chunk_bytes) > 1
    scene.store.tables.chunks.pop((1, DELTA, delta.epoch, len(delta.chunk_bytes) - 1))

    # When a newcomer has staged the keyframe and the first part of the delta, then nothing is written
    with pytest.raises(ChainBroken):
        await scene.receiver.update()
    assert_holds(scene.engine, small_model(1))


async def test_a_receiver_that_kept_up_takes_the_delta_where_there_is_also_a_keyframe(scene: Scene) -> None:
    for version in range(4):
        await scene.publish(version, rate=1.0)
        await scene.receiver.update()
    assert any(kind == KEYFRAME for version, kind in await scene.store.held(RUN) if version > 0)

    assert {name for name in scene.store.fetched if name[1] == KEYFRAME} == {(0, KEYFRAME)}
    assert_holds(scene.engine, scene.model)


@pytest.mark.parametrize("fault", ["spoil", "lose"])
async def test_a_chunk_that_comes_wrong_once_is_fetched_again(scene: Scene, fault: str) -> None:
    await scene.publish(0)
    getattr(scene.store, fault)[(0, KEYFRAME)] = 2
    assert await scene.receiver.update()
    assert_holds(scene.engine, scene.model)


async def test_a_follower_says_what_is_wrong_and_recovers(scene: Scene) -> None:
    async with following(scene):
        await scene.publish(0)
        assert await scene.receiver.wait(0, timeout_s=5)
        scene.store.spoil[(1, DELTA)] = 1000
        await scene.publish(1)
        await until(lambda: scene.receiver.error is not None)
        assert isinstance(scene.receiver.error, DigestMismatch)

        scene.store.spoil.clear()
        assert await scene.receiver.wait(1, timeout_s=5)
        assert_holds(scene.engine, scene.model)
        await until(lambda: scene.receiver.error is None)


async def test_a_follower_survives_what_nobody_foresaw(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    may_stage, begin = False, Stage.begin

    def without_memory(stage: Stage, manifest: WeightManifest) -> None:
        if not may_stage:
            raise MemoryError
        begin(stage, manifest)

    monkeypatch.setattr(Stage, "begin", without_memory)
    async with following(scene):
        # When there is no memory for a version
        await scene.publish(0)
        await until(lambda: scene.receiver.error is not None)
        assert "MemoryError" in str(scene.receiver.error)

        # Then it comes when there is
        may_stage = True
        assert await scene.receiver.wait(0, timeout_s=5)
        await until(lambda: scene.receiver.error is None)


async def test_live_weights_that_drifted_are_found_and_healed(scene: Scene, checked: contextlib.ExitStack) -> None:
    await scene.publish(0)
    await scene.receiver.update()

    # Given one weight that something else wrote, where the next delta does not reach
    checked.close()
    scene.engine.bits["2.bias"][0] ^= 1
    with torch.no_grad():
        next(iter(scene.model.parameters()))[0, 0] += 1.0
    await scene.publish(1, rate=0.0)

    # When
    with pytest.raises(DigestMismatch, match="not the weights of version 1"):
        await scene.receiver.update()
    assert await scene.receiver.update()

    # Then
    assert_holds(scene.engine, scene.model)
    assert scene.receiver.last is not None and scene.receiver.last.kinds[0] == KEYFRAME


async def test_an_audit_looks_at_what_the_engine_computes_with_not_at_a_copy_of_it(scene: Scene) -> None:
    # Given an engine that computes with other weights than those it was given
    class TwoPlaces(BitsEngine):
        async def read_weights(self) -> Mapping[str, NDArray[Any]]:
            return {name: bits ^ 1 for name, bits in self.bits.items()}

    await scene.publish(0)
    with pytest.raises(DigestMismatch, match="not the weights of version 0"):
        await scene.join(TwoPlaces(scene.model)).update()


async def test_a_newcomer_checks_the_whole_state_before_writing(scene: Scene) -> None:
    await scene.publish(0)
    scene.store.is_state_wrong = True
    with pytest.raises(DigestMismatch, match="not the weights of version 0"):
        await scene.receiver.update()
    assert_holds(scene.engine, small_model(1))


async def test_a_commit_that_broke_off_is_repaired(scene: Scene) -> None:
    await scene.publish(0)
    await scene.receiver.update()
    await scene.publish(1)
    scene.engine.reject = True
    with pytest.raises(EngineError):
        await scene.receiver.update()
    assert await scene.receiver.update()
    assert_holds(scene.engine, scene.model)


async def test_a_receiver_whose_commit_broke_off_does_not_go_back_behind_what_was_live(scene: Scene) -> None:
    # Given an engine torn between versions 2 and 3, and a chain to 3 of which version 1 is gone
    for version in range(3):
        await scene.publish(version, rate=1e-5)
        await scene.receiver.update()
    await scene.publish(3, rate=1e-5)
    scene.engine.reject = True
    with pytest.raises(EngineError):
        await scene.receiver.update()
    scene.store.lose[(1, DELTA)] = 1000

    # When, then version 0 would be readable: it is not taken
    with pytest.raises(ChainBroken):
        await scene.receiver.update()
    assert scene.receiver.version == 2 and not scene.receiver.is_sound

    scene.store.lose.clear()
    assert await scene.receiver.update()
    assert scene.receiver.version == 3
    assert_holds(scene.engine, scene.model)


async def test_an_engine_of_another_model_is_refused(scene: Scene) -> None:
    await scene.publish(0)
    scene.engine.layout = Layout(scene.engine.layout.tensors[1:])
    with pytest.raises(LayoutMismatch, match=r"1 unknown \(0\.bias\)"):
        await scene.join().update()


async def test_a_run_that_begins_anew_is_followed(scene: Scene) -> None:
    await scene.publish(9)
    await scene.receiver.update()

    # Given a run that was deleted and made again under its name
    scene.store.broker.keys.held.clear()
    scene.start()
    await scene.publish(0)

    assert await scene.receiver.update()
    assert scene.receiver.version == 0
    assert_holds(scene.engine, scene.model)


@pytest.mark.parametrize("is_another", [True, False])
async def test_a_version_that_was_lost_and_published_again_is_fetched_again(scene: Scene, is_another: bool) -> None:
    # Given a receiver that holds version 1, which the broker then forgets, as a replica that takes over may
    await scene.publish(0)
    before = scene.store.tables.remember()
    await scene.publish(1)
    assert await scene.receiver.update()
    assert_holds(scene.engine, scene.model)
    scene.store.tables.fall_back(before)

    # When this trainer, or one that starts again, publishes other weights under the same number before anyone looks
    if is_another:
        scene.model = small_model(7)
        scene.start()
    await scene.publish(1)

    # Then those are what the engine gets
    assert await scene.receiver.update()
    assert scene.receiver.version == 1
    assert_holds(scene.engine, scene.model)
    assert not await scene.receiver.update()


async def test_what_another_publisher_has_not_published_yet_is_not_taken_for_what_the_broker_lost(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a broker that loses version 1 just after a receiver has seen it, and others on their way to another 1
    await scene.publish(0)
    await scene.receiver.update()
    before = scene.store.tables.remember()
    await scene.publish(1)
    held = scene.store.held

    async def held_later(run_id: str) -> list[tuple[int, str]]:
        monkeypatch.undo()
        scene.store.tables.fall_back(before)
        scene.model = small_model(7)
        scene.start()
        scene.store.fail_at = "advance_head"
        with pytest.raises(BrokerError):
            await scene.publish(1)
        return await held(run_id)

    monkeypatch.setattr(scene.store, "held", held_later)

    # When, then
    with pytest.raises(ChainBroken, match="another publisher took over"):
        await scene.receiver.update()
    assert scene.receiver.version == 0 and scene.receiver.is_sound
    await scene.publish(2)
    assert await scene.receiver.update()
    assert_holds(scene.engine, scene.model)


async def test_what_is_first_written_is_read_back_before_it_counts(scene: Scene) -> None:
    # Given an engine that loses a write of its first commit
    scene.engine.loses = "2.bias"
    receiver = scene.join(options=NO_AUDIT)
    await scene.publish(1)

    # When the receiver joins
    with pytest.raises(DigestMismatch, match=r"not the weights of version 1 .*2\.bias differs"):
        await receiver.update()

    # Then no turn begins with that, and the next commit mends it
    assert receiver.version == -1
    scene.engine.loses = ""
    assert await receiver.update()
    assert receiver.version == 1
    assert_holds(scene.engine, scene.model)


async def test_a_commit_does_as_the_run_wishes_and_keeps_nothing_of_weights_that_were_in_doubt(
    scene: Scene, checked: contextlib.ExitStack
) -> None:
    wish, commits = AtCommit(turns="keep", may_reuse_prefix=True), scene.engine.commits
    for version, at_commit in enumerate((wish, wish, AtCommit(), AtCommit(turns="recompute"))):
        scene.receiver.at_commit = at_commit
        await scene.publish(version)
        assert await scene.receiver.update()
    assert commits == [("recompute", False), ("keep", True), ("keep", False), ("recompute", False)]

    # And when the live weights are not what they should be
    checked.close()
    scene.receiver.at_commit = wish
    scene.engine.bits["2.bias"][0] ^= 1
    await scene.publish(4)
    with pytest.raises(DigestMismatch):
        await scene.receiver.update()
    assert await scene.receiver.update()
    assert commits[-1] == ("recompute", False)
    assert_holds(scene.engine, scene.model)


async def test_an_engine_that_cannot_keep_recomputes_and_it_is_said(scene: Scene) -> None:
    scene.engine.can_keep = False
    for version in range(3):
        await scene.publish(version)
        assert await scene.receiver.update()
    assert scene.receiver.note == "it has one cache only"
    assert scene.engine.commits == [("recompute", False)] * 3
    assert_holds(scene.engine, scene.model)


async def test_a_receiver_is_known_as_a_holder_while_it_serves_the_run(scene: Scene) -> None:
    holder = Holder(holder_id="w", version=-1, address="tcp://here", node="n")
    scene.receiver = scene.join(holder=holder)

    async def is_held(version: int) -> bool:
        return await scene.store.holders(RUN) == [dataclasses.replace(holder, version=version)]

    async with following(scene):
        await until(lambda: is_held(-1))
        for version in (0, 1):
            await scene.publish(version)
            await until(lambda version=version: is_held(version))
    assert await scene.store.holders(RUN) == []


# ---- peers


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


async def test_where_no_chain_leads_to_the_head_a_peers_version_does(scene: Scene) -> None:
    # Given a store that has lost its keyframe, one peer that is gone and one that holds version 1
    await scene.publish(0)
    gone, peer = Peer(), Peer(*await scene.lose_keyframe())
    receiver = scene.join(sources=[gone, peer])

    # When a newcomer joins
    assert await receiver.update()
    assert (receiver.version, gone.asked_count) == (1, 1)
    assert scene.is_live(peer.bits or {})

    # Then the chain goes on from there
    assert await receiver.update()
    assert receiver.version == 2 and receiver.last is not None and receiver.last.kinds == (DELTA,)
    assert_holds(scene.engine, scene.model)
    assert peer.asked_count == 1


@pytest.mark.parametrize("fault", ["bits", "sums", "run", "above", "layout", "line"])
async def test_a_peers_version_that_is_not_the_runs_is_not_taken(scene: Scene, fault: str) -> None:
    await scene.publish(0)
    manifest, bits = await scene.lose_keyframe()
    if fault in ("bits", "sums"):
        bits["2.bias"][0] ^= 1
    changes: dict[str, dict[str, Any]] = {
        "bits": {},
        "sums": {"sums": state_sums(manifest.tensors, bits)},  # whole, but not what the store means by version 1
        "run": {"run_id": "another"},
        "above": {"version": 3},
        "layout": {"layout": manifest.layout[1:], "layout_digest": ""},
        "line": {"version": 2, "epoch": manifest.epoch + 1},  # the head's number, published by somebody else
    }
    peer = Peer(dataclasses.replace(manifest, **changes[fault]), bits)
    receiver = scene.join(sources=[peer])

    with pytest.raises(ChainBroken, match="no chain of held weights"):
        await receiver.update()

    assert receiver.version == -1
    assert_holds(scene.engine, small_model(1))


async def test_a_newcomer_copies_the_live_weights_of_a_receiver_that_serves_them(scene: Scene) -> None:
    # Given a receiver at version 2 that serves what it holds, another holder that is gone, and no keyframe any more
    store, old = scene.store, scene.join(BitsEngine(small_model(1)))
    assert old.stamp() is None
    await scene.publish(0)
    assert await old.update()
    await scene.lose_keyframe()
    assert await old.update()
    server = RelayServer(RelayedStore(store, None))
    await server.start()
    server.offer(RUN, old)
    try:
        await store.hold(RUN, Holder("gone", 2, make_address("127.0.0.1", 9, "s")), 60.0)
        await store.hold(RUN, Holder("old", old.version, server.address), 60.0)
        new = scene.join(sources=[PeerSource(store, "new")])

        # When a newcomer joins
        assert await new.update()

        # Then it holds the same, and follows by itself
        assert new.stamp() == (2, 1)
        assert_holds(scene.engine, scene.model)
        await scene.publish(3)
        assert await new.update()
        assert_holds(scene.engine, scene.model)
    finally:
        await server.close()


# ---- damage in the store says nothing against what is live


@pytest.mark.parametrize(
    ("fault", "error", "problem", "chunks"),
    [
        ("spoil", DigestMismatch, "corrupt", (0,)),
        ("lose", ChainBroken, "missing", (0,)),
        ("sums", FabricError, "undecodable", ()),
        ("manifest", FabricError, "undecodable", ()),
    ],
)
async def test_what_cannot_be_read_puts_nothing_live_in_doubt_and_is_told(
    scene: Scene, fault: str, error: type[FabricError], problem: str, chunks: tuple[int, ...]
) -> None:
    # Given a receiver at version 0
    await scene.publish(0)
    await scene.receiver.update()
    before = bits_of(scene.model)
    await scene.publish(1)
    manifests = scene.store.tables.manifests
    right, manifest = manifests[(1, DELTA)], await scene.manifest(1, DELTA)

    # When the delta to the next one stays unreadable
    if fault == "sums":
        manifests[(1, DELTA)] = dataclasses.replace(manifest, sums=manifest.sums + 1).pack()
    elif fault == "manifest":
        manifests[(1, DELTA)] = b"garbage"
    else:
        getattr(scene.store, fault)[(1, DELTA)] = 1000
    for _ in range(4):
        with pytest.raises(error, match="chunk 0 of version 1" if chunks else None):
            await scene.receiver.update()

    # Then version 0 stays live and sound, and the publisher is told what it is
    assert scene.receiver.is_sound and scene.receiver.stamp() == (0, 1)
    assert scene.is_live(before)
    (report,) = await scene.store.damages(RUN)
    assert (report.name, report.problem, report.chunks) == ((1, DELTA), problem, chunks)

    # And it follows when it is healed
    scene.store.spoil.clear()
    scene.store.lose.clear()
    manifests[(1, DELTA)] = right
    assert await scene.receiver.update()
    assert_holds(scene.engine, scene.model)


@pytest.mark.parametrize("way", ["keyframe", "deltas"])
async def test_what_cannot_be_read_is_gone_round(scene: Scene, way: str) -> None:
    # Given a newcomer, and two ways to the head, of which the cheaper one is damaged
    for version in range(9):
        await scene.publish(version, rate=1e-5, keyframe=version == 4)
    if way == "deltas":
        await scene.publish(8, rate=0.0, keyframe=True)
    scene.store.spoil[(8, DELTA) if way == "deltas" else (4, KEYFRAME)] = 1000

    # When
    for _ in range(4):
        with contextlib.suppress(FabricError):
            await scene.receiver.update()

    # Then
    assert scene.receiver.version == 8
    assert_holds(scene.engine, scene.model)
