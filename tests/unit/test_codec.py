"""Blocks and versions: exact for every bit pattern, small, and never applied when wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollfab.fabric.errors import ChainBroken, DigestMismatch, LayoutMismatch, WireError
from rollfab.fabric.weights.codec import Decoder, Encoded, Encoder
from rollfab.fabric.weights.layout import Layout, TensorSpec
from rollfab.fabric.weights.manifest import WeightManifest, state_digest
from rollfab.fabric.weights.snapshot import Identity, Prepared, Snapshot
from rollfab.fabric.weights.stage import Stage, Staged, commit

Bits = NDArray[Any]
DTYPES = [np.dtype(f"<u{width}") for width in (1, 2, 4, 8)]

# Patterns that float arithmetic would lose, as bfloat16: ±0, ±Inf, quiet and signalling NaNs with payloads, denormals.
AWKWARD = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x0001, 0x8001, 0x007F], np.uint16)


def restore(encoded: Encoded | None, old: Bits) -> Bits:
    new = old.copy()
    if encoded is None:
        return new
    decoded = Decoder().decode(encoded.data, element_count=len(old), dtype=old.dtype)
    where: Any = ... if decoded.indices is None else decoded.indices
    new[where] = decoded.numbers if decoded.is_absolute else new[where] + decoded.numbers
    return new


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Old and new bits of a block: any width, any density, small and wild steps."""
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.sampled_from([1, 2, 7, 300, 5000]))
    old = rng.integers(0, 2 ** (8 * dtype.itemsize), length, dtype=dtype)
    new = old.copy()
    changed = rng.random(length) < draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.6, 1.0]))
    step_max = draw(st.sampled_from([1, 3, 200, 2 ** (8 * dtype.itemsize) - 1]))
    steps = rng.integers(0, step_max, length, dtype=dtype, endpoint=True)
    new[changed] += np.where(rng.random(length) < 0.5, steps, 0 - steps).astype(dtype)[changed]
    return old, new


@given(pairs())
def test_a_delta_restores_every_bit(pair: tuple[Bits, Bits]) -> None:
    old, new = pair

    encoded = Encoder().delta(old, new)

    assert (encoded is None) == np.array_equal(old, new)
    np.testing.assert_array_equal(restore(encoded, old), new)


@given(pairs())
def test_an_encoding_tells_its_positions_and_values(pair: tuple[Bits, Bits]) -> None:
    old, new = pair

    encoded = Encoder().delta(old, new)

    if encoded is not None:
        assert encoded.changed_count == np.count_nonzero(old != new)
        where: Any = ... if encoded.indices is None else encoded.indices
        np.testing.assert_array_equal(encoded.values, new[where])


@given(pairs())
def test_a_dense_block_needs_no_base(pair: tuple[Bits, Bits]) -> None:
    _, new = pair

    np.testing.assert_array_equal(restore(Encoder().dense(new), np.zeros_like(new)), new)


def test_floats_that_arithmetic_would_lose_are_kept() -> None:
    # Given every awkward pattern beside every other
    old, new = (grid.reshape(-1).copy() for grid in np.meshgrid(AWKWARD, AWKWARD))

    # When, Then
    np.testing.assert_array_equal(restore(Encoder().delta(old, new), old), new)


def test_a_sign_flip_of_zero_is_a_change() -> None:
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[7] = 0x8000

    encoded = Encoder().delta(old, new)

    assert encoded is not None
    assert encoded.changed_count == 1
    np.testing.assert_array_equal(restore(encoded, old), new)


def test_gaps_longer_than_a_byte_are_kept() -> None:
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[[0, 254, 255, 509, 510, 766, 70_000, 299_999]] = 1

    np.testing.assert_array_equal(restore(Encoder().delta(old, new), old), new)


@given(pairs(), st.data())
def test_a_block_that_is_cut_off_is_refused(pair: tuple[Bits, Bits], data: st.DataObject) -> None:
    old, new = pair
    encoded = Encoder().delta(old, new)
    if encoded is not None:
        end = data.draw(st.integers(0, len(encoded.data) - 1))

        with pytest.raises(WireError):
            Decoder().decode(encoded.data[:end], element_count=len(old), dtype=old.dtype)


@given(pairs(), st.binary(max_size=200))
def test_foreign_bytes_are_refused_or_fit_the_block(pair: tuple[Bits, Bits], data: bytes) -> None:
    old, _ = pair
    try:
        decoded = Decoder().decode(data, element_count=len(old), dtype=old.dtype)
    except WireError:
        return
    assert decoded.indices is None or decoded.indices[-1] < len(old)


def test_a_training_step_costs_less_than_a_byte_and_a_half_per_change() -> None:
    # Given bfloat16 weights of which 1 % move, nine of ten by one unit in the last place
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(1 << 20, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    changed = np.flatnonzero(rng.random(len(old)) < 0.0096)
    steps = rng.choice(np.array([1, 2, 3, 9], np.uint16), p=[0.9, 0.04, 0.02, 0.04], size=len(changed))
    new[changed] += np.where(rng.random(len(changed)) < 0.5, steps, 0 - steps).astype(np.uint16)

    # When
    encoded = Encoder().delta(old, new)

    # Then: positions and values as int32 and bfloat16 would take 6 bytes
    assert encoded is not None
    assert len(encoded.data) / len(changed) < 1.5


# ---------------------------------------------------------------- versions

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


def history(densities: list[float]) -> tuple[list[Prepared], list[dict[str, Bits]]]:
    """A keyframe at version 0 and deltas of the given densities, with the weights of each version."""
    states = [random_bits(0)]
    snapshot = Snapshot(LAYOUT, states[0])
    versions = [snapshot.prepare_keyframe(Identity(run_id="r", epoch=1, version=0))]
    snapshot.advance(versions[0])
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
    assert state_digest(LAYOUT, bits) == state_digest(LAYOUT, expected)


@pytest.mark.parametrize("density", [0.0, 0.00001, 0.01, 0.4, 1.0])
def test_a_commit_makes_the_next_version(density: float) -> None:
    versions, states = history([density])
    live = {name: array.copy() for name, array in states[0].items()}

    commit(staged(versions[1:], live, 0), live)

    assert_same(live, states[1])
    assert versions[1].manifest.state_digest == state_digest(LAYOUT, live)


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


def test_a_newcomer_takes_the_keyframe_and_the_chain() -> None:
    versions, states = history([0.01, 0.02])
    live = random_bits(99)

    commit(staged(versions, None), live)

    assert_same(live, states[-1])


def test_a_commit_may_be_repeated_and_resumed() -> None:
    versions, states = history([0.01, 0.3])
    live = {name: array.copy() for name, array in states[0].items()}
    together = staged(versions[1:], live, 0)

    # Given a commit that stopped after its first tensor
    name, (indices, values) = next(iter(together.writes().items()))
    commit(Staged(together.version, {name: (indices, values)}), live)

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

    with pytest.raises(DigestMismatch, match="nothing was written"):
        staged(versions[1:], live, 0)


def test_a_delta_needs_its_base_version() -> None:
    versions, states = history([0.01, 0.01])

    with pytest.raises(ChainBroken, match="base 1, staged is 0"):
        staged(versions[2:], states[0], 0)


@given(st.integers(0, 2**32))
def test_a_flipped_bit_in_a_chunk_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    versions, states = SMALL
    chunk = bytearray(versions[1].chunks[0])
    chunk[rng.integers(len(chunk))] ^= 1 << rng.integers(8)
    stage = Stage(LAYOUT, states[0], 0)
    stage.begin(versions[1].manifest)

    with pytest.raises(DigestMismatch, match="chunk 0 of version 1"):
        stage.feed(bytes(chunk))


SMALL = history([0.0001])


def test_chunks_are_of_whole_blocks_and_bounded() -> None:
    versions, _ = history([0.5])

    for prepared in versions:
        rows = prepared.manifest.rows()
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
    torn = dataclasses.replace(manifest, blocks=manifest.blocks[6:])

    with pytest.raises(WireError, match="a keyframe of this layout has"):
        Stage(LAYOUT, None).begin(torn)


def test_a_layout_does_not_depend_on_the_order_of_tensors() -> None:
    assert Layout(LAYOUT.tensors[::-1]).digest == LAYOUT.digest
    assert Layout.from_rows(LAYOUT.rows()) == LAYOUT
