"""Comparing, writing and summing bits that are on a device, by torch: see protocol.py for what each does.

- Bits are flat tensors of INTEGERS. Comparing for equality and wrapping arithmetic do not mind that they are signed.
- `changes` takes at most TEMPORARY_FACTOR times the bytes that it compares on the device.
- If the device has no room, `changes` compares halves, and in the end reports too many, since a block that comes to the
  host whole takes no room there; `write` goes by way of the host, and `copies` stay on the host.
- The trainer's writes must be done, or be queued on the device's default stream.
- Tested on the CPU; unverified on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .numpy_loops import factor_table, odd_keys
from .protocol import MASK, MIX, ROW, ROW_BITS, Bits, Changes, Flat, Scratch

log = logging.getLogger(__name__)

TEMPORARY_FACTOR = 8  # 1-byte elements: mask 1, a third of the positions as int64 2.4, and as int32 1.2, bits 0.6
HALVED_BYTES_MIN = 8 << 20  # less than that is not compared by halves: a device that full has no room for them either
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(old: torch.Tensor, new: torch.Tensor, count_max: int, scratch: Scratch) -> tuple[int, Changes | None]:
    try:
        return _changes(old, new, count_max)
    except torch.OutOfMemoryError as error:
        if not scratch.is_warned:
            log.warning("weights.device_is_full", extra={"error": str(error)})
        scratch.is_warned = True
    if old.nbytes < HALVED_BYTES_MIN:
        return len(old), None
    return _by_halves(old, new, count_max, scratch)


def _changes(old: torch.Tensor, new: torch.Tensor, count_max: int) -> tuple[int, Changes | None]:
    """All at once; what it took is given back when it fails. Raises OutOfMemoryError."""
    mask = old != new
    count = int(mask.count_nonzero())
    if count > count_max:
        return count, None
    places = mask.nonzero().reshape(-1)
    return count, Changes(*map(on_host, (places.int(), old[places], new[places])))


def _by_halves(old: torch.Tensor, new: torch.Tensor, count_max: int, scratch: Scratch) -> tuple[int, Changes | None]:
    middle = len(old) // 2
    count, low = changes(old[:middle], new[:middle], count_max, scratch)
    if low is None:
        return count, None
    more, high = changes(old[middle:], new[middle:], count_max - count, scratch)
    if high is None:
        return count + more, None
    high = high._replace(indices=high.indices + np.uint32(middle))
    return count + more, Changes(*map(np.concatenate, zip(low, high, strict=True)))


def is_same(old: torch.Tensor, new: torch.Tensor) -> bool:
    try:
        return torch.equal(old, new)
    except torch.OutOfMemoryError:
        return np.array_equal(on_host(old), on_host(new))


def write(bits: torch.Tensor, indices: NDArray[np.uint32] | None, values: Bits) -> None:
    if indices is None:
        bits.copy_(as_tensor(values))
        return
    try:
        bits[as_tensor(indices).to(bits.device).long()] = as_tensor(values).to(bits.device)
    except torch.OutOfMemoryError:  # the head has moved, so this must not fail
        whole = np.array(on_host(bits))
        whole[indices] = values
        bits.copy_(as_tensor(whole))


def integers(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    try:
        tensor = tensor.to(getattr(torch, dtype)).contiguous()
    except torch.OutOfMemoryError:
        tensor = tensor.cpu().to(getattr(torch, dtype)).contiguous()
    return tensor.reshape(-1).view(INTEGERS[tensor.element_size()])


def copies(bits: Mapping[str, Flat], beside: Mapping[str, Flat]) -> dict[str, Flat]:
    try:
        return {name: _copy(flat, beside[name]) for name, flat in bits.items()}
    except torch.OutOfMemoryError as error:
        log.warning("weights.kept_on_host", extra={"error": str(error)})
    return {name: np.array(on_host(flat)) for name, flat in bits.items()}


def on_host(flat: Flat) -> Bits:
    if isinstance(flat, np.ndarray):
        return flat
    array: Bits = flat.cpu().numpy()
    return array.view(f"<u{flat.element_size()}")


def sum_runs(key: int, start: int, stride: int, runs: torch.Tensor) -> int:
    run_count, run = runs.shape
    if not runs.numel():
        return 0
    device = runs.device
    starts = torch.arange(run_count, device=device).mul_(stride).add_(start)
    positions = starts[:, None] + torch.arange(run, device=device)
    rows = np.arange(start >> ROW_BITS, ((start + (run_count - 1) * stride + run - 1) >> ROW_BITS) + 1)
    row_keys = as_tensor(odd_keys(key, rows.astype(np.uint64))).to(device)
    words = row_keys[(positions >> ROW_BITS).sub_(int(rows[0]))]
    words *= as_tensor(factor_table()).to(device)[positions.bitwise_and_(ROW - 1)]
    words *= _mixed(runs)
    return int(words.sum()) & MASK


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """f of the digest. int64 wraps around as uint64 does; only its shift to the right keeps the sign."""
    words = values.long()
    if values.element_size() < 8:
        words = words & ((1 << (8 * values.element_size())) - 1)  # a copy also of int64
    words = words + 1
    words *= MIX - (1 << 64)
    words ^= (words >> 32) & 0xFFFFFFFF
    return words * ((words << 1) + 1)


def as_tensor(array: Bits) -> torch.Tensor:
    """Return numbers of the host as torch's integers, in the same memory; a copy if that is read only."""
    signed: Any = array.view(np.uint8 if array.itemsize == 1 else f"<i{array.itemsize}")
    return torch.from_numpy(signed if signed.flags.writeable else signed.copy())


def _copy(flat: Flat, beside: Flat) -> Flat:
    if isinstance(beside, np.ndarray):
        return np.array(on_host(flat))
    tensor = as_tensor(flat) if isinstance(flat, np.ndarray) else flat
    return tensor.to(beside.device, copy=True)
