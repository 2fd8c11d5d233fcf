"""A receiver takes live weights for what they are: nothing is fetched that the engine holds already."""

from __future__ import annotations

import asyncio

import pytest

from rollfab.fabric.rules.weights.chain import DELTA, KEYFRAME
from tests.support.weights.faulty_weights import BitsEngine, Scene, assert_holds, bits_of, small_model


async def join_again(scene: Scene, *versions: int) -> None:
    """Serve what is published, stop, and serve the run again when these versions are published too."""
    await scene.publish(0)
    await scene.receiver.update()
    await scene.receiver.close()
    if versions:
        await scene.publish(*versions, rate=1e-5)
    scene.store.fetched.clear()
    scene.engine.commits.clear()
    before, scene.receiver = scene.receiver, scene.join()
    scene.receiver.is_engine_still = before.is_engine_still


async def test_a_run_that_is_served_again_costs_no_chunk_and_no_prefix() -> None:
    scene = Scene()
    await join_again(scene)
    assert await scene.receiver.update()
    assert (scene.receiver.stamp(), scene.store.fetched, scene.engine.commits) == ((0, 1), [], [("keep", True)])
    assert scene.receiver.ready_s is not None
    # And the next version comes as to anybody
    await scene.publish(1, rate=1e-5)
    await scene.receiver.update()
    assert {kind for _, kind in scene.store.fetched} == {DELTA}
    assert_holds(scene.engine, scene.model)


async def test_a_run_that_went_on_meanwhile_costs_its_deltas_alone() -> None:
    scene = Scene()
    await join_again(scene, 1, 2)
    await scene.receiver.update()
    assert {kind for _, kind in scene.store.fetched} == {DELTA}
    assert scene.receiver.version == 2
    assert_holds(scene.engine, scene.model)


async def test_an_engine_with_the_checkpoint_that_is_published_first_fetches_nothing() -> None:
    scene = Scene()
    await scene.publish(0)
    engine = BitsEngine(small_model(1))
    engine.bits = bits_of(scene.model)
    engine.can_keep = False
    receiver = scene.join(engine)
    assert await receiver.update()
    assert (receiver.version, scene.store.fetched, engine.commits) == (0, [], [("recompute", False)])


@pytest.mark.parametrize("other", ["one bit", "under way"])
async def test_what_may_be_other_weights_is_fetched_whole(other: str) -> None:
    scene = Scene()
    await join_again(scene)
    if other == "one bit":
        next(iter(scene.engine.bits.values()))[-1] ^= 1
    else:
        scene.receiver.is_engine_still = False
    await scene.receiver.update()
    assert {kind for _, kind in scene.store.fetched} == {KEYFRAME}
    assert_holds(scene.engine, scene.model)


async def test_whoever_ends_in_the_middle_of_a_commit_says_so() -> None:
    scene = Scene()
    await scene.publish(0)
    begun = asyncio.Event()

    async def apply(*_: object, **__: object) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 0.0

    scene.engine.apply = apply  # type: ignore[method-assign]
    scene.receiver.start()
    await begun.wait()
    assert scene.receiver.is_engine_still is False
    await scene.receiver.close()
    assert scene.receiver.is_engine_still is False
