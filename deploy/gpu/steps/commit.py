"""Measures a commit at the shapes of a 7B, without vLLM: our placement, staging and writes on bare parameters.

- Each fraction is staged as an engine's process stages it, beside the model, and then written while the model would
  stand still. What was written is compared bit by bit.
- The parameters are fused as vLLM fuses them, and its loader is this file's: narrow copies, nothing else.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....fabric.format.layout import Layout
from ....fabric.versions.commit import Write
from ....workers.engines.vllm.inplace.loader_trace import record
from ....workers.engines.vllm.inplace.pieces import integers
from ....workers.engines.vllm.inplace.placement import Placement
from ....workers.engines.vllm.inplace.rank_part import RankPart
from .models import change, layout_of, random_bits, write_model
from .telling import Asked, asked, forget_peak, peak_bytes, tell, timed

FRACTIONS = (0.001, 0.01, 0.3)
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
PART = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.")


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
        placement = record(Fused(layout, told.device), layout)
        part, bits = RankPart(placement, 0), random_bits(layout, 0)
        part.take({name: (None, flat) for name, flat in bits.items()})()
        tell(parameters=layout.element_count, device_peak_bytes=peak_bytes(told.device))
        for number, fraction in enumerate(FRACTIONS, start=1):
            tell(**{f"at {100 * fraction:g} %": _measured(told, part, bits, fraction, number)})
            _check(placement, bits)


def _measured(told: Asked, part: RankPart, bits: dict[str, NDArray[Any]], fraction: float, seed: int) -> dict[str, Any]:
    """Change that share of the elements of `bits`, and bring the model to them."""
    old = {name: flat.copy() for name, flat in bits.items()}
    change(bits, fraction, seed)
    writes: dict[str, Write] = {}
    for name, flat in bits.items():
        positions = np.flatnonzero(flat != old[name])
        writes[name] = (positions, flat[positions])
    commit, stage_s = timed(told.device, lambda: part.take(writes))
    forget_peak(told.device)
    held = peak_bytes(told.device)
    _, commit_s = timed(told.device, commit)
    peak = peak_bytes(told.device)
    return {
        "changed": sum(len(values) for _, values in writes.values()),
        "stage_s": stage_s,
        "commit_s": commit_s,
        "temporaries_bytes": None if peak is None or held is None else peak - held,
    }


def _check(placement: Placement, bits: dict[str, NDArray[Any]]) -> None:
    """Require that the model holds exactly these bits; ends the process if not."""
    for name, expected in bits.items():
        found = np.empty_like(expected)
        placement.read(name, integers(found))
        assert np.array_equal(found, expected), f"{name} is not what was written"


if __name__ == "__main__":
    main()
