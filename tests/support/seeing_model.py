"""A small model that sees, with random weights, made here as the hub has them: Qwen2-VL, or Qwen2.5-VL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rollfab.workers.engines.vllm.common.layout import checkpoint_layout
from tests.unit.fabric.chat.families import FAMILIES, IMAGE_TOKEN, build_tokenizer

EYES = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
}
ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "tie_word_embeddings": False,
    "dtype": "float32",
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "do_normalize": True,
    "do_rescale": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 12,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def write_seeing_model(directory: Path, kind: str = "qwen2_vl", seed: int = 1, **overrides: Any) -> Path:
    """Write all files of a model into a directory. An image has 1 to 12 tokens, of 28 x 28 pixels each."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(FAMILIES["qwen2.5-vl"])
    tokenizer.save_pretrained(directory)
    token_ids = {
        "image_token_id": IMAGE_TOKEN,
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    config = {
        **CONFIG,
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vision_config": {"model_type": kind, "depth": 2, "num_heads": 2, "spatial_merge_size": 2, **EYES[kind]},
        "vocab_size": len(tokenizer),
        "video_token_id": len(tokenizer) - 1,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.eos_token_id,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in token_ids.items()},
        **overrides,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    save_file(random_weights(directory, seed), str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def random_weights(directory: Path, seed: int) -> dict[str, Any]:
    """Draw a float32 value for every element of a model's tensors, large enough that every token hangs on them.

    The token of images is never the likeliest: transformers would look for an image in an answer that has it.
    """
    dice = np.random.default_rng(seed)
    tensors = {}
    for spec in checkpoint_layout(str(directory), "float32").tensors:
        values = dice.normal(0, 0.25, spec.shape).astype(np.float32)
        tensors[spec.name] = 1 + values if "norm" in spec.name else values
    tensors["lm_head.weight"][json.loads((directory / "config.json").read_text())["image_token_id"]] = 0
    return tensors
