"""Model presets: architectures small enough to train on a CPU, by name.

- A preset is a plain config (the keyword arguments of the architecture's config class); nothing is downloaded.
- Whoever builds a preset starts from random weights; workers and trainer agree once version 0 is published.
- A name that is no preset is a path or a hub name, and is left to the library that loads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .errors import ConfigError
from .tokenizer import CharTokenizer

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
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


def check_model_name(model: str) -> None:
    """Refuse a model that is surely not there, before anything is started.

    A preset, or a directory of a model, is fine. A name in a hub's form (`name`, `owner/name`) is left to the library
    that loads it: only the network knows whether it is there.

    Raises:
        ConfigError: the text says what is wrong with the path, and what may be given.
    """
    if is_preset(model) or (HUB_NAME.fullmatch(model) and not os.path.exists(model)):
        return
    if not os.path.lexists(model) or not model:
        why = "there is no such directory, and it is no hub name"
    elif not os.path.isdir(model):
        why = "it is not a directory: name the one that holds its config.json"
    elif not os.path.isfile(os.path.join(model, "config.json")):
        why = "that directory holds no config.json: save the model there with `save_pretrained`"
    else:
        return
    raise ConfigError(
        f"model {model!r}: {why}. Give a preset ({', '.join(PRESETS)}), the directory of a model, or a hub name",
        name=model,
    )


def preset_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The parameters of a preset, by the names that its library gives them; the head is the embedding."""
    config = model_config(name)
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    keys = width // heads * config["num_key_value_heads"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    layers = {
        f"model.layers.{number}.{part}": shape
        for number in range(config["num_hidden_layers"])
        for part, shape in layer.items()
    }
    ends = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    return {**layers, **ends}


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
