"""Fields of records that were read: do they have the types that their class declares?

- Who may write to the broker may write anything. A record of other types is refused as it is read, with its place
  named, before a loop takes a number for a name and dies of it.
- Measured: 1 us per record and per nested part. The answer for one combination of types is worked out once and kept.
- Only types are checked; what a value must be is checked where a person gives it (records.py, trainer/checks.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache
from operator import attrgetter
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .errors import WireError

Types = frozenset[type]


def check_types(cls: Any, names: tuple[str, ...], values: tuple[Any, ...], where: str) -> None:
    """Require the types that a dataclass declares; names that it does not have are left to its __init__.

    Raises:
        WireError: names the field, what it is and what is expected.
    """
    fault, holders = _judge(cls, names, tuple(map(type, values)))
    for index, kind in holders:
        if values[index] and set(map(type, values[index])) != {kind}:
            fault = f"{names[index]} holds other than {kind.__name__}"
    if fault:
        raise WireError(f"{where}: {fault}")


def check_parts(value: object, where: str) -> None:
    """The same for a dataclass inside a record, or for each of a tuple of them.

    Raises:
        WireError: as above.
    """
    for part in value if isinstance(value, tuple) else (value,):
        cls: Any = type(part)
        names, values_of = _reader(cls)
        check_types(cls, names, values_of(part), where)


@cache
def field_names(cls: Any) -> frozenset[str]:
    """The names of a dataclass's fields."""
    return frozenset(field.name for field in dataclasses.fields(cls))


@cache
def _reader(cls: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """A dataclass's field names, and a function that reads those fields (two or more)."""
    names = tuple(field.name for field in dataclasses.fields(cls))
    return names, attrgetter(*names)


@lru_cache(maxsize=1024)  # senders choose the names; a hostile one must not fill our memory
def _judge(cls: Any, names: tuple[str, ...], types: tuple[type, ...]) -> tuple[str, tuple[tuple[int, type], ...]]:
    """What is wrong with fields of these types, or an empty string; and which of them hold many of one plain type."""
    kinds, parts = _declared(cls)
    for name, kind in zip(names, types, strict=True):
        if name in kinds and kind not in kinds[name]:
            expected = " or ".join(sorted(each.__name__ for each in kinds[name]))
            return f"{name} is {kind.__name__}, expected {expected}", ()
    holders = [(index, parts[name]) for index, name in enumerate(names) if name in parts]
    return "", tuple((index, part) for index, part in holders if types[index] in (list, tuple))


@cache
def _declared(cls: Any) -> tuple[dict[str, Types], dict[str, type]]:
    """Field → the types it may have, and field → the plain type of which it holds many.

    Without the fields that may have any type, or that are decoded by themselves.
    """
    skipped = {*getattr(cls, "ARRAYS", ()), *getattr(cls, "NESTED", ())}
    hints = {name: hint for name, hint in get_type_hints(cls).items() if name in field_names(cls) - skipped}
    kinds = {name: _kinds(hint) for name, hint in hints.items()}
    inner = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) in (list, tuple)}
    parts: dict[str, type] = {name: part for name, part in inner.items() if part in (str, int)}
    return {name: kind for name, kind in kinds.items() if kind}, parts


def _kinds(hint: Any) -> Types:
    """The types that a declaration allows on the wire; none: any."""
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
