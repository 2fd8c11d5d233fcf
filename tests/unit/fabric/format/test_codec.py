"""Blocks: exact for every bit pattern, small, and the same bytes whatever made them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import WireError
from rollfab.fabric.format import codec
from rollfab.fabric.format.codec import SPARSE, STEPS, VALUES, Encoded, Encoder
from rollfab.fabric.format.decoder import Decoder
from rollfab.fabric.format.digest import sum_range
from rollfab.fabric.format.kernels import load
from rollfab.fabric.format.kernels.protocol import NUMBA, NUMPY, Kernels
from rollfab.fabric.versions.commit import scatter

# The first call on an element width compiles, where no cache of that is there yet.
pytestmark = pytest.mark.timeout(180)

Bits = NDArray[Any]
DTYPES = [np.dtype(f"<u{width}") for width in (1, 2, 4, 8)]
MAKES = [NUMBA, NUMPY]
GUARD = 1000  # elements on either side of what is written in place, which must stay as they are

# Patterns that float arithmetic would lose, as bfloat16: ±0, ±Inf, quiet and signalling NaNs with payloads, denormals.
AWKWARD = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x0001, 0x8001, 0x007F], np.uint16)


@pytest.fixture(params=MAKES, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == NUMBA:
        pytest.importorskip("numba")
    return load(request.param)


def restore(encoded: Encoded | None, old: Bits, kernels: Kernels | None = None) -> Bits:
    """What a receiver that holds `old` ends up with."""
    new = old.copy()
    if encoded is None:
        return new
    frozen = old.copy()
    frozen.flags.writeable = False
    taken = Decoder(kernels).take(encoded.data, frozen, len(old), old.dtype)
    if taken.positions is None:
        new[:] = taken.values
    else:
        scatter(new, taken.positions, taken.values, kernels=kernels)
    return new


def mode_of(encoded: Encoded | None) -> int:
    assert encoded is not None
    return encoded.data[0]


def random_pair(rng: np.random.Generator, dtype: np.dtype[Any], length: int, density: float, step_max: int) -> Any:
    old = rng.integers(0, 2 ** (8 * dtype.itemsize), length, dtype=dtype)
    new = old.copy()
    changed = rng.random(length) < density
    steps = rng.integers(0, step_max, length, dtype=dtype, endpoint=True)
    new[changed] += np.where(rng.random(length) < 0.5, steps, 0 - steps).astype(dtype)[changed]
    return old, new


@st.composite
def histories(draw: st.DrawFn, version_count: int = 1) -> list[Bits]:
    """A block's bits at some versions, one after another: any width, any density, small and wild steps."""
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.sampled_from([1, 2, 63, 64, 65, 300, 5000, 20_000]))
    states = [rng.integers(0, 2 ** (8 * dtype.itemsize), length, dtype=dtype)]
    for _ in range(version_count):
        new = states[-1].copy()
        changed = rng.random(length) < draw(st.sampled_from([0.0, 0.0003, 0.001, 0.02, 0.3, 0.6, 1.0]))
        step_max = draw(st.sampled_from([1, 3, 14, 200, 2 ** (8 * dtype.itemsize) - 1]))
        steps = rng.integers(0, step_max, length, dtype=dtype, endpoint=True)
        new[changed] += np.where(rng.random(length) < 0.5, steps, 0 - steps).astype(dtype)[changed]
        states.append(new)
    return states


# ---------------------------------------------------------------- exact


@settings(deadline=None)
@given(states=histories())
def test_a_delta_restores_every_bit(kernels: Kernels, states: list[Bits]) -> None:
    old, new = states

    encoded = Encoder(kernels).delta(old, new)

    assert (encoded is None) == np.array_equal(old, new)
    np.testing.assert_array_equal(restore(encoded, old, kernels), new)


@settings(deadline=None)
@given(states=histories())
def test_an_encoding_tells_its_positions_and_values(kernels: Kernels, states: list[Bits]) -> None:
    old, new = states

    encoded = Encoder(kernels).delta(old, new)

    if encoded is not None:
        assert encoded.changed_count == np.count_nonzero(old != new)
        where: Any = ... if encoded.indices is None else encoded.indices
        np.testing.assert_array_equal(encoded.values, new[where])
        np.testing.assert_array_equal(encoded.olds, old[where])


@settings(deadline=None)
@given(states=histories())
def test_what_made_a_block_cannot_be_told_from_its_bytes(states: list[Bits]) -> None:
    pytest.importorskip("numba")
    old, new = states

    compiled, plain = (Encoder(load(make)).delta(old, new) for make in MAKES)

    assert (compiled is None) == (plain is None)
    assert compiled is None or plain is None or compiled.data == plain.data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_does_not_depend_on_those_encoded_before(kernels: Kernels, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(11)
    used = Encoder(kernels)
    for density in (0.2, 0.02, 0.003, 0.0001, 0.05):
        old, new = random_pair(rng, dtype, 20_000, density, 100)

        after, alone = used.delta(old, new), Encoder(kernels).delta(old, new)

        assert after is not None and alone is not None and after.data == alone.data


@settings(deadline=None)
@given(states=histories(), start=st.sampled_from([0, 3, 8190, 2**33]), has_room=st.booleans())
def test_a_block_is_taken_with_its_place_in_the_tensor_and_what_it_moves_the_sum_by(
    kernels: Kernels, states: list[Bits], start: int, has_room: bool
) -> None:
    # Given
    old, new = states
    encoded = Encoder(kernels).delta(old, new)
    if encoded is None:
        return
    out = (np.full(len(old) + 3, -1), np.zeros(len(old) + 3, old.dtype)) if has_room else None

    # When
    taken = Decoder(kernels).take(encoded.data, old, len(old), old.dtype, key=77, start=start, out=out)

    # Then
    sums = [sum_range(77, start, bits, kernels=kernels) for bits in (old, new)]
    assert (sums[0] + taken.change) % 2**64 == sums[1]
    where = np.arange(len(old)) if taken.positions is None else taken.positions - start
    np.testing.assert_array_equal(where, np.arange(len(old)) if encoded.indices is None else encoded.indices)
    np.testing.assert_array_equal(taken.values, new[where])
    if out is not None and taken.positions is not None:
        assert np.shares_memory(taken.positions, out[0]) and np.shares_memory(taken.values, out[1])
        assert out[0][len(where)] == -1


@settings(deadline=None)
@given(states=histories(), start=st.sampled_from([0, 3, 8190, 2**33]))
def test_a_block_is_put_in_place_and_moves_the_sum(kernels: Kernels, states: list[Bits], start: int) -> None:
    # Given
    old, new = states
    encoded = Encoder(kernels).delta(old, new)
    if encoded is None:
        return
    bits = old.copy()

    # When
    moved = Decoder(kernels).put(encoded.data, bits, key=77, start=start)

    # Then
    np.testing.assert_array_equal(bits, new)
    sums = [sum_range(77, start, each, kernels=kernels) for each in (old, new)]
    assert (sums[0] + moved) % 2**64 == sums[1]


def test_a_block_with_more_changes_than_promised_is_refused(kernels: Kernels) -> None:
    old, new = np.zeros((2, 1000), np.uint16)
    new[:300:3] = 1
    encoded = Encoder(kernels).delta(old, new)
    assert encoded is not None

    with pytest.raises(WireError, match="100 changes, where 99 were promised"):
        Decoder(kernels).take(encoded.data, old, 1000, old.dtype, out=(np.empty(99, np.int64), np.empty(99, np.uint16)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("density", "step_max", "mode"), [(0.0005, 1, SPARSE), (0.05, 40, SPARSE), (0.7, 2, STEPS), (1.0, 2**62, VALUES)]
)
def test_every_mode_is_exact_at_every_width(
    kernels: Kernels, dtype: np.dtype[Any], density: float, step_max: int, mode: int
) -> None:
    limit = 2 ** (8 * dtype.itemsize) - 1
    old, new = random_pair(np.random.default_rng(1), dtype, 70_000, density, min(step_max, limit))
    if mode == VALUES:
        new &= dtype.type(0xF)  # cheaper than the steps that lead there

    encoded = Encoder(kernels).delta(old, new)

    assert mode_of(encoded) == mode
    np.testing.assert_array_equal(restore(encoded, old, kernels), new)


@settings(deadline=None)
@given(states=histories())
def test_a_dense_block_needs_no_base(kernels: Kernels, states: list[Bits]) -> None:
    new = states[-1]
    encoded = Encoder(kernels).dense(new)

    taken = Decoder(kernels).take(encoded.data, None, len(new), new.dtype, key=5, start=9)

    assert taken.positions is None
    np.testing.assert_array_equal(taken.values, new)
    assert taken.change == sum_range(5, 9, new, kernels=kernels)


def test_steps_without_a_base_are_refused(kernels: Kernels) -> None:
    old, new = np.zeros(100, np.uint16), np.eye(1, 100, 3, dtype=np.uint16).reshape(-1)
    encoded = Encoder(kernels).delta(old, new)
    assert encoded is not None

    with pytest.raises(WireError, match="needs a base"):
        Decoder(kernels).take(encoded.data, None, 100, old.dtype)


def test_floats_that_arithmetic_would_lose_are_kept(kernels: Kernels) -> None:
    # Given every awkward pattern beside every other
    old, new = (grid.reshape(-1).copy() for grid in np.meshgrid(AWKWARD, AWKWARD))

    # When, Then
    np.testing.assert_array_equal(restore(Encoder(kernels).delta(old, new), old, kernels), new)


@pytest.mark.parametrize(
    "positions",
    [
        [0, 254, 255, 509, 510, 766, 70_000, 299_999],
        [0, 299_999],
        [299_999],
        [*range(0, 300_000, 40_000)],
        [*range(1000), 299_990],
    ],
)
def test_gaps_of_any_length_are_kept(kernels: Kernels, positions: list[int]) -> None:
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[positions] = 1

    np.testing.assert_array_equal(restore(Encoder(kernels).delta(old, new), old, kernels), new)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_values_are_written_where_they_belong_by_any_number_of_threads(kernels: Kernels, thread_count: int) -> None:
    rng = np.random.default_rng(0)
    positions = np.flatnonzero(rng.random(400_000) < 0.7)
    values = rng.integers(0, 2**16, len(positions), dtype=np.uint16)
    bits, expected = np.zeros((2, 400_000), np.uint16)
    expected[positions] = values
    address = bits.ctypes.data

    scatter(bits, positions, values, thread_count=thread_count, kernels=kernels)

    np.testing.assert_array_equal(bits, expected)
    assert bits.ctypes.data == address


# ---------------------------------------------------------------- folding


@settings(deadline=None)
@given(states=histories(version_count=4), keyframe=st.sampled_from([None, 0, 2]))
def test_a_fold_does_what_its_blocks_do_one_after_another(
    kernels: Kernels, states: list[Bits], keyframe: int | None
) -> None:
    # Given the blocks between some versions, one of them perhaps without a base
    encoder, decoder, old = Encoder(kernels), Decoder(kernels), states[0]
    length, dtype = len(old), old.dtype
    blocks = [encoder.delta(*states[k : k + 2]) for k in range(4)]
    if keyframe is not None:
        blocks[keyframe] = encoder.dense(states[keyframe + 1])
    decoded = [decoder.decode(each.data, element_count=length, dtype=dtype) for each in blocks if each is not None]

    # When
    folded = encoder.fold(decoded, length, dtype)

    # Then
    np.testing.assert_array_equal(restore(folded, old, kernels), states[-1])
    if not any(each.is_absolute for each in decoded):
        assert (folded is None) == np.array_equal(old, states[-1])
        assert folded is None or folded.changed_count == np.count_nonzero(old != states[-1])
    else:
        assert mode_of(folded) == VALUES


def test_steps_that_cancel_out_leave_no_trace(kernels: Kernels) -> None:
    encoder, decoder = Encoder(kernels), Decoder(kernels)
    old, new = random_pair(np.random.default_rng(3), np.dtype("<u2"), 9000, 0.02, 5)
    there, back = encoder.delta(old, new), encoder.delta(new, old)
    assert there is not None and back is not None

    decoded = [decoder.decode(each.data, element_count=9000, dtype=old.dtype) for each in (there, back)]

    assert encoder.fold(decoded, 9000, old.dtype) is None


@settings(deadline=None)
@given(states=histories(version_count=3))
def test_a_fold_is_the_delta_from_end_to_end(states: list[Bits]) -> None:
    # Steps of a fold and of a delta are the same numbers, so unless values are cheaper the bytes are the same, too
    encoder, decoder = Encoder(load(NUMPY)), Decoder(load(NUMPY))
    blocks = [block for k in range(3) if (block := encoder.delta(*states[k : k + 2])) is not None]
    if any(mode_of(block) == VALUES for block in blocks):
        return
    length, dtype = len(states[0]), states[0].dtype
    folded = encoder.fold([decoder.decode(b.data, element_count=length, dtype=dtype) for b in blocks], length, dtype)
    direct = encoder.delta(states[0], states[-1])

    assert (folded is None) == (direct is None)
    if folded is not None and direct is not None and mode_of(direct) != VALUES:
        assert folded.data == direct.data


# ---------------------------------------------------------------- hostile bytes


@settings(deadline=None)
@given(states=histories(), data=st.data())
def test_a_block_that_is_cut_off_is_refused(kernels: Kernels, states: list[Bits], data: st.DataObject) -> None:
    old, new = states
    encoded = Encoder(kernels).delta(old, new)
    if encoded is not None:
        end = data.draw(st.integers(0, len(encoded.data) - 1))

        with pytest.raises(WireError):
            Decoder(kernels).decode(encoded.data[:end], element_count=len(old), dtype=old.dtype)


def outcome(make: str, data: bytes, old: Bits) -> Any:
    """What a decoder of that make does with the bytes: an error, or positions, values and the change."""
    try:
        taken = Decoder(load(make)).take(data, old, len(old), old.dtype, key=3, start=70)
        return (
            taken.positions if taken.positions is None else taken.positions.tolist(),
            taken.values.tolist(),
            taken.change,
        )
    except WireError:
        return "refused"


@settings(max_examples=3 * settings.default.max_examples)
@given(states=histories(), data=st.data())
def test_both_makes_take_and_refuse_the_same_bytes(states: list[Bits], data: st.DataObject) -> None:
    pytest.importorskip("numba")
    # Given a valid block whose streams, uncompressed, are damaged here and there
    old, new = states[0][:300], states[1][:300]
    encoded = Encoder(load(NUMPY)).delta(old, new)
    if encoded is None:
        return
    body = bytearray(stored_raw(encoded.data))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))

    # When, Then
    assert outcome(NUMBA, bytes(body), old) == outcome(NUMPY, bytes(body), old)
    assert put(NUMBA, bytes(body), old) == put(NUMPY, bytes(body), old)


def put(make: str, data: bytes, old: Bits) -> Any:
    """What is in place afterwards, and by how much the sum moved; taken or refused, nothing around it is written."""
    around = np.full(len(old) + 2 * GUARD, 7, old.dtype)
    bits = around[GUARD : GUARD + len(old)]
    bits[:] = old
    try:
        return Decoder(load(make)).put(data, bits, key=3, start=70), bits.tolist()
    except WireError:
        return "refused"
    finally:
        assert (around[:GUARD] == 7).all() and (around[GUARD + len(old) :] == 7).all()


@pytest.mark.parametrize("place", [0, 63, 64, 200, 499])
@pytest.mark.parametrize("make", MAKES)
def test_a_position_outside_of_the_block_is_refused_and_nothing_is_written_there(make: str, place: int) -> None:
    # Given a block of 500 changes up to its end, one of whose gaps was made longer: the changes after it lie further on
    pytest.importorskip("numba")
    old, new = np.zeros((2, 2000), np.uint16)
    new[3::4] = 1
    encoded = Encoder(load(NUMPY)).delta(old, new)
    assert encoded is not None and mode_of(encoded) == SPARSE
    body = bytearray(stored_raw(encoded.data))
    body[codec.HEADER.size + 5 * codec.STREAM.size + place] = 254

    # When, Then
    assert outcome(make, bytes(body), old) == put(make, bytes(body), old) == "refused"


@pytest.mark.parametrize("make", MAKES)
def test_an_escape_without_its_rest_is_refused(make: str) -> None:
    # Given a gap that says there is more of it, where there is none; its position is inside all the same
    pytest.importorskip("numba")
    old, new = np.zeros((2, 100_000), np.uint16)
    new[:300:3] = 1
    encoded = Encoder(load(NUMPY)).delta(old, new)
    assert encoded is not None
    body = bytearray(stored_raw(encoded.data))
    body[codec.HEADER.size + 5 * codec.STREAM.size + 50] = 255

    # When, Then
    assert outcome(make, bytes(body), old) == put(make, bytes(body), old) == "refused"


def stored_raw(data: bytes) -> bytes:
    """The same block with every stream as it is before compression, so that damage reaches the kernels."""
    mode, width, shift, count, changed = codec.HEADER.unpack_from(data)
    streams = [bytes(stream) for stream in Decoder(load(NUMPY))._streams(memoryview(data), count, 1 << 20)]
    table = b"".join(codec.STREAM.pack(len(stream), len(stream)) for stream in streams)
    return b"".join((codec.HEADER.pack(mode, width, shift, count, changed), table, *streams))


@given(states=histories(), data=st.binary(max_size=200))
@settings(deadline=None)
def test_foreign_bytes_are_refused_or_fit_the_block(kernels: Kernels, states: list[Bits], data: bytes) -> None:
    old = states[0]
    try:
        decoded = Decoder(kernels).decode(data, element_count=len(old), dtype=old.dtype)
    except WireError:
        return
    assert decoded.indices is None or not len(decoded.indices) or decoded.indices[-1] < len(old)


# ---------------------------------------------------------------- small


@pytest.mark.parametrize(("density", "bytes_max"), [(0.0034, 1.5), (0.0096, 1.3), (0.0245, 1.13)])
def test_a_training_step_costs_little_more_than_its_entropy(density: float, bytes_max: float) -> None:
    # Given bfloat16 weights of which a few move, nine of ten by one unit in the last place
    rng = np.random.default_rng(0)
    old = (rng.standard_normal(1 << 21, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    changed = np.flatnonzero(rng.random(len(old)) < density)
    steps = rng.choice(np.array([1, 2, 3, 9, 40], np.uint16), p=[0.9, 0.04, 0.02, 0.03, 0.01], size=len(changed))
    new[changed] += np.where(rng.random(len(changed)) < 0.5, steps, 0 - steps).astype(np.uint16)

    # When
    encoded = Encoder().delta(old, new)

    # Then: positions and values as int32 and bfloat16 would take 6 bytes
    assert encoded is not None
    assert len(encoded.data) / len(changed) < bytes_max


def test_changes_that_stand_together_cost_less_than_scattered_ones() -> None:
    # Given twenty rows of an embedding changed whole: a middle gap of 0, whatever the mean is
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, (2000, 1000), dtype=np.uint16)
    new = old.copy()
    new[rng.choice(2000, 20, replace=False)] += np.uint16(1)

    encoded = Encoder().delta(old.reshape(-1), new.reshape(-1))

    assert encoded is not None
    assert len(encoded.data) / 20_000 < 0.05
