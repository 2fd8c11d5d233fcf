"""Steps of the compiled loops that numba cannot express: a few wide operations, as LLVM code for any processor.

- With plain numba in place of prefetch, blocks take 2.0 to 2.4 times as long to apply; in place of join_group and
  join_lanes, 1.1 to 1.5 times; in place of difference_bits, split_group and split_lanes, 1.1 to 1.4 times as long to
  encode (decisions/0054). What plain numba does as fast is plain.
- Each reads or writes a fixed number of elements from a place on; the caller has checked that they are there.
- Bit k of a word, and byte k of a load, is element k: little-endian machines, as the format is.
- numba keeps compiled loops on disk by the file that they are in: when you change this file, touch its users too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .protocol import GAP_ESCAPE, STEP_ESCAPE

LANES = 64  # elements compared, or steps joined, at a time
WORD = 8  # bytes read or written at once
LINE = 64  # bytes that memory moves at once
GROUP = 8  # gaps joined at a time: as many 64-bit positions are one wide register
I8, I32, I64 = (ir.IntType(width) for width in (8, 32, 64))
U0, U1, U2, U4, U8, U56 = (np.uint64(n) for n in (0, 1, 2, 4, 8, 56))
PAIRS, FOURS = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)  # lower halves of groups of 2, of 4
EIGHTS, BYTES = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)  # of 8; of every byte its lowest bit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function at its first call; keep it on disk if there is a place. It runs without Python's lock."""
    try:
        return cast(F, njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no directory to keep it in: compiled again in every process
        return cast(F, njit(nogil=True)(function))


def _generated(function: Callable[..., Any]) -> Any:
    return intrinsic(function)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, place: Any, to: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [place]), to.as_pointer())


def _load(context: Any, builder: Any, kind: Any, array: Any, place: Any, to: Any) -> Any:
    return builder.load(_pointer(context, builder, kind, array, place, to), align=kind.dtype.bitwidth // 8)


def _constants(kind: Any, numbers: Any) -> Any:
    return ir.Constant(kind, [int(number) for number in numbers])


def _splat(builder: Any, kind: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, _constants(ir.VectorType(I32, kind.count), [0] * kind.count))


@compiled
def count_ones(word: Any) -> Any:
    """Count the bits that are 1: in a form that LLVM knows, and makes one operation of."""
    word -= (word >> U1) & PAIRS
    word = (word & FOURS) + ((word >> U2) & FOURS)
    return (((word + (word >> U4)) & EIGHTS) * BYTES) >> U56


@compiled
def lowest_one(word: Any) -> Any:
    """Return the number of the lowest bit that is 1; 64 for none."""
    return count_ones((word & (U0 - word)) - U1)


@compiled
def word_at(array: Any, place: Any) -> Any:
    """Read WORD bytes of a byte array as one word."""
    word, first = U0, np.uint64(place)
    for k in range(np.uint64(WORD)):
        word |= np.uint64(array[first + k]) << (U8 * k)
    return word


@_generated
def difference_bits(context: Any, left: Any, right: Any, start: Any) -> Any:
    """Compare LANES elements. Bit k: whether left[start + k] != right[start + k]."""
    vector = ir.VectorType(ir.IntType(left.dtype.bitwidth), LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = [
            _load(context, builder, kind, array, arguments[2], vector)
            for kind, array in zip(signature.args[:2], arguments[:2], strict=True)
        ]
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), I64)

    return types.uint64(left, right, start), generate


@_generated
def prefetch(context: Any, array: Any, index: Any) -> Any:
    """Ask for array[index], to be read soon; harmless wherever it points."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer(context, builder, signature.args[0], arguments[0], arguments[1], I8)
        kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(function, [place, I32(0), I32(3), I32(1)])  # read, keep near, data
        return context.get_dummy_value()

    return types.void(array, index), generate


@_generated
def join_group(context: Any, symbols: Any, index: Any, lows: Any, shift: Any, before: Any, positions: Any) -> Any:
    """Join GROUP gaps without escapes, from symbols[index] and a word of low bits, to positions behind `before`.

    Write them to positions[index : index + GROUP]; return the last of them.
    """
    wide, number = ir.VectorType(I64, GROUP), ir.VectorType(I32, GROUP)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        symbols, index, lows, shift, before, positions = arguments
        highs = _load(context, builder, signature.args[0], symbols, index, ir.VectorType(I8, GROUP))
        shifts = _splat(builder, wide, shift)
        mask = builder.sub(builder.shl(I64(1), shift), I64(1))
        low = builder.lshr(_splat(builder, wide, lows), builder.mul(shifts, _constants(wide, range(GROUP))))
        low = builder.and_(low, _splat(builder, wide, mask))
        total = builder.or_(builder.shl(builder.zext(highs, wide), shifts), low)
        total = builder.add(total, _constants(wide, [1] * GROUP))
        zeros = _constants(wide, [0] * GROUP)
        for step in (1, 2, 4):  # every lane and all before it
            lanes = [k - step if k >= step else GROUP for k in range(GROUP)]
            total = builder.add(total, builder.shuffle_vector(total, zeros, _constants(number, lanes)))
        found = builder.add(total, _splat(builder, wide, before))
        builder.store(found, _pointer(context, builder, signature.args[5], positions, index, wide), align=8)
        return builder.add(before, builder.extract_element(total, I32(GROUP - 1)))  # the next group waits for little

    return types.int64(symbols, types.int64, types.uint64, types.int64, types.int64, positions), generate


@_generated
def join_lanes(context: Any, packed: Any, index: Any, bias: Any, steps: Any, place: Any) -> Any:
    """Join LANES steps from packed[index], low four bits first, to steps[place]. Bit k: number k has escaped."""
    half, whole = ir.VectorType(I8, LANES // 2), ir.VectorType(I8, LANES)
    target = ir.VectorType(ir.IntType(steps.dtype.bitwidth), LANES)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        packed, index, bias, steps, place = arguments
        pairs = _load(context, builder, signature.args[0], packed, index, half)
        low = builder.and_(pairs, _constants(half, [STEP_ESCAPE] * half.count))
        high = builder.lshr(pairs, _constants(half, [4] * half.count))
        lanes = [k // 2 + (k % 2) * half.count for k in range(LANES)]
        small = builder.shuffle_vector(low, high, _constants(ir.VectorType(I32, LANES), lanes))
        escapes = builder.icmp_unsigned("==", small, _constants(whole, [STEP_ESCAPE] * LANES))
        small = builder.add(small, _splat(builder, whole, builder.trunc(bias, I8)))
        sign = builder.sub(_constants(whole, [0] * LANES), builder.and_(small, _constants(whole, [1] * LANES)))
        step = builder.xor(builder.lshr(small, _constants(whole, [1] * LANES)), sign)
        if signature.args[3].dtype.bitwidth > 8:
            step = builder.sext(step, target)
        builder.store(step, _pointer(context, builder, signature.args[3], steps, place, target), align=1)
        return builder.bitcast(escapes, I64)

    return types.uint64(packed, types.int64, types.int64, steps, types.int64), generate


@_generated
def split_group(context: Any, indices: Any, index: Any, shift: Any, symbols: Any, lows: Any, place: Any) -> Any:
    """Split GROUP gaps from indices[index - 1] on: symbols to symbols[index], a WORD of low bits to lows[place].

    Bit k: gap k has escaped.
    """
    gap_kind, wide = ir.VectorType(I32, GROUP), ir.VectorType(I64, GROUP)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        indices, index, shift, symbols, lows, place = arguments
        after = _load(context, builder, signature.args[0], indices, index, gap_kind)
        before = _load(context, builder, signature.args[0], indices, builder.sub(index, I64(1)), gap_kind)
        gaps = builder.sub(builder.sub(after, before), _constants(gap_kind, [1] * GROUP))
        limits = _constants(gap_kind, [GAP_ESCAPE] * GROUP)
        highs = builder.lshr(gaps, _splat(builder, gap_kind, builder.trunc(shift, I32)))
        escapes = builder.icmp_unsigned(">=", highs, limits)
        kept = builder.trunc(builder.select(escapes, limits, highs), ir.VectorType(I8, GROUP))
        builder.store(kept, _pointer(context, builder, signature.args[3], symbols, index, kept.type), align=1)
        mask = builder.sub(builder.shl(I64(1), shift), I64(1))
        word = builder.and_(builder.zext(gaps, wide), _splat(builder, wide, mask))
        word = builder.shl(word, builder.mul(_splat(builder, wide, shift), _constants(wide, range(GROUP))))
        for step in (4, 2, 1):
            lanes = _constants(gap_kind, [(k + step) % GROUP for k in range(GROUP)])
            word = builder.or_(word, builder.shuffle_vector(word, word, lanes))
        first = builder.extract_element(word, I32(0))
        builder.store(first, _pointer(context, builder, signature.args[4], lows, place, I64), align=1)
        return builder.zext(builder.bitcast(escapes, I8), I64)

    return types.uint64(indices, types.int64, types.int64, symbols, lows, types.int64), generate


@_generated
def split_lanes(context: Any, olds: Any, values: Any, index: Any, bias: Any, packed: Any, place: Any) -> Any:
    """Split LANES steps from olds[index] to values[index], four bits each, to packed[place]. Bit k: k has escaped."""
    width = olds.dtype.bitwidth
    number, half = ir.VectorType(ir.IntType(width), LANES), ir.VectorType(I8, LANES // 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        olds, values, index, bias, packed, place = arguments
        old = _load(context, builder, signature.args[0], olds, index, number)
        step = builder.sub(_load(context, builder, signature.args[1], values, index, number), old)
        sign = builder.ashr(step, _constants(number, [width - 1] * LANES))
        zigzag = builder.xor(builder.shl(step, _constants(number, [1] * LANES)), sign)
        narrow = bias if width == 64 else builder.trunc(bias, ir.IntType(width))
        zigzag = builder.sub(zigzag, _splat(builder, number, narrow))
        limits = _constants(number, [STEP_ESCAPE] * LANES)
        escapes = builder.icmp_unsigned(">=", zigzag, limits)
        small = builder.select(escapes, limits, zigzag)
        if width > 8:
            small = builder.trunc(small, ir.VectorType(I8, LANES))
        evens, odds = (_constants(ir.VectorType(I32, half.count), range(first, LANES, 2)) for first in (0, 1))
        low, high = builder.shuffle_vector(small, small, evens), builder.shuffle_vector(small, small, odds)
        pairs = builder.or_(low, builder.shl(high, _constants(half, [4] * half.count)))
        builder.store(pairs, _pointer(context, builder, signature.args[4], packed, place, half), align=1)
        return builder.bitcast(escapes, I64)

    return types.uint64(olds, values, types.int64, types.int64, packed, types.int64), generate
