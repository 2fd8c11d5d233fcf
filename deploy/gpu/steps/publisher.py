"""Measures the publisher's comparison on the device, at the size of a 7B: bytes, time, peak memory.

Versions must be those that the host path makes, byte by byte. The comparison alone is timed by the size of the pieces
that it is given, because it is bound by launches where they are small.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from ....fabric.format.kernels.places import load_torch
from ....fabric.format.kernels.protocol import Scratch
from ....fabric.format.layout import Layout
from ....fabric.versions.snapshot import Identity, Snapshot
from .models import change, layout_of, random_bits, write_model
from .telling import Asked, asked, forget_peak, peak_bytes, tell, timed

FRACTIONS = (0.001, 0.01, 0.3)
PIECE_MIB = {True: (1, 4), False: (4, 32, 128, 512)}


def main() -> None:
    told, _ = asked()
    with tempfile.TemporaryDirectory(prefix="rollfab-kit-") as directory:
        layout = layout_of(write_model(Path(directory), "tiny" if told.is_tiny else "7B"))
    bits = random_bits(layout, 0)
    tell(parameters=layout.element_count, dense_bytes=layout.byte_count)
    host = Snapshot(layout, bits, 0)
    device = Snapshot(layout, on_device(bits, told.device), 0)
    for number, fraction in enumerate(FRACTIONS, start=1):
        change(bits, fraction, seed=number)
        tell(**{f"at {100 * fraction:g} %": compare(told, layout, (host, device), bits, number)})
    tell(comparison_s=by_piece(told))


def on_device(bits: dict[str, NDArray[Any]], device: str) -> dict[str, torch.Tensor]:
    """Copy bits to a device, as the publisher has a trainer's tensors."""
    return {
        name: torch.from_numpy(flat.view(f"<i{flat.itemsize}")).to(device, copy=True) for name, flat in bits.items()
    }


def compare(
    told: Asked, layout: Layout, both: tuple[Snapshot, Snapshot], bits: dict[str, NDArray[Any]], version: int
) -> dict[str, Any]:
    """Make one version by both ways; ends the process if they differ."""
    host, device = both
    identity = Identity(run_id="kit", epoch=1, version=version)
    began_s = time.perf_counter()
    expected = host.prepare_delta(identity, bits)
    host_s = time.perf_counter() - began_s
    new = on_device(bits, told.device)
    forget_peak(told.device)
    held = peak_bytes(told.device)
    found, device_s = timed(told.device, lambda: device.prepare_delta(identity, new))
    peak = peak_bytes(told.device)
    assert found.manifest.encode() == expected.manifest.encode(), "the device's version is not the host's"
    assert found.chunks == expected.chunks, "the device's chunks are not the host's"
    host.advance(expected)
    _, advance_s = timed(told.device, lambda: device.advance(found))
    assert device.equals(new), "the device's copy is not what was published"
    return {
        "changed": found.manifest.changed_count,
        "payload_bytes": found.manifest.payload_bytes,
        "host_s": host_s,
        "device_s": device_s,
        "advance_s": advance_s,
        "peak_beside_weights_bytes": None if peak is None or held is None else peak - held,
    }


def by_piece(told: Asked) -> dict[str, float]:
    """Measure the seconds to compare the same bytes at 1 %, by the MiB of a piece."""
    total = (8 << 20) if told.is_tiny else (8 << 30)
    old = torch.zeros(total // 2, dtype=torch.int16, device=told.device)
    new = old.clone()
    new[::100] = 1
    loops, found = load_torch(), {}
    for mib in PIECE_MIB[told.is_tiny]:
        count = (mib << 20) // 2

        def work(count: int = count) -> int:
            scratch = Scratch()
            pieces = zip(torch.split(old, count), torch.split(new, count), strict=True)
            return sum(loops.changes(*piece, count, scratch)[0] for piece in pieces)

        work()
        changed, found[f"{mib} MiB"] = timed(told.device, work)
        assert changed == -(-len(old) // 100), changed
    return found


if __name__ == "__main__":
    main()
