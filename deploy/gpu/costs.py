"""What a commit costs on a GPU, by calculation from bytes and published bandwidths: the table in docs/gpu.md.

- Nothing here was measured. Launches, checks, messages between processes and the broker's part are left out: figures
  are floors.
- Positions (int32) and values go to the device pinned, on a side stream, before the hold; the commit is the scatter.
- Weights are bfloat16. Changes lie anywhere, independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

VALUE_BYTES = 2
POSITION_BYTES = 4
SECTOR_BYTES = 32  # the least that a GPU reads or writes of its memory (CUDA C++ Best Practices Guide)

HBM_BYTES_PER_S = 3.35e12  # H100 SXM, HBM3 (NVIDIA H100 datasheet)
PINNED_BYTES_PER_S = 25e9  # of 64 GB/s a direction of PCIe Gen5 x16 (the same; PCI-SIG): what Gen4 x16 reaches, too

MODELS = (("7B, TP 1", 7e9, 1), ("32B, TP 4", 32e9, 4), ("70B, TP 8", 70e9, 8))
CHANGED = (0.001, 0.01, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one commit on one rank. pause_s: generation stands still. side_s: copying beside generation."""

    pause_s: float
    side_s: float


def cost(element_count: float, rank_count: int, changed: float) -> Cost:
    """Of a model of so many elements; changed: fraction of them.

    Positions and values are read in order; every sector with a change in it is read and written.
    """
    own = element_count / rank_count
    staged_bytes = own * changed * (POSITION_BYTES + VALUE_BYTES)
    per_sector = SECTOR_BYTES // VALUE_BYTES
    sectors = own / per_sector * (1 - (1 - changed) ** per_sector)
    pause_s = (staged_bytes + 2 * SECTOR_BYTES * sectors) / HBM_BYTES_PER_S
    return Cost(pause_s=pause_s, side_s=staged_bytes / PINNED_BYTES_PER_S)


def cost_table() -> Iterator[str]:
    """Rows of the table in docs/gpu.md."""
    yield "| model | changed | pause | beside generation |"
    yield "|---|---|---|---|"
    for name, element_count, rank_count in MODELS:
        for changed in CHANGED:
            found = cost(element_count, rank_count, changed)
            yield f"| {name} | {100 * changed:g} % | {_text(found.pause_s)} | {_text(found.side_s)} |"


def _text(seconds: float) -> str:
    number, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return f"{float(f'{number:.2g}'):g} {unit}"  # two digits: no more is known


if __name__ == "__main__":
    print("\n".join(cost_table()))
