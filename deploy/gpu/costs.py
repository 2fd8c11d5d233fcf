"""Calculates what a commit costs on a GPU, from bytes and published bandwidths: the table in docs/gpu.md.

- Nothing here was measured. Launches, checks, messages between processes and the broker's part are left out: figures
  are floors.
- "before" (0.1.0): a rank's whole part comes to the host, pageable, inside the hold, and changes (int64 positions and
  values) go back the same way, where there are several ranks; one rank has a copy on the host already. "now":
  positions (int32) and values go to the device pinned, on a side stream, before the hold; the commit is the scatter.
- Weights are bfloat16. Changes lie anywhere, independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

VALUE_BYTES = 2
POSITION_BYTES_BEFORE, POSITION_BYTES_NOW = 8, 4
SECTOR_BYTES = 32  # the least that a GPU reads or writes of its memory (CUDA C++ Best Practices Guide)

HBM_BYTES_PER_S = 3.35e12  # H100 SXM, HBM3 (NVIDIA H100 datasheet)
PINNED_BYTES_PER_S = 25e9  # of 64 GB/s a direction of PCIe Gen5 x16 (the same; PCI-SIG): what Gen4 x16 reaches, too
PAGEABLE_BYTES_PER_S = 6e9  # by the driver's own pinned buffer: 5 to 6 GB/s (rapidsai/dask-cuda, pull request 98)

MODELS = (("7B, TP 1", 7e9, 1), ("32B, TP 4", 32e9, 4), ("70B, TP 8", 70e9, 8))
CHANGED = (0.001, 0.01, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one commit on one rank.

    stall_s: generation stands still outside the reported pause. pause_s: the reported pause. side_s: copying beside
    generation.
    """

    stall_s: float
    pause_s: float
    side_s: float


def cost_before(element_count: float, rank_count: int, changed: float) -> Cost:
    """Calculate a commit by the host, inside the hold. element_count: of the model. changed: fraction of elements."""
    own = element_count / rank_count
    stall_s = own * VALUE_BYTES / PAGEABLE_BYTES_PER_S if rank_count > 1 else 0.0
    copied = own * changed * (POSITION_BYTES_BEFORE + VALUE_BYTES)
    pause_s = copied / PAGEABLE_BYTES_PER_S + _scatter_s(own, changed, POSITION_BYTES_BEFORE)
    return Cost(stall_s=stall_s, pause_s=pause_s, side_s=0.0)


def cost_now(element_count: float, rank_count: int, changed: float) -> Cost:
    """Calculate a commit with everything on the device before the hold."""
    own = element_count / rank_count
    side_s = own * changed * (POSITION_BYTES_NOW + VALUE_BYTES) / PINNED_BYTES_PER_S
    return Cost(stall_s=0.0, pause_s=_scatter_s(own, changed, POSITION_BYTES_NOW), side_s=side_s)


def _scatter_s(element_count: float, changed: float, position_bytes: int) -> float:
    """Calculate a scatter's seconds.

    Positions and values are read in order; every sector with a change in it is read and written.
    """
    per_sector = SECTOR_BYTES // VALUE_BYTES
    sectors = element_count / per_sector * (1 - (1 - changed) ** per_sector)
    moved = element_count * changed * (position_bytes + VALUE_BYTES) + 2 * SECTOR_BYTES * sectors
    return moved / HBM_BYTES_PER_S


def cost_table() -> Iterator[str]:
    """Yield the rows of the table in docs/gpu.md."""
    yield "| model | changed | before: stall | before: pause | now: stall | now: pause | beside generation |"
    yield "|---|---|---|---|---|---|---|"
    for name, element_count, rank_count in MODELS:
        for changed in CHANGED:
            before, now = (each(element_count, rank_count, changed) for each in (cost_before, cost_now))
            cells = (before.stall_s, before.pause_s, now.stall_s, now.pause_s, now.side_s)
            yield f"| {name} | {100 * changed:g} % | {' | '.join(map(_text, cells))} |"


def _text(seconds: float) -> str:
    if not seconds:
        return "none"
    number, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return f"{float(f'{number:.2g}'):g} {unit}"  # two digits: no more is known


if __name__ == "__main__":
    print("\n".join(cost_table()))
