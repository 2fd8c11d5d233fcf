"""The tensors of a model: names, stored dtypes, shapes. Publisher and receivers must agree on it exactly.

- Tensors are kept sorted by name, so the order in which a model lists its parameters does not matter.
- A tensor is always its stored bits: an unsigned integer array of the element's width, never floats.
- Tied parameters appear once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np
import xxhash

from ..contract.errors import ConfigError, LayoutMismatch
from ..contract.text import did_you_mean

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
DTYPES = ("auto", "float32", "bfloat16", "float16")  # what an engine can be told to hold weights in
BITS_DTYPE: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
NAMES_SHOWN_MAX = 5  # a wrong model differs in hundreds of names; a few are enough to recognise it


def check_dtype(dtype: str) -> None:
    """Raises ConfigError: it is none of DTYPES."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"--dtype {dtype}: weights are held as they are published, never quantised: {did_you_mean(dtype, DTYPES)}",
            option="--dtype",
        )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. dtype: torch's name without the prefix, a key of ELEMENT_BYTES. shape: () for a scalar."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise LayoutMismatch(
                f"tensor {self.name!r} has dtype {self.dtype!r}: publish one of {', '.join(ELEMENT_BYTES)}",
                name=self.name,
                dtype=self.dtype,
            )
        object.__setattr__(self, "shape", tuple(int(length) for length in self.shape))
        if any(length < 0 for length in self.shape):
            raise LayoutMismatch(f"tensor {self.name!r} has impossible shape {self.shape}", name=self.name)

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def byte_count(self) -> int:
        return self.element_count * ELEMENT_BYTES[self.dtype]

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """The unsigned integer type that holds one element's stored bits."""
        return BITS_DTYPE[ELEMENT_BYTES[self.dtype]]

    def row(self) -> list[Any]:
        """The tensor as plain values for a manifest."""
        return [self.name, self.dtype, list(self.shape)]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, sorted by name.

    Raises:
        LayoutMismatch: a name appears twice.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tensors, key=lambda spec: spec.name))
        for left, right in pairwise(ordered):
            if left.name == right.name:
                raise LayoutMismatch(
                    f"tensor {left.name!r} appears twice: publish every parameter once", name=left.name
                )
        object.__setattr__(self, "tensors", ordered)

    @classmethod
    def from_rows(cls, rows: Iterable[Any]) -> Layout:
        """Make the layout of plain rows [name, dtype, shape] as a manifest carries them."""
        return cls(tuple(TensorSpec(str(name), str(dtype), tuple(map(index, shape))) for name, dtype, shape in rows))

    def rows(self) -> list[list[Any]]:
        """The layout as plain values for a manifest."""
        return [spec.row() for spec in self.tensors]

    @cached_property
    def digest(self) -> str:
        """xxh3-128, hex, of the rows as canonical JSON: equal exactly when names, dtypes and shapes are equal."""
        text = json.dumps(self.rows(), separators=(",", ":"), ensure_ascii=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    @property
    def element_count(self) -> int:
        return sum(spec.element_count for spec in self.tensors)

    @property
    def byte_count(self) -> int:
        """Bytes of all tensors as stored: what sending the model dense would cost."""
        return sum(spec.byte_count for spec in self.tensors)

    def check(self, other: Layout) -> None:
        """Require that `other` is this layout; `self` is the expected one.

        Raises:
            LayoutMismatch: names the missing, unknown and different tensors.
        """
        if self.digest == other.digest:
            return
        expected = {spec.name: spec for spec in self.tensors}
        given = {spec.name: spec for spec in other.tensors}
        missing = [name for name in expected if name not in given]
        unknown = [name for name in given if name not in expected]
        changed = [
            f"{name}: {_form(given[name])} instead of {_form(spec)}"
            for name, spec in expected.items()
            if name in given and given[name] != spec
        ]
        parts = [
            f"{len(names)} {word} ({_some(names)})"
            for word, names in (("missing", missing), ("unknown", unknown), ("different", changed))
            if names
        ]
        raise LayoutMismatch(
            f"tensors do not fit the layout: {'; '.join(parts)}. Use the same model, parameter names and dtypes on both"
            " sides, tied parameters once",
            missing=missing,
            unknown=unknown,
            changed=changed,
        )

    def check_run(self, run: Layout) -> None:
        """Require that a run's weights are in this layout, which an engine holds.

        Raises:
            LayoutMismatch: as `check`; where one dtype alone differs, it names both, and the option that mends it.
        """
        try:
            self.check(run)
        except LayoutMismatch as error:
            given = {spec.name: spec for spec in run.tensors}
            pairs = [(spec, given.get(spec.name, spec)) for spec in self.tensors]
            dtypes = {(own.dtype, other.dtype) for own, other in pairs if own != other}
            is_alike = len(given) == len(pairs) and all(own.shape == other.shape for own, other in pairs)
            if error.facts["missing"] or not is_alike or len(dtypes) != 1:
                raise
            ((held, published),) = dtypes
            option = f"start its worker, or its server, with --dtype {published}, or " if published in DTYPES else ""
            raise LayoutMismatch(
                f"the run's weights are {published}, this engine holds {held}: {option}publish {held}",
                **error.facts,
            ) from None

    def check_bits(self, bits: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Require that `bits` holds every tensor as a flat array of its stored bits.

        Raises:
            LayoutMismatch: names the first tensor that does not fit.
        """
        missing = [spec.name for spec in self.tensors if spec.name not in bits]
        if missing or len(bits) != len(self.tensors):
            unknown = sorted(set(bits) - {spec.name for spec in self.tensors})
            raise LayoutMismatch(
                f"tensors do not fit the layout: missing ({_some(missing)}); unknown ({_some(unknown)})",
                missing=missing,
                unknown=unknown,
            )
        for spec in self.tensors:
            array = bits[spec.name]
            if array.dtype != spec.bits_dtype or array.shape != (spec.element_count,):
                raise LayoutMismatch(
                    f"tensor {spec.name!r}: stored bits are {array.dtype}{list(array.shape)}, expected flat"
                    f" {spec.bits_dtype}[{spec.element_count}] for {_form(spec)}",
                    name=spec.name,
                )


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f", and {more} more" if more > 0 else "")
