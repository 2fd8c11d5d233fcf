"""Describes an option of a process once, where its value is kept: the field of a dataclass.

- Its command line, its help, its key in a file and its environment variable are all read off the field (deploy/roles).
- A part is a field whose `default_factory` is a dataclass: its options are the whole's. Other fields are no options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The description of a field."""

    help: str
    key: str = ""
    """Its name in a file; the command line has dashes for underscores. Empty: the field's name."""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    variables: tuple[str, ...] = ()
    """Environment variables that hold it, besides ROLLFAB_<TABLE>_<KEY>."""
    is_positional: bool = False
    """On the command line it has no name."""
    is_variable_only: bool = False
    """It is a secret, and the first of `variables` alone may hold it."""
    is_secret: bool = False
    """It may hold a secret, and is shown masked."""
    check: Callable[[Any], object] | None = None
    """Raises ConfigError for an impossible value."""
    check_open: Callable[[Any], object] | None = None
    """Likewise, where others can read the value: a command line, a file."""


@dataclass(frozen=True, slots=True)
class Described:
    """A field, and where it is: the parts that lead to it."""

    key: str
    kind: str
    """Its annotation, as written."""
    default: Any
    option: Option
    name: str
    parts: tuple[str, ...]

    @property
    def type_name(self) -> str:
        """Return the type of one value: int for "tuple[int, ...]" and "int | None"."""
        return self.kind.removeprefix("tuple[").partition(" ")[0].removesuffix(",")

    @property
    def is_list(self) -> bool:
        """True if the option may be given several times."""
        return self.kind.startswith("tuple")

    def value_in(self, whole: Any) -> Any:
        """Return the value of this field in a dataclass."""
        for part in self.parts:
            whole = getattr(whole, part)
        return getattr(whole, self.name)


def option(default: Any, help: str, **details: Any) -> Any:
    """Declare a field with its description; details: see Option."""
    said = Option(help=help, **details)
    return field(default=default, repr=not said.is_secret, metadata={"option": said})


def describe(whole: type[Any], parts: tuple[str, ...] = ()) -> Iterator[Described]:
    """Yield the options of a dataclass and its parts, in their order."""
    for each in fields(whole):
        said = each.metadata.get("option")
        if said is not None:
            yield Described(said.key or each.name, str(each.type), each.default, said, each.name, parts)
        elif (part := _part(each.default_factory)) is not None:
            yield from describe(part, (*parts, each.name))


def make(whole: type[T], values: Mapping[str, Any], parts: tuple[str, ...] = ()) -> T:
    """Make a dataclass of values by key; a missing value has its default."""
    given = {each.name: values[each.key] for each in describe(whole) if not each.parts and each.key in values}
    made = {each.name: make(part, values) for each in fields(whole) if (part := _part(each.default_factory))}  # type: ignore[arg-type]
    return whole(**given, **made)


def _part(factory: Any) -> type[Any] | None:
    return factory if factory is not MISSING and isinstance(factory, type) and is_dataclass(factory) else None
