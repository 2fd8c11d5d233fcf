"""Looking at published weights: what verifying finds, what inspecting says, what differs between two versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import ChainBroken, DigestMismatch, VersionUnknown
from rollfab.fabric.format.layout import TensorSpec
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.inspect.diff import TensorDiff, diff_tensor, diff_versions, numbers
from rollfab.fabric.inspect.inspection import inspect_version
from rollfab.fabric.inspect.verify import Verified, verify
from rollfab.fabric.rules.weights.chain import KEYFRAME
from rollfab.fabric.versions.reader import fetch_weights
from rollfab.trainer.publish.publisher import Publisher
from tests.support.weights.faulty_weights import FaultyStore

RUN = "publish"
VERSIONS = 18  # two jumps of eight


class LyingStore(FaultyStore):
    """Says of some manifests that a tensor has another sum."""

    def __init__(self) -> None:
        super().__init__()
        self.lies: dict[tuple[int, str], int] = {}  # name → place of the tensor in the layout

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        found = await super().manifests(run_id, names)
        return [item and self._bent(item) for item in found]

    def _bent(self, item: WeightManifest) -> WeightManifest:
        place = self.lies.get((item.version, item.kind))
        if place is None:
            return item
        sums = item.sums.copy()
        sums[place] += np.uint64(1)
        return dataclasses.replace(item, sums=sums)


@pytest.fixture
async def store() -> LyingStore:
    """A run with versions 0 to VERSIONS - 1 of two tensors, `a` in bf16 and `b` in float32, and an empty one."""
    store, rng = LyingStore(), np.random.default_rng(0)
    publisher = Publisher(store, RUN)
    a = rng.integers(0, 1 << 16, (300, 200), dtype=np.uint16)
    b, none = rng.standard_normal(500).astype(np.float32), np.zeros((0, 3), np.float32)
    for version in range(VERSIONS):
        await publisher.publish({"a": a, "b": b, "none": none}, version, allow_nonfinite=True)
        a.reshape(-1)[rng.choice(a.size, 400, replace=False)] += np.uint16(1)
        b[version] += 0.5
    return store


async def names(store: LyingStore) -> set[tuple[int, str]]:
    return set(await store.held(RUN))


def concerned(found: Verified) -> set[tuple[int, str]]:
    return {(fault.version, fault.kind) for fault in found.faults}


# ---------------------------------------------------------------- verify


async def test_all_that_is_held_is_staged_once_and_right(store: LyingStore) -> None:
    held = await names(store)
    seen: list[tuple[int, int]] = []

    found = await verify(store, RUN, progress=lambda done, total: seen.append((done, total)))

    assert found.faults == [] and found.unreached == []
    assert set(found.checked) == held and len(found.checked) == len(held)
    assert {kind for _, kind in held} >= {KEYFRAME, "delta", "jump-8"}
    manifests = [item for item in await store.manifests(RUN, sorted(held)) if item is not None]
    assert found.byte_count == sum(item.payload_bytes for item in manifests) == seen[-1][0] == seen[-1][1]
    assert found.block_count == sum(len(item.rows) for item in manifests)


async def test_one_version_is_checked_by_all_that_leads_into_it(store: LyingStore) -> None:
    found = await verify(store, RUN, 16)
    assert found.faults == []
    assert {(16, "delta"), (16, "jump-8")} <= set(found.checked)
    assert all(version <= 16 for version, _ in found.checked)


async def test_a_corrupt_chunk_is_named_with_its_tensors(store: LyingStore) -> None:
    store.spoil[(12, "delta")] = 99
    found = await verify(store, RUN)
    fault, *behind = found.faults
    assert (fault.version, fault.kind, fault.chunk, fault.tensors) == (12, "delta", 0, ("a", "b"))
    assert "chunk 0 is corrupt" in fault.text
    # And so is every version that nobody who has nothing can read for it
    assert [each.version for each in behind] == [13, 14, 15] and found.unreadable == [12, 13, 14, 15]
    # And what lies behind it is reached by another way where there is one
    assert (16, "jump-8") in found.checked and (17, "delta") in found.checked
    assert (13, "delta") in found.unreached


async def test_what_was_damaged_on_the_way_once_is_no_fault(store: LyingStore) -> None:
    store.spoil[(12, "delta")] = 1
    assert (await verify(store, RUN)).faults == []


async def test_a_missing_chunk_is_a_fault_and_a_deleted_version_is_none(store: LyingStore) -> None:
    store.lose[(12, "delta")] = 99
    found = await verify(store, RUN)
    assert (found.faults[0].version, found.faults[0].text) == (12, "chunk 0 is not there; it holds a, b")

    class Deleting(LyingStore):
        """Deletes a version in the moment in which it is read."""

        async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
            if (manifest.version, manifest.kind) == (12, "delta"):
                await self.drop(RUN, [manifest.link], manifest.epoch)
            return await super().chunks(manifest, indices)

    deleting = Deleting()
    deleting.tables.fall_back(store.tables.remember())
    assert (await verify(deleting, RUN)).unreadable == [13, 14, 15]  # which it leads to, and which are still there


@pytest.mark.parametrize("kind", ["delta", "jump-8"])
async def test_a_way_that_leads_to_another_state_is_named(store: LyingStore, kind: str) -> None:
    store.lies[(16, kind)] = 1
    found = await verify(store, RUN)
    assert (16, kind) in concerned(found)
    assert concerned(found) <= {(16, "delta"), (16, "jump-8"), (17, "delta")}
    assert any("another state" in fault.text for fault in found.faults)
    assert all(fault.tensors == ("b",) for fault in found.faults)


async def test_a_keyframe_of_another_state_is_named(store: LyingStore) -> None:
    store.lies[(0, KEYFRAME)] = 0
    found = await verify(store, RUN)
    assert (0, KEYFRAME) in concerned(found)
    assert ("a",) in {fault.tensors for fault in found.faults}
    assert (0, KEYFRAME) not in found.checked


async def test_a_version_that_is_not_held_is_an_error(store: LyingStore) -> None:
    with pytest.raises(VersionUnknown, match="version 99 of run 'publish'"):
        await verify(store, RUN, 99)
    with pytest.raises(VersionUnknown, match="nothing is published in run 'nothing'"):
        await verify(store, "nothing")


# ---------------------------------------------------------------- inspect


async def test_a_version_is_taken_apart_by_mode_and_tensor(store: LyingStore) -> None:
    found = await inspect_version(store, RUN, 17)
    manifest = found.manifest
    assert (manifest.version, manifest.kind) == (17, "delta")
    assert list(found.tensors) == ["a", "b"]
    assert (found.tensors["a"].changed_count, found.tensors["b"].changed_count) == (400, 1)
    assert found.modes["gaps and steps"].block_count == 2
    for tallies in (found.modes.values(), found.tensors.values()):
        assert sum(tally.byte_count for tally in tallies) == manifest.payload_bytes
        assert sum(tally.changed_count for tally in tallies) == manifest.changed_count
    assert found.of_entropy_floor is not None and 0.5 < found.of_entropy_floor < 1


async def test_of_several_kinds_the_asked_one_is_shown(store: LyingStore) -> None:
    assert (await inspect_version(store, RUN, 16)).manifest.kind == "delta"
    jump = (await inspect_version(store, RUN, 16, "jump-8")).manifest
    assert (jump.kind, jump.base_version) == ("jump-8", 8)
    keyframe = await inspect_version(store, RUN, 0)
    assert set(keyframe.modes) == {"values"} and keyframe.floor.position_bits == 0
    with pytest.raises(VersionUnknown, match="held of it: delta"):
        await inspect_version(store, RUN, 17, "keyframe")


async def test_inspecting_refuses_what_is_not_right(store: LyingStore) -> None:
    store.spoil[(17, "delta")] = 99
    with pytest.raises(DigestMismatch, match="chunk 0 of version 17"):
        await inspect_version(store, RUN, 17)
    store.spoil.clear()
    store.lose[(17, "delta")] = 99
    with pytest.raises(ChainBroken, match="chunk 0 of version 17"):
        await inspect_version(store, RUN, 17)


# ---------------------------------------------------------------- diff


async def test_two_versions_differ_as_their_weights_do_from_either_side(store: LyingStore) -> None:
    old, new = await fetch_weights(store, RUN, 9), await fetch_weights(store, RUN, 17)
    a, b, none = await diff_versions(store, RUN, 9, 17)
    assert a.changed_count == np.count_nonzero(old["a"] != new["a"]) > 400
    assert a.one_step_count + a.few_steps_count + a.many_steps_count == a.changed_count
    assert a.few_steps_count == np.count_nonzero((new["a"] - old["a"] == 2) | (new["a"] - old["a"] == 3))
    assert (b.changed_count, b.change_max) == (8, pytest.approx(0.5))
    assert (none.changed_count, none.density, none.change_max) == (0, 0.0, None)
    assert await diff_versions(store, RUN, 17, 9) == [a, b, none]
    assert all(each.changed_count == 0 for each in await diff_versions(store, RUN, 17, 17))


async def test_a_version_to_compare_with_must_be_held(store: LyingStore) -> None:
    for pair in ((9, 99), (99, 9), (3, 9)):
        with pytest.raises(VersionUnknown, match=r"version (99|3) "):
            await diff_versions(store, RUN, *pair)


def bits(dtype: str, *values: int) -> NDArray[np.unsignedinteger]:
    return np.array(values, dtype=TensorSpec("t", dtype, ()).bits_dtype)


@pytest.mark.parametrize(
    ("dtype", "pattern", "value"),
    [
        ("bfloat16", 0x3F80, 1.0),
        ("float16", 0x3C00, 1.0),
        ("float32", 0x3F800000, 1.0),
        ("float64", 0x3FF0000000000000, 1.0),
        ("float8_e5m2", 0x3C, 1.0),
        ("float8_e4m3fn", 0x38, 1.0),
        ("float8_e4m3fn", 0x7E, 448.0),
        ("float8_e4m3fn", 0x81, -(2.0**-9)),
        ("int8", 0xFF, -1.0),
        ("uint8", 0xFF, 255.0),
        ("bool", 1, 1.0),
    ],
)
def test_patterns_are_the_numbers_that_they_mean(dtype: str, pattern: int, value: float) -> None:
    assert numbers(dtype, bits(dtype, pattern)).tolist() == [value]


def test_steps_are_distances_without_sign_and_nan_has_no_size() -> None:
    # Given one step up, three down, a sign flip, a NaN, and an element that stays
    old = bits("bfloat16", 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x1234)
    new = bits("bfloat16", 0x3F81, 0x3F7D, 0xBF80, 0x7FC1, 0x1234)
    found = diff_tensor(TensorSpec("t", "bfloat16", (5,)), old, new)
    assert found == TensorDiff(
        name="t",
        dtype="bfloat16",
        element_count=5,
        changed_count=4,
        one_step_count=1,
        few_steps_count=1,
        many_steps_count=2,
        change_max=2.0,
    )
    nothing = diff_tensor(TensorSpec("t", "float32", (1,)), bits("float32", 0x7F800000), bits("float32", 0x7FC00000))
    assert (nothing.changed_count, nothing.change_max) == (1, None)
