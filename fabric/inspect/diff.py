"""Compares two states of the weights, tensor by tensor: how many elements differ, by how many steps, how far.

- Compared are stored bits: -0 and 0 differ, and so do two payloads of NaN.
- A step is a distance in the integer pattern of the element, without its sign; it says how a delta codes.
- Looking from either side gives the same figures.
- Memory: one state, and what differs; of tensors compared whole only PIECE_ELEMENTS at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import VersionUnknown
from ..format.codec import Bits
from ..format.layout import Layout, TensorSpec
from ..ports.weights import WeightStore
from ..versions.commit import Write
from ..versions.rank_parts import whole
from ..versions.reader import ChainReader, fetch_bits
from ..versions.stage import Stage

PIECE_ELEMENTS = 1 << 20
FLOAT_DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """The difference of one tensor.

    change_max: largest |new - old| as numbers, where both are finite; None where there is no such element.
    """

    name: str
    dtype: str
    element_count: int
    changed_count: int = 0
    one_step_count: int = 0
    few_steps_count: int = 0
    many_steps_count: int = 0
    change_max: float | None = None

    @property
    def density(self) -> float:
        """Changed elements as a fraction of all."""
        return self.changed_count / max(1, self.element_count)


def diff_tensor(spec: TensorSpec, old: Bits, new: Bits) -> TensorDiff:
    """Compare elements of one tensor: all of them, or those that may differ. old, new: flat bits of equal length."""
    assert old.shape == new.shape and old.dtype == new.dtype == spec.bits_dtype
    counts = np.zeros(4, dtype=np.int64)
    change_max: float | None = None
    for start in range(0, len(old), PIECE_ELEMENTS):
        before, after = old[start : start + PIECE_ELEMENTS], new[start : start + PIECE_ELEMENTS]
        changed = np.flatnonzero(before != after)
        if not len(changed):
            continue
        before, after = before[changed], after[changed]
        steps = np.minimum(after - before, before - after)
        one, few = int(np.count_nonzero(steps == 1)), int(np.count_nonzero((steps == 2) | (steps == 3)))
        counts += (len(changed), one, few, len(changed) - one - few)
        change_max = _larger(change_max, _change_max(spec.dtype, before, after))
    changed_count, one, few, many = counts.tolist()
    return TensorDiff(
        name=spec.name,
        dtype=spec.dtype,
        element_count=spec.element_count,
        changed_count=changed_count,
        one_step_count=one,
        few_steps_count=few,
        many_steps_count=many,
        change_max=change_max,
    )


async def diff_versions(store: WeightStore, run_id: str, first: int, second: int) -> list[TensorDiff]:
    """Compare two versions that the broker holds, in either order, all tensors in the layout's order.

    Raises:
        VersionUnknown: one of them is not held. ChainBroken: what leads to it is not.
        DigestMismatch: a chunk stays corrupt.
    """
    older, newer = sorted((first, second))
    return await asyncio.to_thread(_diff_writes, *await fetch_change(store, run_id, older, newer))


async def fetch_change(
    store: WeightStore, run_id: str, older: int, newer: int
) -> tuple[Layout, dict[str, Bits], Mapping[str, Write]]:
    """Return a run's tensors, their flat bits in the version `older`, and what `newer` writes into them.

    Raises:
        VersionUnknown, ChainBroken, DigestMismatch: as `diff_versions`.
    """
    held = {version for version, _ in await store.held(run_id)}
    if newer not in held:
        raise VersionUnknown(f"version {newer} of run {run_id!r} is not held by the broker", version=newer)
    manifest, bits = await fetch_bits(store, run_id, older)
    reader = ChainReader(store, run_id)
    manifests = await reader.plan(older, newer)
    staged = await reader.stage(manifests, Stage(whole(manifest.tensors), bits, older, manifest.sums))
    return manifest.tensors, bits, staged.writes


def numbers(dtype: str, bits: Bits) -> NDArray[np.float64]:
    """Return stored bits as the numbers that they mean; 64-bit integers may lose their last digits."""
    if dtype in FLOAT_DTYPES:
        return bits.view(FLOAT_DTYPES[dtype]).astype(np.float64)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float8_e5m2":
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    if dtype == "float8_e4m3fn":
        return _e4m3fn()[bits]
    return bits.view(f"i{bits.itemsize}" if dtype.startswith("int") else bits.dtype).astype(np.float64)


def _e4m3fn() -> NDArray[np.float64]:
    """Compute each of the 256 patterns' values: 4 bits of exponent, bias 7, 3 of mantissa, no infinity, one NaN."""
    patterns = np.arange(128)
    exponent, mantissa = patterns >> 3, (patterns & 7) / 8
    positive = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    positive[127] = np.nan
    return np.concatenate([positive, -positive])


def _change_max(dtype: str, before: Bits, after: Bits) -> float | None:
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.abs(numbers(dtype, after) - numbers(dtype, before))
    finite = change[np.isfinite(change)]
    return float(finite.max()) if len(finite) else None


def _larger(left: float | None, right: float | None) -> float | None:
    return max((each for each in (left, right) if each is not None), default=None)


def _diff_writes(layout: Layout, bits: Mapping[str, Bits], writes: Mapping[str, Write]) -> list[TensorDiff]:
    found = []
    for spec in layout.tensors:
        positions, values = writes.get(spec.name, (None, bits[spec.name]))
        old = bits[spec.name] if positions is None else bits[spec.name][positions]
        found.append(diff_tensor(spec, old, values))
    return found
