"""Numbers of a trace's file: each is finite and within what a load can have, or its line is refused by its name."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...fabric.contract.text import told

SECONDS_MAX = 1e12  # from any epoch, in any direction
TOKENS_MAX = 1_000_000_000  # of a prompt, or a completion
PER_SECOND_MAX = 1e6  # requests


FIELD = "a field of it is longer than any number, as where a quote has no end"


def table(text: str) -> csv.DictReader[str]:
    """Open a CSV whose first line has the names of its columns, and is what tells its separator."""
    first = text.lstrip().partition("\n")[0]
    separator = max(",;\t", key=first.count)
    return csv.DictReader(io.StringIO(text, newline=None), delimiter=separator, skipinitialspace=True)


def number(row: Mapping[str, Any], name: str, most: float, least: float = 0.0) -> float:
    """Read a number of a row, which may be text.

    Raises:
        ValueError: it is not there, none, or out of bounds.
    """
    value = row.get(name)
    if value is None:
        raise ValueError(f"it has no {name}")
    found = as_number(value, most, least)
    if found is None:
        raise ValueError(f"its {name} is {told(value)}: expected a number from {least:g} to {most:g}")
    return found


def as_number(value: Any, most: float, least: float = 0.0) -> float | None:
    """Return a number that may be text; None: it is none, or out of bounds."""
    try:
        found = None if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return found if found is not None and least <= found <= most else None


def within(values: npt.NDArray[Any], name: str, most: float, least: float = 0.0) -> None:
    """Require that all numbers of an array are within bounds.

    Raises:
        ValueError: one is not, or they are no numbers.
    """
    if values.dtype.kind not in "iuf" or not np.all((values >= least) & (values <= most)):
        raise ValueError(f"{name}: expected numbers from {least:g} to {most:g}")
