"""Checkpoints on disk, made by the tests with numpy: nothing is downloaded, nothing computed with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from rollfab.fabric.model.presets import model_config
from rollfab.workers.engines.vllm.common.layout import checkpoint_layout


def write_config(directory: Path, **overrides: Any) -> Path:
    """A directory with the configuration of the tiny preset, changed as told."""
    directory.mkdir(parents=True, exist_ok=True)
    text = {**model_config("tiny"), "architectures": ["Qwen2ForCausalLM"], "dtype": "float32", **overrides}
    (directory / "config.json").write_bytes(orjson.dumps(text))
    return directory


def random_tensors(directory: Path, seed: int, scale: float = 0.25) -> dict[str, Any]:
    """float32 values for every tensor of the model configured there, large enough that every token hangs on them."""
    dice = np.random.default_rng(seed)
    tensors = {}
    for spec in checkpoint_layout(str(directory), "float32").tensors:
        values = dice.normal(0, scale, spec.shape).astype(np.float32)
        tensors[spec.name] = 1 + values if "norm" in spec.name else values
    return tensors


def write_checkpoint(directory: Path, tensors: dict[str, Any], **overrides: Any) -> Path:
    """A checkpoint as any library saves it."""
    write_config(directory, **overrides)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory
