"""The digest: adds up over any split, moves with any change, tells where a base was another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollfab.fabric.format.digest import change_at, state_sums, sum_at, sum_range, sums_digest, tensor_key
from rollfab.fabric.format.kernels import load
from rollfab.fabric.format.kernels.numpy_loops import factor_table, odd_keys
from rollfab.fabric.format.kernels.protocol import MIX, NUMBA, NUMPY, ROW, ROW_BITS, Kernels
from rollfab.fabric.format.layout import Layout, TensorSpec

pytestmark = pytest.mark.timeout(180)  # the first call on an element width compiles

DTYPES = [np.dtype(f"<u{width}") for width in (1, 2, 4, 8)]
KEY = tensor_key("model.layers.0.mlp.up_proj.weight")
WORD = 2**64


@pytest.fixture(params=[NUMBA, NUMPY], scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == NUMBA:
        pytest.importorskip("numba")
    return load(request.param)


@st.composite
def values(draw: st.DrawFn) -> NDArray[Any]:
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.sampled_from([1, 2, 7, 500, ROW - 1, ROW, 3 * ROW + 5]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return rng.integers(0, 2 ** (8 * dtype.itemsize), length, dtype=dtype)


def by_hand(key: int, position: int, value: int) -> int:
    """h of one element, from the formula in fabric/format/digest.py, in Python's own numbers."""
    x = (value + 1) * MIX % WORD
    x ^= x >> 32
    row_key = int(odd_keys(key, np.array([position >> ROW_BITS], np.uint64))[0])
    return int(factor_table()[position % ROW]) * row_key * x * (2 * x + 1) % WORD


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_that_of_the_written_formula(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    bits = np.array([0, 1, 2 ** (8 * dtype.itemsize) - 1, 77], dtype)
    positions = np.array([0, ROW - 1, ROW, 5_000_000_000])

    found = sum_at(KEY, positions, bits, kernels=kernels)

    assert found == sum(by_hand(KEY, *each) for each in zip(positions.tolist(), bits.tolist(), strict=True)) % WORD


def test_the_formula_does_not_change() -> None:
    # Sums travel between programs of different versions
    assert sum_range(1, 0, np.arange(20_000, dtype=np.uint16)) == 12389771219948048085


@settings(deadline=None)
@given(bits=values(), start=st.sampled_from([0, 1, ROW - 3, 10 * ROW]), cut=st.floats(0, 1))
def test_parts_add_up_to_the_whole(kernels: Kernels, bits: NDArray[Any], start: int, cut: float) -> None:
    whole = sum_range(KEY, start, bits, kernels=kernels)
    middle = int(cut * len(bits))

    # Two stretches
    ends = (start, bits[:middle]), (start + middle, bits[middle:])
    assert sum(sum_range(KEY, at, part, kernels=kernels) for at, part in ends) % WORD == whole

    # Two interleaved parts, in another order
    order = np.random.default_rng(0).permutation(len(bits))
    parts = order[:middle], order[middle:]
    assert sum(sum_at(KEY, part + start, bits[part], kernels=kernels) for part in parts) % WORD == whole


@settings(deadline=None)
@given(bits=values(), start=st.integers(0, 2**40))
def test_both_makes_give_the_same_sums(bits: NDArray[Any], start: int) -> None:
    pytest.importorskip("numba")
    compiled, plain = load(NUMBA), load(NUMPY)
    positions = start + np.arange(len(bits), dtype=np.int64)

    assert sum_range(KEY, start, bits, kernels=compiled) == sum_range(KEY, start, bits, kernels=plain)
    assert sum_at(KEY, positions, bits, kernels=compiled) == sum_at(KEY, positions, bits, kernels=plain)


@settings(deadline=None)
@given(bits=values(), data=st.data())
def test_any_single_change_moves_the_sum_by_what_is_said(
    kernels: Kernels, bits: NDArray[Any], data: st.DataObject
) -> None:
    # Given one element with one bit flipped, or any other value
    place = data.draw(st.integers(0, len(bits) - 1))
    other = bits.copy()
    other[place] ^= bits.dtype.type(data.draw(st.integers(1, 2 ** (8 * bits.itemsize) - 1)))

    # When
    before, after = (sum_range(KEY, 0, each, kernels=kernels) for each in (bits, other))

    # Then
    assert before != after
    where = np.array([place])
    assert (before + change_at(KEY, 0, where, bits[where], other[where], kernels=kernels)) % WORD == after


def test_elements_that_change_places_move_the_sum(kernels: Kernels) -> None:
    bits = np.arange(50_000, dtype=np.uint16)
    for first, second in [(0, 1), (5, 5 + ROW), (17, 40_000)]:
        other = bits.copy()
        other[[first, second]] = other[[second, first]]
        assert sum_range(KEY, 0, bits, kernels=kernels) != sum_range(KEY, 0, other, kernels=kernels)


@settings(deadline=None)
@given(bits=values(), data=st.data())
def test_the_same_step_on_another_base_moves_the_sum_by_another_amount(
    kernels: Kernels, bits: NDArray[Any], data: st.DataObject
) -> None:
    # Given a receiver whose base differs from the publisher's in one element, which the step then changes
    number = st.integers(1, 2 ** (8 * bits.itemsize) - 1)
    place = np.array([data.draw(st.integers(0, len(bits) - 1))])
    base = bits[place]
    wrong = base ^ bits.dtype.type(data.draw(number))
    step = bits.dtype.type(data.draw(number))

    # When
    published, staged = (change_at(KEY, 0, place, old, old + step, kernels=kernels) for old in (base, wrong))

    # Then
    assert published != staged


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sign_flips_of_many_elements_move_the_sum(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    bits = np.random.default_rng(0).integers(0, 256, 1000).astype(dtype)
    sign = dtype.type(1 << (8 * dtype.itemsize - 1))
    for count in (2, 4, 1000):
        other = bits.copy()
        other[:count] ^= sign
        assert sum_range(KEY, 0, bits, kernels=kernels) != sum_range(KEY, 0, other, kernels=kernels)


def test_a_state_has_a_sum_for_each_tensor_that_depends_on_its_name(kernels: Kernels) -> None:
    layout = Layout((TensorSpec("a", "bfloat16", (40, 30)), TensorSpec("b", "bfloat16", (1200,)), _empty("c")))
    same = np.arange(1200, dtype=np.uint16)

    sums = state_sums(layout, {"a": same, "b": same, "c": same[:0]}, kernels=kernels)

    assert sums.dtype == np.uint64 and sums.shape == (3,)
    assert sums[0] != sums[1] and sums[2] == 0
    assert sums[0] == sum_range(tensor_key("a"), 0, same)
    assert sums_digest(sums) != sums_digest(sums[::-1])
    assert len(sums_digest(sums)) == 32


def _empty(name: str) -> TensorSpec:
    return TensorSpec(name, "float32", (0, 7))


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    start=st.sampled_from([0, 1, ROW - 3, 5_000_000_000]),
    run=st.integers(1, 40),
    gap=st.sampled_from([0, 1, ROW, 3 * ROW + 7]),
    run_count=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_torch_sums_runs_as_the_host_sums_their_positions(
    dtype: np.dtype[Any], start: int, run: int, gap: int, run_count: int, seed: int
) -> None:
    torch_loops = pytest.importorskip("rollfab.fabric.format.kernels.torch_loops")
    bits = np.random.default_rng(seed).integers(0, 2 ** (8 * dtype.itemsize), run_count * run, dtype=dtype)
    bits[: len(bits) // 2] |= dtype.type(1 << (8 * dtype.itemsize - 1))  # the sign, where the device has one
    positions = start + (np.arange(run_count)[:, None] * (run + gap) + np.arange(run)).reshape(-1)

    runs = torch_loops.as_tensor(bits).reshape(run_count, run)
    assert torch_loops.sum_runs(KEY, start, run + gap, runs) == sum_at(KEY, positions, bits)
    assert (torch_loops.as_tensor(bits).numpy().view(dtype) == bits).all(), "what is summed is not written"
