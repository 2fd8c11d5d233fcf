"""A checkpoint file in the safetensors format, written from stored bits.

The format is a length, a JSON header and the raw bytes (github.com/huggingface/safetensors, "Format"). Its own library
is not used to write: numpy has no bfloat16, and these are bits of any type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from .....fabric.format.layout import Layout
from .....fabric.inspect.safetensors import NAMES
from ...base import Bits


def save_bits(path: Path, layout: Layout, bits: Mapping[str, Bits]) -> None:
    """Write every tensor of `layout`. bits: flat arrays of stored bits by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in layout.tensors:
        begin, end = end, end + spec.byte_count
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in layout.tensors:
            file.write(bits[spec.name].data)
