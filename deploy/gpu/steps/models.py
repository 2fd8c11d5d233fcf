"""Makes models of ordinary shapes: configurations on disk, and bits for their tensors.

The shapes are Qwen2.5's (config.json of each at the hub); values are random.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....fabric.format.layout import Layout
from ....workers.engines.vllm.common.layout import checkpoint_layout

COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "1.5B": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "3B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
SCALE = 0.02  # of the values: what such models begin with


def write_model(directory: Path, name: str) -> Path:
    """Write the configuration of a model and a tokenizer of single characters into a directory, and no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    characters = [chr(code) for code in range(32, 127)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": {each: place for place, each in enumerate(characters)}, "merges": []},
    }
    files: dict[str, Mapping[str, Any]] = {
        "config.json": {**COMMON, **SHAPES[name]},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": characters[2]},
    }
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content), "utf-8")
    return directory


def layout_of(directory: Path) -> Layout:
    """Return the layout of the model whose configuration lies there."""
    return checkpoint_layout(str(directory), "auto")


def random_bits(layout: Layout, seed: int, scale: float = SCALE) -> dict[str, NDArray[Any]]:
    """Draw stored bits of float32 or bfloat16 values: near 1 for norms, small for all else.

    One draw is repeated along each tensor: at 7B, drawing all of it would take a minute.
    """
    dice = np.random.default_rng(seed)
    drawn = dice.normal(0, scale, (1 << 20) + 7).astype(np.float32)
    found = {}
    for spec in layout.tensors:
        values = 1 + drawn if "norm" in spec.name else drawn
        bits = values.view(np.uint32)
        if spec.bits_dtype == np.uint16:
            bits = (bits >> 16).astype(np.uint16)
        found[spec.name] = np.resize(bits, spec.element_count)
    return found


def change(bits: Mapping[str, NDArray[Any]], fraction: float, seed: int) -> None:
    """Move that fraction of the elements, anywhere, by one step of their stored bits; none twice."""
    dice = np.random.default_rng(seed)
    for flat in bits.values():
        count = round(fraction * len(flat))
        if count:
            stride = len(flat) // count
            places = np.arange(count, dtype=np.int64) * stride + dice.integers(0, stride, count)
            flat[places] ^= flat.dtype.type(1)


def save(directory: Path, layout: Layout, bits: Mapping[str, NDArray[Any]]) -> None:
    """Write a checkpoint beside the configuration, as any library reads it."""
    dtypes = {"float32": "F32", "bfloat16": "BF16"}
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in layout.tensors:
        start, end = end, end + spec.byte_count
        head[spec.name] = {"dtype": dtypes[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in layout.tensors:
            file.write(bits[spec.name].data)
