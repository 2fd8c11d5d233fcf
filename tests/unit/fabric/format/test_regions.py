"""Regions: parts of tensors, contiguous or tiles, that hold every element once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.format.codec import BLOCK_BYTES
from rollfab.fabric.format.digest import sum_range, tensor_key
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.regions import Region, cut, cut_digest, cut_region

KEY = tensor_key("w")


@st.composite
def tiles(draw: st.DrawFn) -> tuple[np.ndarray, Region]:
    """A matrix of distinct numbers, flat, and some columns of some of its rows."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    first_row, first_column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
    run_count = draw(st.integers(1, rows - first_row))
    run = draw(st.integers(1, columns - first_column))
    region = Region(0, first_row * columns + first_column, run, columns, run_count)
    return np.arange(rows * columns, dtype=np.uint32), region


@given(tiles())
def test_a_region_reads_the_elements_at_its_positions(made: tuple[np.ndarray, Region]) -> None:
    flat, region = made

    np.testing.assert_array_equal(region.read(flat), flat[region.positions(None)])
    assert (np.diff(region.positions(None)) > 0).all()
    assert region.stop == region.positions(None)[-1] + 1


@given(tiles())
def test_writing_a_region_changes_its_elements_and_no_others(made: tuple[np.ndarray, Region]) -> None:
    flat, region = made
    expected = flat.copy()
    expected[region.positions(None)] += 1000

    region.write(flat, region.read(flat) + np.uint32(1000))

    np.testing.assert_array_equal(flat, expected)


@given(tiles())
def test_positions_are_found_again_in_the_region(made: tuple[np.ndarray, Region]) -> None:
    _, region = made
    between = np.arange(region.start, region.stop, dtype=np.int64)

    is_inside, indices = region.locate(between)

    np.testing.assert_array_equal(between[is_inside], region.positions(None))
    np.testing.assert_array_equal(indices, np.arange(region.element_count))


@given(tiles())
def test_the_sum_of_a_region_and_of_the_rest_is_that_of_the_tensor(made: tuple[np.ndarray, Region]) -> None:
    flat, region = made
    rest = np.setdiff1d(np.arange(len(flat)), region.positions(None))

    parts = region.sum(KEY, None, region.read(flat)) + sum(sum_range(KEY, i, flat[i : i + 1]) for i in rest.tolist())

    assert parts % 2**64 == sum_range(KEY, 0, flat)


def test_the_ordinary_cut_covers_every_tensor_in_blocks_of_bounded_bytes() -> None:
    count = 3 * BLOCK_BYTES // 4 + 5
    empty = TensorSpec("e", "int8", (0, 3))
    layout = Layout((TensorSpec("a", "float32", (count,)), TensorSpec("b", "int8", ()), empty))

    regions = cut(layout)

    assert [region.tensor for region in regions] == [0, 0, 0, 0, 1]
    np.testing.assert_array_equal(np.concatenate([region.positions(None) for region in regions[:4]]), np.arange(count))
    assert all(region.fits(layout.tensors[region.tensor]) for region in regions)


@pytest.mark.parametrize(
    "region",
    [
        Region(0, -1, 2, 2, 1),
        Region(0, 0, 0, 2, 1),
        Region(0, 0, 2, 1, 2),
        Region(0, 0, 2, 2, 0),
        Region(0, 9, 2, 2, 1),
        Region(0, 0, 2, 9, 2),
    ],
)
def test_a_region_that_is_no_part_of_the_tensor_does_not_fit(region: Region) -> None:
    assert not region.fits(TensorSpec("w", "int16", (10,)))


def test_a_region_above_a_block_does_not_fit() -> None:
    spec = TensorSpec("w", "int8", (2 * BLOCK_BYTES,))

    assert Region.span(0, 0, BLOCK_BYTES).fits(spec)
    assert not Region.span(0, 0, BLOCK_BYTES + 1).fits(spec)


def test_cuts_that_differ_have_other_digests() -> None:
    spec = TensorSpec("w", "int8", (10,))

    whole = Region.span(0, 0, 10)
    assert cut_digest(cut_region(whole, spec)) == cut_digest([whole])
    assert cut_digest([whole]) != cut_digest([Region.span(0, 0, 5), Region.span(0, 5, 10)])
