"""Publishers and receivers under every fault, seed by seed: no wrong bit is ever live, and everyone arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from rollfab.fabric.contract.errors import BrokerError, FabricError, WireError
from rollfab.fabric.format.manifest import Head, WeightManifest
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.weights import WeightReceiver
from tests.support.weights.faulty_weights import (
    RUN,
    BitsEngine,
    FaultyStore,
    assert_holds,
    assert_published,
    small_model,
    train,
)
from tests.support.weights.weight_planted import PLANTS, planted
from tests.support.weights.weight_storm import VERSION_COUNT, simulate
from tests.support.weights.weight_truth import Broken, Seen

PART = 5  # seeds per test
COUNT = 30  # times VERSION_COUNT versions
FAULTS = "kill_worker stop_worker kill_trainer stop_trainer second_trainer fall_back fill_up spoil"
PLANTED_COUNT = 30  # seeds in which a planted bug must show


def play(seeds: range) -> Seen:
    total = Seen()
    for seed in seeds:
        total.add(simulate(seed))
    return total


@pytest.mark.timeout(300)
def test_what_is_live_is_what_was_published_for_a_handful_of_seeds() -> None:
    seen = play(range(1, 4))
    assert seen.published > 2 * VERSION_COUNT


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", range(5, 5 + COUNT, PART))
def test_what_is_live_is_what_was_published(first: int) -> None:
    seen = play(range(first, first + PART))
    # And something has happened
    assert seen.published > PART * VERSION_COUNT // 2
    assert seen.keyframes > PART and seen.commits > seen.published
    assert seen.several and seen.torn and seen.faults


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_fault_happens_and_jumps_are_taken() -> None:
    """What is never injected is never survived."""
    missing, seen = set(FAULTS.split()), Seen()
    for seed in range(101, 121):
        seen.add(simulate(seed))
        missing -= set(seen.faults)
        if not missing and seen.jumps:
            return
    assert (missing, seen.jumps > 0) == (set(), True)


def test_a_seed_replays_exactly() -> None:
    assert simulate(7) == simulate(7)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    with planted(name):
        found = next((seed for seed in range(1, PLANTED_COUNT + 1) if _fails(seed)), None)
    assert found is not None, f"{PLANTED_COUNT} seeds did not find {name}"
    # And it is this bug that was found, not something that is there without it
    simulate(found)


def _fails(seed: int) -> bool:
    try:
        simulate(seed)
    except Broken as error:
        print(error)
        return True
    return False


# ---- what the storm has found, one by one


class OnceWrongStore(FaultyStore):
    """Gives wrong manifests, once. wrong: what to say of them instead."""

    wrong: dict[str, object] | None = None

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        found = await super().manifests(run_id, names)
        if self.wrong is None or not found:
            return found
        wrong, self.wrong = self.wrong, None
        return [item and dataclasses.replace(item, **wrong) for item in found]  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"version": 2}, {"kind": "deltb"}, {"run_id": "another"}, {"codec": "step"}])
async def test_a_manifest_that_was_damaged_on_the_way_is_fetched_again(wrong: dict[str, object]) -> None:
    # Given a receiver that keeps up
    store, model = OnceWrongStore(), small_model()
    publisher, engine = Publisher(store, RUN), BitsEngine(small_model(1))
    receiver = WeightReceiver(store, RUN, engine)  # type: ignore[arg-type]
    await publisher.publish(model.named_parameters(), 0)
    assert await receiver.update()
    train(model)
    await publisher.publish(model.named_parameters(), 1)

    # When it is told something else than what was published
    store.wrong = wrong
    if "codec" in wrong:
        with pytest.raises(WireError):
            await receiver.update()

    # Then it keeps nothing of that; what names itself wrongly is asked for again at once
    assert await receiver.update()
    assert receiver.version == 1
    assert_holds(engine, model)


async def test_a_version_that_was_lost_and_published_again_by_the_same_trainer_is_fetched_again() -> None:
    # Given a receiver at version 1, which the broker then forgets
    store, model = FaultyStore(), small_model()
    publisher, engine = Publisher(store, RUN), BitsEngine(small_model(1))
    receiver = WeightReceiver(store, RUN, engine)  # type: ignore[arg-type]
    await publisher.publish(model.named_parameters(), 0)
    before = store.tables.remember()
    train(model)
    await publisher.publish(model.named_parameters(), 1)
    assert await receiver.update()
    store.tables.fall_back(before)

    # When the trainer goes on from the head, with other weights of that number, before anyone looks
    train(model)
    await publisher.publish(model.named_parameters(), 1)

    # Then those are what the engine gets
    assert await receiver.update()
    assert_holds(engine, model)


class ForgetfulStore(FaultyStore):
    """Falls back between the looks of one publish at the head. falls_in: looks until then, 0: never."""

    falls_in = 0
    before: tuple[object, ...] = ()

    async def head(self, run_id: str) -> Head:
        self.falls_in -= 1
        if self.falls_in == 0:
            self.tables.fall_back(self.before)
        return await super().head(run_id)


@pytest.mark.parametrize("falls_in", [1, 2])
async def test_a_head_that_is_lost_in_the_middle_of_a_publish_is_an_error_that_the_next_one_mends(
    falls_in: int,
) -> None:
    store, model = ForgetfulStore(), small_model()
    publisher = Publisher(store, RUN)
    await publisher.publish(model.named_parameters(), 0)
    store.before = store.tables.remember()
    train(model)
    await publisher.publish(model.named_parameters(), 1)
    train(model)

    store.falls_in = falls_in
    error: FabricError | None = None
    try:
        await publisher.publish(model.named_parameters(), 2)
    except BrokerError as raised:
        error = raised
        await publisher.publish(model.named_parameters(), 2)

    assert (error is not None) == (falls_in == 2)
    await assert_published(store, model, 2)
