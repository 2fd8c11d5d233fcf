"""Checks fields of records that were read: have they the types that their class declares, and values within bounds?

- A process that may write to the broker may write anything. A record of other types is refused as it is read, with its
  place named, before a loop takes a number for a name and dies of it.
- Measured: 1 us per record and per nested part. The answer for one combination of types is worked out once and kept.
- A number's bounds follow from the unit at the end of its name (UNITS), and are narrower where its class says so
  (BOUNDS). trainer/checks.py tells people who give a wrong value, by the same bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache
from operator import attrgetter
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import WireError

T = TypeVar("T")

Types = frozenset[type]
Bound = tuple[float, float] | tuple[str, ...]  # the least and the most of a number, or the words that a text may be

NUMBERS = (int, float)
WHOLE_MAX = 1 << 53  # JSON's and Lua's readers know whole numbers up to here
# The end of a number's name → its bounds; the longest end that fits counts.
UNITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("_count", "_count_max", "_bytes", "_bytes_max", "_ms", "_tokens", "_index"), (0, WHOLE_MAX)),
    **dict.fromkeys(("_s", "_per_s", "_ms_p50", "_ms_p99", "_mbps"), (0, 1e15)),
    "_fraction": (0, 1),
    "_version": (-1, WHOLE_MAX),
    "_epoch": (0, WHOLE_MAX),
}


class Judgement(NamedTuple):
    """The verdict on fields of certain types. fault: what is wrong, or an empty string. By the field's index:
    holders hold many of one plain type; bounds are a number's least and most; words are all that a text may be.
    """

    fault: str
    holders: tuple[tuple[int, type], ...] = ()
    bounds: tuple[tuple[int, float, float], ...] = ()
    words: tuple[tuple[int, tuple[str, ...]], ...] = ()


def check_types(cls: Any, names: tuple[str, ...], values: tuple[Any, ...], where: str) -> None:
    """Require the types and bounds that a dataclass declares; names that it does not have are left to its __init__.

    Raises:
        WireError: names the field, what it is and what is expected.
    """
    fault, holders, bounds, words = _judge(cls, names, tuple(map(type, values)))
    for index, least, most in bounds:
        if not least <= values[index] <= most:
            fault = f"{names[index]} is {values[index]!r:.40}, expected from {least:g} to {most:g}"
    for index, known in words:
        if values[index] not in known:
            fault = f"{names[index]} is {values[index]!r:.40}, expected {' or '.join(known)}"
    for index, kind in holders:
        if values[index] and set(map(type, values[index])) != {kind}:
            fault = f"{names[index]} holds other than {kind.__name__}"
    if fault:
        raise WireError(f"{where}: {fault}")


def parts_of(cls: Callable[..., T]) -> Callable[[list[Any]], tuple[T, ...]]:
    """Make what reads dataclasses from rows as they arrive in metadata: plain values, by name or in order."""
    return lambda rows: tuple([cls(**row) if isinstance(row, dict) else cls(*row) for row in rows])


def check_parts(value: object, where: str) -> None:
    """Check a dataclass inside a record, or each of a tuple of them, as check_types does.

    Raises:
        WireError: as check_types.
    """
    for part in value if isinstance(value, tuple) else (value,):
        cls: Any = type(part)
        names, values_of = _reader(cls)
        check_types(cls, names, values_of(part), where)


@cache
def field_names(cls: Any) -> frozenset[str]:
    """Return the names of a dataclass's fields."""
    return frozenset(field.name for field in dataclasses.fields(cls))


@cache
def _reader(cls: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return a dataclass's field names, and a function that reads those fields (two or more)."""
    names = tuple(field.name for field in dataclasses.fields(cls))
    return names, attrgetter(*names)


@lru_cache(maxsize=1024)  # senders choose the names; a hostile one must not fill our memory
def _judge(cls: Any, names: tuple[str, ...], types: tuple[type, ...]) -> Judgement:
    kinds, parts = _declared(cls)
    for name, kind in zip(names, types, strict=True):
        if name in kinds and kind not in kinds[name]:
            expected = " or ".join(sorted(each.__name__ for each in kinds[name]))
            return Judgement(f"{name} is {kind.__name__}, expected {expected}")
    holders = [(index, parts[name]) for index, name in enumerate(names) if name in parts]
    bounds, words = bounds_of(cls)
    return Judgement(
        "",
        tuple((index, part) for index, part in holders if types[index] in (list, tuple)),
        tuple((index, *bounds[name]) for index, name in enumerate(names) if name in bounds and types[index] in NUMBERS),
        tuple((index, words[name]) for index, name in enumerate(names) if name in words and types[index] is str),
    )


@cache
def bounds_of(cls: Any) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[str, ...]]]:
    """Return, by field, the least and the most that a number may be, and the words that a text may be."""
    own: dict[str, Bound] = getattr(cls, "BOUNDS", {})
    ends = {name: [end for end in UNITS if f"_{name}".endswith(end)] for name in field_names(cls)}
    numbers = {name: UNITS[max(found, key=len)] for name, found in ends.items() if found}
    words: dict[str, tuple[str, ...]] = {}
    for name, bound in own.items():
        if isinstance(bound[0], str):
            words[name] = bound
        else:
            numbers[name] = bound
    return numbers, words


@cache
def _declared(cls: Any) -> tuple[dict[str, Types], dict[str, type]]:
    """Return, by field, the types it may have, and the plain type of which it holds many.

    Leaves out the fields that may have any type, or that are decoded by themselves.
    """
    skipped = {*getattr(cls, "ARRAYS", ()), *getattr(cls, "NESTED", ())}
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name in field_names(cls) - skipped}
    kinds = {name: _kinds(hint) for name, hint in hints.items()}
    inner = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) in (list, tuple)}
    plain = {name: get_origin(part) or part for name, part in inner.items()}
    parts: dict[str, type] = {name: part for name, part in plain.items() if part in (str, int, dict)}
    return {name: kind for name, kind in kinds.items() if kind}, parts


def _kinds(hint: Any) -> Types:
    """Return the types that a declaration allows on the wire; none: any."""
    origin = get_origin(hint)
    if hint is Any:
        return frozenset()
    if origin in (Union, UnionType):
        parts = [_kinds(each) for each in get_args(hint)]
        return frozenset().union(*parts) if all(parts) else frozenset()
    if origin in (list, tuple):  # JSON has lists alone
        return frozenset({list, tuple})
    if hint is float:
        return frozenset({float, int})
    return frozenset({origin or hint})
