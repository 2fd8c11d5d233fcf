"""The entropy floor: known distributions, the published figures, and real blocks against it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfab.fabric.format.codec import Encoder
from rollfab.fabric.format.decoder import Decoder
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.regions import cut
from rollfab.fabric.versions.entropy import Floor, block_floor, entropy_bits, position_bits, sampled_ratio
from rollfab.fabric.versions.snapshot import Identity, Snapshot

ELEMENTS = 1 << 20
U2 = np.dtype("<u2")


def updated(density: float, seed: int = 0) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Weights before and after: changes anywhere, nine of ten by one step."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, ELEMENTS, dtype=np.uint16)
    places = np.flatnonzero(rng.random(ELEMENTS) < density)
    steps = rng.choice([1, -1, 2, -2], len(places), p=[0.45, 0.45, 0.05, 0.05])
    new = old.copy()
    new[places] += steps.astype(np.uint16)
    return old, new


@pytest.mark.parametrize(("density", "bits"), [(0.00339, 9.65), (0.00964, 8.13), (0.02447, 6.78)])
def test_a_position_costs_what_independent_changes_need(density: float, bits: float) -> None:
    changed = round(density * 1e9)
    assert position_bits(10**9, changed) / changed == pytest.approx(bits, abs=0.01)


def test_the_gaps_between_such_positions_have_the_same_entropy() -> None:
    old, new = updated(0.01)
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1).astype(np.uint32)
    assert entropy_bits(gaps) == pytest.approx(position_bits(ELEMENTS, len(places)) / len(places), rel=0.01)


@pytest.mark.parametrize(
    ("symbols", "bits"), [([], 0.0), ([7] * 9, 0.0), ([0, 1, 2, 3] * 5, 2.0), ([0] * 3 + [1], 0.811)]
)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
def test_entropy_is_that_of_the_histogram_whatever_the_width(symbols: list[int], bits: float, dtype: str) -> None:
    assert entropy_bits(np.array(symbols, dtype=dtype)) == pytest.approx(bits, abs=1e-3)


@pytest.mark.parametrize("density", [0.002, 0.01, 0.03])
def test_a_block_is_never_below_its_floor_and_near_it(density: float) -> None:
    # Given an update as training makes them, with a step entropy of 1.469 bits
    old, new = updated(density)
    encoded = Encoder().delta(old, new)
    assert encoded is not None
    # When its floor is computed from its bytes alone
    floor = block_floor(Decoder().decode(encoded.data, element_count=ELEMENTS, dtype=U2), ELEMENTS)
    # Then the parts are what such changes need, and the code needs a little more
    changed = encoded.changed_count
    assert floor.step_bits / changed == pytest.approx(1.469, abs=0.02)
    assert floor.position_bits == position_bits(ELEMENTS, changed)
    assert 0.85 < floor.byte_count / len(encoded.data) <= 1


def test_zero_steps_of_a_dense_block_count_as_positions() -> None:
    old, new = updated(0.6)
    encoded = Encoder().delta(old, new)
    assert encoded is not None and encoded.indices is None
    floor = block_floor(Decoder().decode(encoded.data, element_count=ELEMENTS, dtype=U2), ELEMENTS)
    assert floor.position_bits == position_bits(ELEMENTS, int(np.count_nonzero(old != new)))
    assert 0 < floor.step_bits / encoded.changed_count < 1.5


def test_a_block_without_base_has_the_entropy_of_its_values() -> None:
    values = np.repeat(np.arange(16, dtype=np.uint16), 1000)
    floor = block_floor(Decoder().decode(Encoder().dense(values).data, element_count=16000, dtype=U2), 16000)
    assert floor.byte_count == pytest.approx(16000 * 4 / 8)
    wide = values.astype(np.uint32) << 8
    data = Encoder().dense(wide).data
    floor = block_floor(Decoder().decode(data, element_count=16000, dtype=np.dtype("<u4")), 16000)
    assert floor.byte_count == pytest.approx(16000 * 4 / 8)


def test_floors_add_up() -> None:
    assert (Floor(8, 16, 0) + Floor(0, 8, 32)) == Floor(8, 24, 32)
    assert Floor(8, 24, 32).byte_count == 8


def test_a_few_blocks_tell_of_the_whole_version() -> None:
    # Given a model of some large blocks among many tiny ones
    old, new = updated(0.01)
    specs = [TensorSpec(f"large.{k}", "bfloat16", (ELEMENTS,)) for k in range(2)]
    specs += [TensorSpec(f"a.tiny.{k}", "bfloat16", (32,)) for k in range(20)]
    layout = Layout(tuple(specs))
    before = {spec.name: old[: spec.element_count].copy() for spec in specs}
    after = {spec.name: new[: spec.element_count].copy() for spec in specs}
    for k in range(20):
        after[f"a.tiny.{k}"][k] += 1
    # When a delta is made
    prepared = Snapshot(layout, before, 1).prepare_delta(Identity(run_id="r", epoch=1, version=2), after)
    # Then its manifest says about what all of its blocks together do
    manifest, total, decoder = prepared.manifest, Floor(), Decoder()
    for row in manifest.rows:
        data = prepared.chunks[row.chunk][row.offset : row.offset + row.length]
        count = row.region.element_count
        total += block_floor(decoder.decode(data, element_count=count, dtype=U2), count)
    assert manifest.of_entropy_floor == pytest.approx(total.byte_count / manifest.payload_bytes, abs=0.1)
    assert manifest.of_entropy_floor > 0.85


def test_a_keyframe_has_no_ratio_to_guess_from() -> None:
    layout = Layout((TensorSpec("w", "float32", (64,)),))
    snapshot = Snapshot(layout, {"w": np.arange(64, dtype=np.uint32)}, 1)
    manifest = snapshot.prepare_keyframe(Identity(run_id="r", epoch=1, version=1)).manifest
    assert manifest.of_entropy_floor == 0.0
    assert sampled_ratio(layout, [], []) == 0.0
    assert len(cut(layout)) == 1 and math.isfinite(manifest.of_entropy_floor)
