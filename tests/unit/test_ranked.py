"""Ranked blocks: exact on the weights that they were made for, refused or found out on anything else, and smaller."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollfab.fabric.errors import WireError
from rollfab.fabric.weights import codec
from rollfab.fabric.weights.codec import SPARSE, STREAM, Encoder
from rollfab.fabric.weights.decoder import Decoder
from rollfab.fabric.weights.digest import sum_range
from rollfab.fabric.weights.kernels import NUMBA, NUMPY, Kernels, load
from rollfab.fabric.weights.ranked import HEADER, PART, PART_COUNT_MAX, RANKED, encode_ranked

# The first call on an element width compiles, where no cache of that is there yet.
pytestmark = pytest.mark.timeout(180)

Bits = NDArray[Any]
MAKES = [NUMBA, NUMPY]
DTYPES = [np.dtype(f"<u{width}") for width in (1, 2, 4, 8)]

# ±0, ±Inf, quiet and signalling NaNs with payloads, denormals, as bfloat16 or the high half of a wider float.
AWKWARD = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7FFF, 0x0001, 0x8001, 0x007F]


@pytest.fixture(params=MAKES, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == NUMBA:
        pytest.importorskip("numba")
    return load(request.param)


def encoded(olds: Bits, news: Bits, kernels: Kernels | None = None) -> bytes:
    return encode_ranked(olds, news, Encoder(kernels)._part)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Weights of any width before and after: of few magnitudes or of all, the small ones changed more than others."""
    dtype = draw(st.sampled_from(DTYPES))
    width = 8 * dtype.itemsize
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.sampled_from([1, 2, 65, 300, 5000, 20_000]))
    olds = rng.integers(0, 2**width, length, dtype=dtype)
    if draw(st.booleans()):
        olds &= dtype.type(2 ** (width - 2) - 1)
        olds[rng.random(length) < 0.1] = 0
    if dtype.itemsize > 1 and draw(st.booleans()):
        olds[:] = rng.choice(np.array(AWKWARD, dtype), length) << dtype.type(width - 16)
    news = olds.copy()
    small, great = draw(st.sampled_from([(0.0, 0.0), (0.001, 0.001), (0.9, 0.1), (0.5, 0.0), (1.0, 1.0)]))
    is_small = olds << dtype.type(1) < np.median(olds << dtype.type(1))
    is_changed = rng.random(length) < np.where(is_small, small, great)
    steps = rng.integers(0, draw(st.sampled_from([1, 14, 200, 2**width - 1])), length, dtype=dtype, endpoint=True)
    news[is_changed] += np.where(rng.random(length) < 0.5, steps, 0 - steps).astype(dtype)[is_changed]
    return olds, news


@settings(deadline=None)
@given(pair=pairs(), start=st.sampled_from([0, 3, 2**33]), has_room=st.booleans())
def test_a_ranked_block_restores_every_bit_and_moves_the_sum(
    kernels: Kernels, pair: tuple[Bits, Bits], start: int, has_room: bool
) -> None:
    # Given
    olds, news = pair
    length = len(olds)
    data = encoded(olds, news, kernels)
    out = (np.full(length, -1), np.zeros(length, olds.dtype)) if has_room else None
    olds.flags.writeable = False

    # When
    taken = Decoder(kernels).take(data, olds, length, olds.dtype, key=77, start=start, out=out)

    # Then
    found = olds.copy()
    if taken.positions is None:
        found[:] = taken.values
    else:
        assert np.array_equal(taken.positions - start, np.flatnonzero(news != olds))
        found[taken.positions - start] = taken.values
    np.testing.assert_array_equal(found, news)
    sums = [sum_range(77, start, bits, kernels=kernels) for bits in (olds, news)]
    assert (sums[0] + taken.change) % 2**64 == sums[1]
    assert not taken.is_absolute
    found = olds.copy()
    assert Decoder(kernels).put(data, found, key=77, start=start) == taken.change
    np.testing.assert_array_equal(found, news)


@settings(deadline=None)
@given(pair=pairs())
def test_what_made_a_ranked_block_cannot_be_told_from_its_bytes(pair: tuple[Bits, Bits]) -> None:
    pytest.importorskip("numba")

    assert encoded(*pair, load(NUMBA)) == encoded(*pair, load(NUMPY))


@settings(deadline=None)
@given(pair=pairs())
def test_a_fold_by_the_goals_weights_leads_there_and_is_never_larger(kernels: Kernels, pair: tuple[Bits, Bits]) -> None:
    olds, news = pair
    encoder, decoder, dtype = Encoder(kernels), Decoder(kernels), olds.dtype
    block = encoder.delta(olds, news)
    if block is None:
        return
    decoded = [decoder.decode(block.data, element_count=len(olds), dtype=dtype)]

    plain, folded = encoder.fold(decoded, len(olds), dtype), encoder.fold(decoded, len(olds), dtype, news)

    assert plain is not None and folded is not None
    assert len(folded.data) <= len(plain.data)
    assert folded.changed_count == plain.changed_count
    _, _, values = decoder.resolve(folded.data, olds, len(olds), dtype)
    np.testing.assert_array_equal(values, news if len(values) == len(news) else news[news != olds])


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_part_is_of_whole_magnitudes_and_there_are_not_too_many(width: int) -> None:
    rng = np.random.default_rng(0)
    olds = rng.integers(0, 2 ** (8 * width), 200_000, dtype=np.dtype(f"<u{width}"))

    data = encoded(olds, olds + olds.dtype.type(1))

    part_count = data[1]
    counts = [count for count, _ in PART.iter_unpack(data[HEADER.size : HEADER.size + part_count * PART.size])]
    assert 30 < part_count <= PART_COUNT_MAX
    ranks = np.sort((olds << olds.dtype.type(1)) >> olds.dtype.type(8 * width - 8))
    borders = np.cumsum(counts)[:-1]
    assert (ranks[borders] > ranks[borders - 1]).all()


def test_changes_that_small_weights_have_more_of_cost_a_fifth_less() -> None:
    # Given bfloat16 weights of which each moved by what 40 versions at learning rate 1e-6 move it
    rng = np.random.default_rng(0)
    masters = rng.standard_normal(1 << 19, dtype=np.float32) * np.float32(0.02)
    later = masters + rng.standard_normal(1 << 19, dtype=np.float32) * np.float32(6e-6)
    olds, news = ((weights.view(np.uint32) >> 16).astype(np.uint16) for weights in (masters, later))
    plain = Encoder().delta(olds, news)
    assert plain is not None

    # When, Then
    assert len(encoded(olds, news)) < 0.8 * len(plain.data)


# ---------------------------------------------------------------- what is refused


def some_block() -> tuple[bytes, Bits]:
    rng = np.random.default_rng(1)
    olds = rng.integers(0, 1 << 16, 20_000, dtype=np.uint16)
    news = olds + (rng.random(20_000) < 0.3).astype(np.uint16)
    return encoded(olds, news), olds


def test_a_ranked_block_is_read_only_on_the_weights_before_it(kernels: Kernels) -> None:
    data, olds = some_block()
    decoder = Decoder(kernels)

    with pytest.raises(WireError, match="read only on the weights before it"):
        decoder.decode(data, element_count=len(olds), dtype=olds.dtype)
    with pytest.raises(WireError, match="needs a base"):
        decoder.take(data, None, len(olds), olds.dtype)
    with pytest.raises(WireError, match="do not fit"):
        decoder.take(data, olds[1:], len(olds) - 1, olds.dtype)


def test_a_ranked_block_with_more_changes_than_promised_is_refused(kernels: Kernels) -> None:
    olds = np.arange(10_000, dtype=np.uint16)
    news = olds + (olds < 2000).astype(np.uint16)
    out = (np.empty(1999, np.int64), np.empty(1999, np.uint16))

    with pytest.raises(WireError, match="2000 changes, where 1999 were promised"):
        Decoder(kernels).take(encoded(olds, news), olds, 10_000, olds.dtype, out=out)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_ranked_block_that_is_cut_off_is_refused(kernels: Kernels, data: st.DataObject) -> None:
    block, olds = some_block()

    with pytest.raises(WireError):
        Decoder(kernels).take(block[: data.draw(st.integers(0, len(block) - 1))], olds, len(olds), olds.dtype)


def outcome(make: str, data: bytes, olds: Bits) -> Any:
    """What a decoder of that make does with the bytes: an error, or positions, values and the change."""
    try:
        taken = Decoder(load(make)).take(data, olds, len(olds), olds.dtype, key=3, start=70)
        return taken.positions is None or taken.positions.tolist(), taken.values.tolist(), taken.change
    except WireError:
        return "refused"


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_both_makes_take_and_refuse_the_same_ranked_bytes(data: st.DataObject) -> None:
    pytest.importorskip("numba")
    # Given a valid block that is damaged here and there, mostly in its tables
    block, olds = some_block()
    body = bytearray(block)
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.sampled_from([HEADER.size + 2 * PART.size, 400, len(body)]))
        body[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))

    # When, Then
    assert outcome(NUMBA, bytes(body), olds) == outcome(NUMPY, bytes(body), olds)


@settings(deadline=None)
@given(tail=st.binary(max_size=200), length=st.sampled_from([1, 9, 300]))
def test_foreign_ranked_bytes_are_refused_or_fit_the_block(kernels: Kernels, tail: bytes, length: int) -> None:
    olds = np.arange(length, dtype=np.uint32)
    try:
        taken = Decoder(kernels).take(bytes([RANKED]) + tail, olds, length, olds.dtype)
    except WireError:
        return
    assert len(taken.values) <= length


def table(*parts: tuple[int, bytes]) -> bytes:
    rows = [PART.pack(count, len(block)) for count, block in parts]
    return b"".join((HEADER.pack(RANKED, len(parts)), *rows, *(block for _, block in parts)))


@pytest.mark.parametrize(
    "data",
    [
        table(),
        table((2**32 - 1, b"")),
        table((2**32 - 1, bytes([SPARSE]) * 8), (301, b"")),
        table((300, table((300, b"")))),
        table((0, codec.HEADER.pack(SPARSE, 2, 0, 5, 0) + STREAM.pack(0, 0) * 5), (300, b"")),
        table((300, b"")) + b"x",
        table(*[(0, b"")] * PART_COUNT_MAX, (300, b"")),
    ],
    ids=["no parts", "too many elements", "far too many", "ranked in ranked", "of nothing", "more bytes", "many parts"],
)
def test_tables_that_cannot_be_are_refused_at_once(data: bytes) -> None:
    olds = np.zeros(300, np.uint16)
    decoder = Decoder(load(NUMPY))
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decoder.take(data, olds, 300, olds.dtype)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
