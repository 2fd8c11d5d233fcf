"""Models of every kind of tensor, and training that changes little, everything or nothing of them."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from redis import Redis

from rollfab.fabric.format.codec import BLOCK_BYTES
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.queue.keys import WeightKeys

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint8")
SHAPES = ((), (1,), (0,), (0, 3), (7,), (31, 33), (257,), (64, 64), (1000,))
DENSITIES = (0.0, 0.0, 0.001, 0.01, 0.01, 0.1, 0.5, 0.6, 1.0)
SPECIAL = {  # zeros of both signs, the smallest denormal, infinities, NaN with payloads, by width
    1: (0x00, 0x80, 0x01, 0x7F, 0xFF, 0x7C, 0x78),
    2: (0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7C00),
    4: (0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF),
    8: (0, 1 << 63, 1, 0x7FF0000000000000, 0x7FF8000000000001, (1 << 64) - 1),
}


def draw_layout(random: Random, *, has_table: bool) -> Layout:
    """A few tensors of any dtype and shape. has_table: and one that is larger than a block."""
    shapes = [random.choice(SHAPES) for _ in range(random.randrange(1, 7))]
    specs = [TensorSpec(f"layer.{place}", random.choice(DTYPES), shape) for place, shape in enumerate(shapes)]
    if all(spec.element_count == 0 for spec in specs) or random.random() < 0.3:
        specs.append(TensorSpec("head", random.choice(DTYPES), (50, 60)))
    if has_table:
        specs.append(TensorSpec("table", "uint8", (BLOCK_BYTES + 4097,)))
    return Layout(tuple(specs))


class Model:
    """Stored bits that a trainer changes. bits: flat, by name."""

    def __init__(self, layout: Layout, rng: np.random.Generator, random: Random) -> None:
        self.layout, self._rng, self._random = layout, rng, random
        self.bits = {spec.name: self._some(spec, spec.element_count) for spec in layout.tensors}
        self._old: dict[str, NDArray[Any]] = {}

    def twin(self) -> Model:
        """The same weights, held by another trainer; sometimes those of an older checkpoint."""
        twin = Model.__new__(Model)
        twin.layout, twin._rng, twin._random = self.layout, self._rng, self._random
        source = self._old if self._old and self._random.random() < 0.3 else self.bits
        twin.bits = {name: array.copy() for name, array in source.items()}
        twin._old = {}
        return twin

    def train(self) -> None:
        """Change some of it, in place."""
        if self._random.random() < 0.2:
            self._old = {name: array.copy() for name, array in self.bits.items()}
        density = self._random.choice(DENSITIES)
        for spec in self.layout.tensors:
            if spec.element_count and self._random.random() < 0.8:
                self._change(spec, self.bits[spec.name], density)

    def tensors(self) -> dict[str, Any]:
        """What a trainer hands to publish: torch tensors where numpy has no such type, numpy arrays elsewhere."""
        return {spec.name: _tensor(spec, self.bits[spec.name]) for spec in self.layout.tensors}

    def _change(self, spec: TensorSpec, flat: NDArray[Any], density: float) -> None:
        size = spec.element_count
        count = min(size, math.ceil(density * size))
        where = self._rng.choice(size, count, replace=False) if size < 100_000 else self._rng.integers(0, size, 50)
        kind = self._random.randrange(4)
        if kind <= 1:
            flat[where] += self._rng.integers(-2, 3, len(where)).astype(flat.dtype)
        elif kind == 2:
            flat[where] = self._some(spec, len(where))
        else:
            flat[where] = self._rng.choice(np.array(SPECIAL[flat.itemsize], flat.dtype), len(where))

    def _some(self, spec: TensorSpec, count: int) -> NDArray[Any]:
        return np.frombuffer(self._rng.bytes(count * spec.bits_dtype.itemsize), spec.bits_dtype).copy()


def _tensor(spec: TensorSpec, flat: NDArray[Any]) -> Any:
    if spec.dtype.startswith("float8"):
        return torch.from_numpy(flat).view(getattr(torch, spec.dtype)).reshape(spec.shape)
    return (flat if spec.dtype == "bfloat16" else flat.view(spec.dtype)).reshape(spec.shape)


def chunk_key(redis: Redis, run_id: str, version: int, kind: str, index: int = 0) -> str:
    """Where a chunk lies in the broker; its first publisher's, if several have written it."""
    found = redis.scan_iter(WeightKeys(run_id).chunk(version, f"{kind}.*", index))
    return min(name.decode() for name in found)
