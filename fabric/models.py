"""Model presets: architectures small enough to train on a CPU, by name.

- A preset is a plain config (the keyword arguments of the architecture's config class); nothing is downloaded.
- Whoever builds a preset starts from random weights; workers and trainer agree once version 0 is published.
- A name that is no preset is a path or a hub name, and is left to the library that loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .errors import ConfigError
from .tokenizer import CharTokenizer

_COMMON = {
    "model_type": "qwen2",
    "vocab_size": CharTokenizer.vocabulary_size,
    "pad_token_id": CharTokenizer.pad_id,
    "bos_token_id": CharTokenizer.bos_id,
    "eos_token_id": CharTokenizer.eos_id,
    "tie_word_embeddings": True,
}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # 138,432 parameters: a decode step takes about a millisecond on one core
        "tiny": {
            **_COMMON,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        },
        # 3,268,416 parameters: the smallest that learns more than a toy environment
        "small": {
            **_COMMON,
            "hidden_size": 192,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
        },
    }
)


def is_preset(name: str) -> bool:
    """Whether `name` is built here rather than loaded from a path or hub."""
    return name in PRESETS


def model_config(name: str) -> dict[str, Any]:
    """A fresh copy of the preset's config; "model_type" names the architecture.

    Raises:
        ConfigError: no such preset; the text lists those there are.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"model {name!r} is no preset: use one of {', '.join(PRESETS)}, or load it as a path or hub name", name=name
        )
    return dict(PRESETS[name])
