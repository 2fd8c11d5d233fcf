"""A commit at the shapes of a 7B, without vLLM: our placement and writes on a model that only has its parameters.

- Each fraction is written twice: by the way of the code as it is (host arrays, written while the model would stand
  still), and by a prototype with pinned int32 positions and values that are on the device before, so that only the
  scatter is left. Both must leave the same bits.
- The parameters are fused as vLLM fuses them, and its loader is this file's: narrow copies, nothing else.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ....fabric.format.layout import Layout
from ....workers.engines.vllm.inplace.loader_trace import record
from ....workers.engines.vllm.inplace.pieces import integers
from ....workers.engines.vllm.inplace.placement import Placement
from .models import change, layout_of, random_bits, write_model
from .telling import Asked, asked, forget_peak, peak_bytes, tell, timed

FRACTIONS = (0.001, 0.01, 0.3)
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
PART = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.")
Changes = dict[str, tuple[NDArray[np.int64], NDArray[Any]]]


class Scatter(NamedTuple):
    """A commit of one piece. flat: live memory. positions: int32 (C,) in it. values: (C,), stored bits."""

    flat: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor


class Fused(torch.nn.Module):
    """Parameters of a layout, fused; `load_weights` as vLLM's models have it."""

    def __init__(self, layout: Layout, device: str) -> None:
        super().__init__()
        sizes: dict[str, list[int]] = {}
        self._rows: dict[str, tuple[str, int]] = {}
        dtypes = {}
        for spec in layout.tensors:
            name = _fused(spec.name)
            shape = sizes.setdefault(name, [0, *spec.shape[1:]])
            self._rows[spec.name] = (name, shape[0])
            shape[0] += spec.shape[0]
            dtypes[name] = getattr(torch, spec.dtype)
        self.held = torch.nn.ParameterDict()
        for name, shape in sizes.items():
            tensor = torch.zeros(shape, dtype=dtypes[name], device=device)
            self.held[name.replace(".", "_")] = torch.nn.Parameter(tensor, requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            fused, first = self._rows[name]
            own = fused.replace(".", "_")
            self.held[own].data.narrow(0, first, tensor.shape[0]).copy_(tensor)
            loaded.add(f"held.{own}")
        return loaded


def _fused(name: str) -> str:
    return PART.sub(lambda found: f".{FUSED[found[1]]}.", name)


def main() -> None:
    told, _ = asked()
    with tempfile.TemporaryDirectory(prefix="rollfab-kit-") as directory:
        layout = layout_of(write_model(Path(directory), "tiny" if told.is_tiny else "7B"))
    with torch.no_grad():
        model = Fused(layout, told.device)
        placement = record(model, layout)
        bits = random_bits(layout, 0)
        for name, flat in bits.items():
            placement.write_all(name, integers(flat))
        tell(parameters=layout.element_count, device_peak_bytes=peak_bytes(told.device))
        for number, fraction in enumerate(FRACTIONS, start=1):
            tell(**{f"at {100 * fraction:g} %": _both_ways(told, placement, bits, fraction, number)})


def _both_ways(
    told: Asked, placement: Placement, bits: dict[str, NDArray[Any]], fraction: float, seed: int
) -> dict[str, Any]:
    old = {name: flat.copy() for name, flat in bits.items()}
    change(bits, fraction, seed)
    changes: Changes = {}
    for name, flat in bits.items():
        places = np.flatnonzero(flat != old[name])
        changes[name] = (places, flat[places])
    as_it_is = _measured(told, lambda: _write(placement, changes))
    _check(placement, bits)
    for name, flat in old.items():
        placement.write_all(name, integers(flat))
    decoded, decode_s = timed(told.device, lambda: _decoded(told, placement, changes))
    staged, copy_s = timed(told.device, lambda: _copied(told, decoded))
    prototype = {**_measured(told, lambda: _scatter(staged)), "decode_s": decode_s, "copy_s": copy_s}
    _check(placement, bits)
    count = sum(len(places) for places, _ in changes.values())
    return {"changed": count, "as it is": as_it_is, "prototype": prototype}


def _measured(told: Asked, work: Any) -> dict[str, Any]:
    forget_peak(told.device)
    held = peak_bytes(told.device)
    _, seconds = timed(told.device, work)
    peak = peak_bytes(told.device)
    return {"commit_s": seconds, "temporaries_bytes": None if peak is None or held is None else peak - held}


def _write(placement: Placement, changes: Changes) -> None:
    for name, (places, values) in changes.items():
        placement.write_some(name, integers(places), integers(values))


def _decoded(told: Asked, placement: Placement, changes: Changes) -> list[Scatter]:
    """Of every piece, in host memory, which is pinned where there is a GPU."""
    found = []
    for name, (places, values) in changes.items():
        for piece in placement.pieces[name]:
            inside, targets = piece.targets(integers(places))
            positions, own = targets[inside].int(), integers(values)[inside]
            if told.is_gpu:
                positions, own = positions.pin_memory(), own.pin_memory()
            found.append(Scatter(placement.memories[piece.memory].flat, positions, own))
    return found


def _copied(told: Asked, decoded: list[Scatter]) -> list[Scatter]:
    """The same on the device, by a stream of its own."""
    new_stream: Any = torch.cuda.Stream
    with torch.cuda.stream(new_stream(told.device) if told.is_gpu else None):
        return [
            Scatter(
                each.flat,
                each.positions.to(told.device, non_blocking=True),
                each.values.to(told.device, non_blocking=True),
            )
            for each in decoded
        ]


def _scatter(staged: list[Scatter]) -> None:
    for each in staged:
        each.flat.index_copy_(0, each.positions.long(), each.values)


def _check(placement: Placement, bits: dict[str, NDArray[Any]]) -> None:
    """The model holds exactly these bits; ends the process if not."""
    for name, expected in bits.items():
        found = np.empty_like(expected)
        placement.read(name, integers(found))
        assert np.array_equal(found, expected), f"{name} is not what was written"


if __name__ == "__main__":
    main()
