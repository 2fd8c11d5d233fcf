"""Numbers in weights that are not finite: NaN and infinities, told from their stored bits, and refused by name."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import WeightsNotFinite
from ..contract.text import counted
from .codec import Encoded
from .layout import NAMES_SHOWN_MAX, Layout
from .regions import Region

# A value whose bits under the mask are all set is not finite. Dtypes that are not here have finite values alone.
MASKS = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float8_e4m3fn": 0x7F,  # it has no infinities
    "float8_e5m2": 0x7C,
}
LOOK_COUNT = 1 << 16  # elements looked at in one step: what that takes stays in a processor's cache


class FiniteCheck:
    """Counts the values of a version, or of one rank's part, that are not finite and new; threads may share it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: list[tuple[int, int]] = []  # tensor, count; threads append

    def look(self, region: Region, encoded: Encoded | None) -> Encoded | None:
        """Count in an encoded region; what was there before and stays is not counted. Return the region."""
        mask = MASKS.get(self._layout.tensors[region.tensor].dtype)
        if encoded is not None and mask is not None:
            count = _count(encoded, mask)
            if count:
                self._found.append((region.tensor, count))
        return encoded

    def end(self, version: int, live_version: int) -> None:
        """Refuse the version if anything was found. live_version: -1: there is none.

        Raises:
            WeightsNotFinite: names tensors and counts.
        """
        counts: dict[str, int] = {}
        for tensor, count in sorted(self._found):
            name = self._layout.tensors[tensor].name
            counts[name] = counts.get(name, 0) + count
        if not counts:
            return
        named = [f"{name!r} ({counts[name]:,} of {size:,})" for name, size in self._sizes(counts)]
        more = f" and {counted(len(counts) - len(named), 'more tensor')}" if len(counts) > len(named) else ""
        total = counted(sum(counts.values()), "new value")
        live = f"version {live_version} stays live" if live_version >= 0 else "no version is live"
        raise WeightsNotFinite(
            f"version {version} has {total} that {'is' if sum(counts.values()) == 1 else 'are'} NaN or infinite, in "
            f"{', '.join(named)}{more}: nothing was published, {live}. Go back to weights that are finite, and publish "
            "those; if the values are meant so, publish with allow_nonfinite=True",
            version=version,
            live_version=live_version,
            nonfinite_counts=dict(list(counts.items())[:NAMES_SHOWN_MAX]),
        )

    def _sizes(self, counts: dict[str, int]) -> list[tuple[str, int]]:
        return [(spec.name, spec.element_count) for spec in self._layout.tensors if spec.name in counts][
            :NAMES_SHOWN_MAX
        ]


def _count(encoded: Encoded, mask: int) -> int:
    values = encoded.values
    return sum(_count_in(encoded, mask, first) for first in range(0, len(values), LOOK_COUNT))


def _count_in(encoded: Encoded, mask: int, first: int) -> int:
    values = encoded.values[first : first + LOOK_COUNT]
    wide = values.dtype.type(mask)
    masked = values & wide
    if masked.max() != wide:
        return 0
    is_bad: NDArray[np.bool_] = masked == wide
    if encoded.olds is not None:  # some encodings list values that did not change
        is_bad &= values != encoded.olds[first : first + LOOK_COUNT]
    return int(np.count_nonzero(is_bad))
