"""Side arrays: what is known of tokens beside their ids, where somebody asked for it.

    name                dtype, shape of its rows   of
    top_ids             int32 (k,)                 tokens made: the likeliest tokens there, likeliest first; -1: fewer
    top_logprobs        float32 (k,)               their log-probabilities, as `logprobs`; -inf where top_ids is -1
    kept_ids            int32 ()                   tokens made: what top_p and the like left, ragged; none: all
    prompt_logprobs     float32 ()                 tokens read: what the model gives them; NaN: the first of a context
    prompt_top_ids      int32 (k,)                 tokens read: the likeliest there, as top_ids
    prompt_top_logprobs float32 (k,)               their log-probabilities
    routed_experts      uint8 or int32 (L, e)      both: the experts that each of L layers chose

- A `Side` is one stretch of one array: rows for tokens [start, end). Places count from a completion's first token;
  those of its prompt are below 0. What was not asked for takes no room.
- Others may add arrays of their own names (a teacher's, say).
- On the wire bytes that are equal are written once: the rows of a table name them (`packed`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import WireError
from .fields import WHOLE_MAX
from .limits import SIDE_COUNT_MAX

ALIGNMENT = 8  # of every array in a record
DTYPES: dict[str, np.dtype[Any]] = {code: np.dtype(f"<{code}") for code in ("u1", "i4", "f4", "i8", "f8", "u8")}
CODES = {dtype: code for code, dtype in DTYPES.items()}
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
DIMENSION_COUNT_MAX = 4
WHEN_READ = frozenset({"routed_experts"})  # known of a token once it was read: of a turn's last, only in the next turn
FILL: dict[str, float] = {"i": -1, "u": 0, "f": -math.inf}  # by a dtype's kind: what stands where a token has no row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One stretch of a side array: rows of tokens [start, end).

    array: (end - start, …), a row for each token. With counts, int32 (end - start,), token i has counts[i] of the rows.
    """

    name: str
    start: int
    end: int
    array: NDArray[Any]
    counts: NDArray[np.int32] | None = None

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return 64 + self.array.nbytes + (0 if self.counts is None else self.counts.nbytes)

    def part(self, start: int, end: int, by: int = 0) -> Side | None:
        """Return the rows of its tokens in [start, end), `by` places further on; None: it has none there."""
        low, high = max(self.start, start), min(self.end, end)
        if low >= high:
            return None
        first, last = low - self.start, high - self.start
        moved = replace(self, start=low + by, end=high + by)
        if (first, last) == (0, self.end - self.start):
            return moved
        if self.counts is None:
            return replace(moved, array=self.array[first:last])
        places = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))
        return replace(moved, array=self.array[places[first] : places[last]], counts=self.counts[first:last])


def parts(sides: Iterable[Side], start: int, end: int, by: int = 0) -> tuple[Side, ...]:
    """Return what side arrays say of tokens [start, end), `by` places further on."""
    found = (side.part(start, end, by) for side in sides)
    return tuple(side for side in found if side is not None)


def size_bytes(sides: Iterable[Side]) -> int:
    """Return about how much memory side arrays take."""
    return sum(side.size_bytes for side in sides)


def joined(sides: Iterable[Side]) -> tuple[Side, ...]:
    """Join stretches of one array that follow one another; in the order of names, then of places."""
    runs: list[list[Side]] = []
    for side in sorted(sides, key=lambda each: (each.name, each.start)):
        last = runs[-1][-1] if runs else None
        if last is not None and _follows(last, side):
            runs[-1].append(side)
        else:
            runs.append([side])
    return tuple(run[0] if len(run) == 1 else _one(run) for run in runs)


def continued(before: Sequence[Side], made: Sequence[Side], offset: int) -> tuple[Side, ...]:
    """Join what is said of `offset` tokens with what is said of those after them, whose places count from there.

    What both tell of, the first told first: it was made there.
    """
    known: dict[str, tuple[int, int]] = {}
    for side in before:
        start, end = known.get(side.name, (side.start, side.end))
        known[side.name] = min(start, side.start), max(end, side.end)
    told = [part for side in made for part in _untold(side, known.get(side.name), offset)]
    return joined([*before, *told])


def _untold(side: Side, known: tuple[int, int] | None, offset: int) -> Iterator[Side]:
    """Leave out of a side array, counted from token `offset`, what was told before, or could have been.

    known: the tokens that they told of.
    """
    places = [(side.start, side.end)]
    if known is not None:
        first = known[1] - offset if side.name in WHEN_READ else 0
        places = [(side.start, known[0] - offset), (first, side.end)]
    for start, end in places:
        part = side.part(start, end, offset)
        if part is not None:
            yield part


def _follows(last: Side, side: Side) -> bool:
    is_alike = (last.name, last.array.dtype, last.array.shape[1:]) == (
        side.name,
        side.array.dtype,
        side.array.shape[1:],
    )
    return is_alike and last.end == side.start and (last.counts is None) == (side.counts is None)


def _one(run: Sequence[Side]) -> Side:
    counts = [side.counts for side in run if side.counts is not None]
    return replace(
        run[0],
        end=run[-1].end,
        array=np.concatenate([side.array for side in run]),
        counts=np.concatenate(counts) if counts else None,
    )


def dense(sides: Iterable[Side], name: str, start: int, end: int) -> NDArray[Any] | None:
    """Return the rows of one array for all tokens [start, end), (end - start, …); None: nothing is known of them.

    Where a token has no row, or a shorter one, there is -1 (ids), -inf (log-probabilities), or 0 (bytes).

    Raises:
        ValueError: the array is ragged (`rows` reads it).
    """
    found = [side for side in parts(sides, start, end) if side.name == name]
    if not found:
        return None
    if any(side.counts is not None for side in found):
        raise ValueError(f"{name} is ragged: read it by rows()")
    dtype = np.result_type(*(side.array.dtype for side in found))
    shape = [max(lengths) for lengths in zip(*(side.array.shape[1:] for side in found), strict=True)]
    made = np.full((end - start, *shape), FILL[dtype.kind], dtype)
    for side in found:
        places = tuple(slice(length) for length in side.array.shape[1:])
        made[(slice(side.start - start, side.end - start), *places)] = side.array
    return made


def rows(sides: Iterable[Side], name: str, start: int, end: int) -> list[NDArray[Any] | None]:
    """Return the rows of one array token by token; None: nothing is known of that token."""
    found: list[NDArray[Any] | None] = [None] * (end - start)
    for side in parts(sides, start, end):
        if side.name == name:
            cut = list(side.array) if side.counts is None else np.split(side.array, np.cumsum(side.counts)[:-1])
            found[side.start - start : side.end - start] = cut
    return found


def packed(sides: Sequence[Side]) -> tuple[list[list[Any]], list[bytes]]:
    """Return side arrays as rows for the metadata, and the bytes that follow, each once.

    A row: name, start, end, dtype, shape, which of the bytes its array is, and which its counts are (-1: none).
    """
    known: dict[int, int] = {}
    found: list[bytes] = []

    def place(array: NDArray[Any], dtype: np.dtype[Any]) -> int:
        data = np.ascontiguousarray(array, dtype).tobytes()
        digest = xxhash.xxh3_128_intdigest(data)
        if digest not in known:
            known[digest] = len(found)
            found.append(data)
        return known[digest]

    table = []
    for side in sides:
        dtype = side.array.dtype.newbyteorder("<")
        counts = -1 if side.counts is None else place(side.counts, DTYPES["i4"])
        code = CODES.get(dtype)
        assert code is not None, f"{side.name} is {side.array.dtype}, expected one of {', '.join(DTYPES)}"
        shape = list(side.array.shape)
        table.append([side.name, side.start, side.end, code, shape, place(side.array, dtype), counts])
    return table, found


def unpacked(table: Any, data: bytes | memoryview, offset: int) -> tuple[tuple[Side, ...], int]:
    """Read `packed` rows whose bytes begin at `offset`; return the side arrays, and the offset behind them.

    Raises:
        WireError, TypeError, ValueError: they do not fit.
    """
    if table == []:  # almost always
        return (), offset
    if not isinstance(table, list) or len(table) > SIDE_COUNT_MAX:
        raise WireError(f"sides: expected a list of at most {SIDE_COUNT_MAX:,}")
    places: list[tuple[int, int]] = []  # of bytes that were mentioned: offset and size

    def view(number: int, code: str, shape: Sequence[int]) -> NDArray[Any]:
        nonlocal offset
        dtype = DTYPES[code]
        size = math.prod(shape) * dtype.itemsize
        if number == len(places):
            places.append((offset, size))
            offset += size + (-size % ALIGNMENT)
            if offset > len(data):
                raise WireError(f"sides: cut off, needs {size:,} bytes")
        if not 0 <= number < len(places) or places[number][1] != size:
            raise WireError(f"sides: bytes {number!r:.20} are not {size:,} bytes")
        return np.ndarray(tuple(shape), dtype, data, places[number][0])

    return tuple(_sides(table, view)), offset


def _sides(table: list[Any], view: Any) -> Iterator[Side]:
    for name, start, end, code, shape, array, counts in table:
        numbers = (start, end, array, counts, *shape)
        is_sound = all(type(each) is int and abs(each) <= WHOLE_MAX for each in numbers) and min(shape, default=0) >= 0
        if not is_sound or not 1 <= len(shape) <= DIMENSION_COUNT_MAX or start > end or not NAME.fullmatch(name):
            raise WireError(f"sides: {name!r:.50} has places {start!r:.20} to {end!r:.20}, or a shape, that cannot be")
        lengths = view(counts, "i4", [end - start]) if counts >= 0 else None
        side = Side(name=name, start=start, end=end, array=view(array, code, shape), counts=lengths)
        count = end - start if lengths is None else int(lengths.sum(dtype=np.int64))
        if count != shape[0] or (lengths is not None and bool((lengths < 0).any())):
            raise WireError(f"sides: {name} has {shape[0]} rows for {end - start} tokens")
        yield side


def check_within(sides: Iterable[Side], start: int, end: int, where: str) -> None:
    """Require that side arrays speak of tokens [start, end) only. Raises WireError."""
    for side in sides:
        if side.start < start or side.end > end:
            raise WireError(f"{where}.sides: {side.name} speaks of [{side.start}, {side.end}), not in [{start}, {end})")
