"""Versions: staged beside the live weights, checked before anything is written, committed as often as one likes."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import ChainBroken, DigestMismatch, LayoutMismatch, WireError
from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.versions.snapshot import Identity, Prepared, Snapshot
from rollfab.fabric.versions.stage import Stage, Staged, commit

pytestmark = pytest.mark.timeout(180)  # the first call on an element width compiles

Bits = NDArray[Any]

LAYOUT = Layout(
    (
        TensorSpec("embed", "bfloat16", (3000, 1000)),  # more than one block
        TensorSpec("head", "float32", (4, 5)),
        TensorSpec("scale", "float8_e4m3fn", (33,)),
        TensorSpec("nothing", "float32", (0, 4)),
        TensorSpec("one", "float16", ()),
    )
)


def random_bits(seed: int) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    return {
        spec.name: rng.integers(0, 2 ** (8 * spec.bits_dtype.itemsize), spec.element_count, dtype=spec.bits_dtype)
        for spec in LAYOUT.tensors
    }


def moved(bits: dict[str, Bits], seed: int, density: float) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in bits.items()}
    for array in new.values():
        array[rng.random(len(array)) < density] += array.dtype.type(1)
    return new


@cache
def beginning() -> tuple[Prepared, dict[str, Bits]]:
    """A keyframe at version 0, and its weights."""
    bits = random_bits(0)
    return Snapshot(LAYOUT, bits).prepare_keyframe(Identity(run_id="r", epoch=1, version=0)), bits


def history(densities: list[float]) -> tuple[list[Prepared], list[dict[str, Bits]]]:
    """A keyframe at version 0 and deltas of the given densities, with the weights of each version."""
    keyframe, bits = beginning()
    versions, states = [keyframe], [bits]
    snapshot = Snapshot(LAYOUT, bits, 0)
    for version, density in enumerate(densities, start=1):
        states.append(moved(states[-1], version, density))
        prepared = snapshot.prepare_delta(Identity(run_id="r", epoch=1, version=version), states[-1])
        snapshot.advance(prepared)
        versions.append(prepared)
    return versions, states


def staged(versions: list[Prepared], live: dict[str, Bits] | None, have: int = -1) -> Staged:
    stage = Stage(LAYOUT, live, have)
    for prepared in versions:
        stage.begin(WeightManifest.decode(prepared.manifest.encode()))
        for chunk in prepared.chunks:
            stage.feed(chunk)
        stage.end()
    return stage.finish()


def assert_same(bits: dict[str, Bits], expected: dict[str, Bits]) -> None:
    assert all(np.array_equal(bits[name], expected[name]) for name in expected)


@pytest.mark.parametrize("density", [0.0, 0.00001, 0.01, 0.4, 1.0])
def test_a_commit_makes_the_next_version(density: float) -> None:
    versions, states = history([density])
    live = {name: array.copy() for name, array in states[0].items()}

    commit(staged(versions[1:], live, 0), live)

    assert_same(live, states[1])
    np.testing.assert_array_equal(versions[1].manifest.sums, state_sums(LAYOUT, live))


def test_a_version_without_changes_has_no_bytes() -> None:
    versions, _ = history([0.0])

    assert versions[1].chunks == []
    assert versions[1].manifest.payload_bytes == versions[1].manifest.changed_count == 0


def test_staging_leaves_the_live_weights_alone() -> None:
    versions, states = history([0.01, 1.0])
    live = {name: array.copy() for name, array in states[0].items()}
    for array in live.values():
        array.flags.writeable = False

    staged(versions[1:], live, 0)

    assert_same(live, states[0])


@pytest.mark.parametrize("densities", [[0.01, 0.02, 0.0, 0.005], [0.01, 1.0, 0.01], [1.0, 0.6, 0.01], [0.3, 0.3]])
def test_several_versions_become_one_commit(densities: list[float]) -> None:
    versions, states = history(densities)
    live = {name: array.copy() for name, array in states[0].items()}

    together = staged(versions[1:], live, 0)
    commit(together, live)

    assert together.version == len(densities)
    assert_same(live, states[-1])


@pytest.mark.parametrize("densities", [[0.01, 0.02], [0.01, 1.0, 0.01], [0.6, 0.0, 0.3]])
def test_a_newcomer_takes_the_keyframe_and_the_chain(densities: list[float]) -> None:
    versions, states = history(densities)
    live = random_bits(99)

    commit(staged(versions, None), live)

    assert_same(live, states[-1])


def test_a_commit_may_be_repeated_and_resumed() -> None:
    versions, states = history([0.01, 0.3])
    live = {name: array.copy() for name, array in states[0].items()}
    together = staged(versions[1:], live, 0)

    # Given a commit that stopped after its first tensor
    name, (indices, values) = next(iter(together.writes().items()))
    commit(dataclasses.replace(together, tensors={name: (indices, values)}), live)

    # When it is done again, twice
    commit(together, live)
    commit(together, live)

    # Then
    assert_same(live, states[-1])


def test_the_same_memory_is_written() -> None:
    versions, states = history([0.01])
    live = {name: array.copy() for name, array in states[0].items()}
    before = {name: array.ctypes.data for name, array in live.items()}

    commit(staged(versions[1:], live, 0), live)

    assert {name: array.ctypes.data for name, array in live.items()} == before


def test_a_wrong_base_is_found_before_anything_is_written() -> None:
    versions, states = history([0.01])
    live = moved(states[0], 7, 0.5)

    with pytest.raises(DigestMismatch, match="nothing of it may be used"):
        staged(versions[1:], live, 0)


def test_a_wrong_base_at_a_changed_position_is_found_though_the_sums_carried_along_are_right() -> None:
    # Given live weights that went wrong in one place after their sums were made
    versions, states = history([0.01])
    live = {name: array.copy() for name, array in states[0].items()}
    sums = state_sums(LAYOUT, live)
    place = np.flatnonzero(states[0]["embed"] != states[1]["embed"])[7]
    live["embed"][place] ^= np.uint16(0x8000)

    # When, Then: it is named
    stage = Stage(LAYOUT, live, 0, sums)
    stage.begin(versions[1].manifest)
    for chunk in versions[1].chunks:
        stage.feed(chunk)
    with pytest.raises(DigestMismatch, match="tensor embed differs"):
        stage.end()


def test_sums_are_carried_from_version_to_version() -> None:
    versions, states = history([0.01, 0.6, 0.001])

    together = staged(versions[1:], states[0], 0)

    np.testing.assert_array_equal(together.sums, state_sums(LAYOUT, states[-1]))


def test_a_delta_needs_its_base_version() -> None:
    versions, states = history([0.01, 0.01])

    with pytest.raises(ChainBroken, match="base 1, staged is 0"):
        staged(versions[2:], states[0], 0)


@pytest.fixture(scope="module")
def small() -> Any:
    return history([0.0001])


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_flipped_bit_in_a_chunk_is_found(small: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    versions, states = small
    chunk = bytearray(versions[1].chunks[0])
    chunk[rng.integers(len(chunk))] ^= 1 << rng.integers(8)
    stage = Stage(LAYOUT, states[0], 0)
    stage.begin(versions[1].manifest)

    with pytest.raises(DigestMismatch, match="chunk 0 of version 1"):
        stage.feed(bytes(chunk))


def test_chunks_are_of_whole_blocks_and_bounded() -> None:
    versions, _ = history([0.5])

    for prepared in versions:
        rows = prepared.manifest.rows
        assert sum(row.length for row in rows) == prepared.manifest.payload_bytes
        assert max(len(chunk) for chunk in prepared.chunks) < 5 << 20


def test_another_model_is_refused_by_name() -> None:
    versions, _ = history([])
    other = Layout((TensorSpec("embed", "float32", (3000, 1000)), TensorSpec("extra", "float32", (1,))))

    with pytest.raises(LayoutMismatch) as caught:
        Stage(other, None).begin(versions[0].manifest)

    assert "1 missing (extra)" in str(caught.value)
    assert "head" in str(caught.value)
    assert "embed: bfloat16[3000, 1000] instead of float32[3000, 1000]" in str(caught.value)


def test_a_keyframe_with_a_block_missing_is_refused() -> None:
    versions, _ = history([])
    manifest = versions[0].manifest
    torn = dataclasses.replace(manifest, blocks=manifest.blocks[9:], block_digests=manifest.block_digests[1:])

    with pytest.raises(WireError, match="elements of tensor 'embed', which has 3,000,000"):
        Stage(LAYOUT, None).begin(torn)


def test_a_layout_does_not_depend_on_the_order_of_tensors() -> None:
    assert Layout(LAYOUT.tensors[::-1]).digest == LAYOUT.digest
    assert Layout.from_rows(LAYOUT.rows()) == LAYOUT
