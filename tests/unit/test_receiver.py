"""Following a run's weights from a worker: never a wrong bit in the engine, and every fault said and healed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from rollfab.fabric.errors import ChainBroken, DigestMismatch, EngineError, FabricError, LayoutMismatch
from rollfab.fabric.rules.chain import DELTA, KEYFRAME
from rollfab.fabric.weights.layout import Layout
from rollfab.trainer.publish import Publisher
from rollfab.workers.weights import ReceiverOptions, WeightReceiver
from tests.unit.faulty_weights import RUN, BitsEngine, FaultyStore, assert_holds, small_model, train

FAST = ReceiverOptions(poll_s=0.05, retry_s=0.01, retry_s_max=0.02, audit_every=1)


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


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


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
    with pytest.raises(DigestMismatch, match="not version 1"):
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

    with pytest.raises(DigestMismatch, match="not version 0"):
        await receiver.update()


async def test_a_newcomer_checks_the_whole_state_before_writing(
    store: FaultyStore, publisher: Publisher, model: torch.nn.Module
) -> None:
    await publisher.publish(model.named_parameters(), 0)
    store.is_state_wrong = True
    engine = BitsEngine(small_model(1))

    with pytest.raises(DigestMismatch, match="not version 0"):
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
    store._runs.clear()
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
    before = store.remember()
    train(model)
    await publisher.publish(model.named_parameters(), 1)
    engine = BitsEngine(small_model(1))
    receiver = receiver_of(store, engine)
    assert await receiver.update()
    assert_holds(engine, model)
    store.forget_since(before)

    # When a trainer that starts again publishes other weights under the same number
    other = small_model(7)
    await Publisher(store, RUN).publish(other.named_parameters(), 1)

    # Then those are what the engine gets
    assert await receiver.update()
    assert receiver.version == 1
    assert_holds(engine, other)
    assert not await receiver.update()
