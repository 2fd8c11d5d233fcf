"""Model presets: architectures small enough to train on a CPU, by name.

- A preset is a plain config (the keyword arguments of the architecture's config class); nothing is downloaded.
- Every process that builds a preset starts from random weights; workers and trainer agree once version 0 is published.
- A name that is no preset is a path or a hub name, and is left to the library that loads it.
- A path means the same wherever it is said: it is made absolute, without links, and its files are known by a digest.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..contract.errors import ConfigError, WireError
from ..contract.text import DAMAGED, did_you_mean
from ..contract.wire import load_json
from .tokenizer import CharTokenizer

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
PRESET_DTYPE = "float32"  # also where libraries would take bfloat16, on a GPU: a run's weights must fit all its workers
PRESET_CUTOFF = 0.75  # a name so near to a preset's, by difflib, is a misspelling: one letter of four or five
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
    """Tell whether `name` is built here rather than loaded from a path or hub."""
    return name in PRESETS


def dtype_of(model: str, wanted: str) -> str:
    """Choose the dtype to hold a model's weights in: `wanted`, one of DTYPES.

    "auto" is float32 for a preset, on every device; for any other model it stays "auto", which is its library's choice.
    """
    return PRESET_DTYPE if wanted == "auto" and is_preset(model) else wanted


def check_model_name(model: str) -> None:
    """Refuse a model that is surely not there, before anything is started.

    A preset, or a directory of a model, is fine. A name in a hub's form (`name`, `owner/name`) is left to the library
    that loads it: only the network knows whether it is there.

    Raises:
        ConfigError: the text says what is wrong with the path, and what may be given.
    """
    if is_preset(model):
        return None
    if HUB_NAME.fullmatch(model) and not os.path.exists(model):
        return check_spelling(model)
    if not os.path.lexists(model) or not model:
        why = "there is no such directory, and it is no hub name"
    elif not os.path.isdir(model):
        why = "it is not a directory: name the one that holds its config.json"
    elif not os.path.isfile(os.path.join(model, "config.json")):
        why = "that directory holds no config.json: save the model there with `save_pretrained`"
    else:
        return None
    raise ConfigError(
        f"model {model!r}: {why}. Give a preset ({', '.join(PRESETS)}), the directory of a model, or a hub name",
        name=model,
    )


def check_tokenizer_files(model: str) -> None:
    """Refuse a directory without any tokenizer's file, before anything that must read and write texts is started.

    Raises:
        ConfigError: names the file that is missing, or damaged.
    """
    if is_preset(model) or not os.path.isdir(model):
        return
    for name in ("config.json", *TOKENIZER_FILES):
        if name.endswith(".json"):
            _check_json(Path(model) / name)
    if not any(os.path.isfile(os.path.join(model, name)) for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model {model!r} has no tokenizer: that directory holds no tokenizer.json, nor another tokenizer's file, "
            "and without one its agents read no text. Save the tokenizer there with `save_pretrained`",
            name=model,
        )


def _check_json(path: Path) -> None:
    """Refuse a model's file that is there and no JSON object, before a library does in words of its own."""
    try:
        found = load_json(path.read_bytes()) if path.is_file() else {}
        if not isinstance(found, dict):
            raise WireError("it is no JSON object")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
    except WireError as error:
        raise ConfigError(f"{path} cannot be read: {error.message}. {DAMAGED}", path=str(path)) from error


def check_spelling(model: str) -> None:
    """Refuse a name that is surely a preset's, misspelt: a hub would be asked for it in vain, and nobody holds it.

    Raises:
        ConfigError: names the preset that is meant.
    """
    near = difflib.get_close_matches(model.lower()[:100], PRESETS, n=1, cutoff=PRESET_CUTOFF)
    if near and not is_preset(model):
        raise ConfigError(
            f"there is no model {model!r}: did you mean {near[0]!r}? A preset is one of {', '.join(PRESETS)}; a"
            f" directory of that name is written ./{model}, a model of a hub OWNER/{model}",
            name=model,
        )


def preset_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """List a preset's parameters with their shapes, by its library's names; the head is the embedding."""
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
    """Return a fresh copy of the preset's config; "model_type" names the architecture.

    Raises:
        ConfigError: no such preset; the text lists those there are.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"model {name!r} is no preset: {did_you_mean(name, PRESETS, 'Or load it as a path or hub name')}", name=name
        )
    return dict(PRESETS[name])


def context_of(model: str) -> int:
    """Return how many tokens a model's context has, as its config says; 0: it is not known here."""
    if is_preset(model):
        return int(PRESETS[model]["max_position_embeddings"])
    try:
        config = json.loads((Path(model) / "config.json").read_bytes())
        found = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return 0
    return found if isinstance(found, int) and found > 0 else 0


TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
UNSAID = ("transformers_version",)  # of config.json: which library wrote it does not make another model; nor does "_…"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """The model that a name means here. digest: of its files; "": it has none that could be read here."""

    name: str
    digest: str = ""


def is_path(name: str) -> bool:
    """Tell whether a name can only be a path: a hub name begins with a letter or digit."""
    return name.startswith(("/", ".", "~"))


def find_model(name: str) -> FoundModel:
    """Find a model by its name: presets and hub names as they are, local paths absolute, with their files' digest.

    Raises:
        ConfigError: it can only be a path, and no model is there, or its config.json is damaged; or it is a preset's,
            misspelt.
    """
    if (place := model_place(name)) is not None:
        if place.is_file() and place.suffix != ".gguf":
            raise ConfigError(f"model {name!r} is a file: give the path of a directory with a config.json", name=name)
        _check_json(place / "config.json")
        return FoundModel(name=str(place), digest=_digest(place))
    if is_path(name):
        raise ConfigError(
            f"model {name!r}: there is no such file or directory on this machine; give the path of a directory with a "
            f"config.json, a preset ({', '.join(PRESETS)}), or a hub name",
            name=name,
        )
    check_spelling(name)
    return FoundModel(name=name)


def model_place(name: str) -> Path | None:
    """Return what a model's name stands for on this machine's disk, without links; None: it is no path of this one."""
    if is_preset(name):
        return None
    try:
        place = Path(name).expanduser().resolve()
        is_here = place.exists() if is_path(name) else (place / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # a name that no path can have, or "~nobody"
        return None
    return place if is_here else None


def _digest(place: Path) -> str:
    """Digest the files that make a model's architecture and tokens, 16 hex digits; "" where they cannot be read."""
    try:
        config = json.loads((place / "config.json").read_bytes())
        found = hashlib.sha256()
        kept = {key: value for key, value in config.items() if not key.startswith("_") and key not in UNSAID}
        found.update(json.dumps(kept, sort_keys=True).encode())
        for name in TOKENIZER_FILES:
            path = place / name
            if path.is_file():
                found.update(f"\n{name}\n".encode())
                found.update(path.read_bytes())
    except (OSError, ValueError, AttributeError):
        return ""
    return found.hexdigest()[:16]
