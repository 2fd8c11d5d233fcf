"""A small decoder under the names of its Hugging Face checkpoint, and the parts of it that ranks of Megatron hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

LAYER_COUNT, HIDDEN, HEADS, GROUPS, HEAD_SIZE, FFN, VOCABULARY = 4, 16, 8, 4, 6, 24, 45
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=HEAD_SIZE, gated_linear_unit=True
)
PADDED = 64  # rows of the vocabulary: a multiple of what Megatron pads to

Tensors = dict[str, Any]


def checkpoint(seed: int = 0) -> Tensors:
    """The whole model: biases at queries, keys and values as Qwen2 has, norms of queries and keys as Qwen3 has."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for number in range(LAYER_COUNT):
        layer = f"model.layers.{number}"
        for name, rows in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows * HEAD_SIZE, HIDDEN)
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows * HEAD_SIZE,)
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            f"{layer}.self_attn.q_norm.weight": (HEAD_SIZE,),
            f"{layer}.self_attn.k_norm.weight": (HEAD_SIZE,),
            f"{layer}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    dice = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}


def stage(whole: Tensors, tp_rank: int, tp_size: int, layers: range) -> Iterator[tuple[str, Any]]:
    """The parameters of one rank, as Megatron-Core names and lays them out; layers: of its stage of the pipeline."""

    def padded(name: str) -> Any:
        rows = torch.zeros(PADDED, HIDDEN)
        rows[:VOCABULARY] = whole[name]
        return rows.chunk(tp_size)[tp_rank].clone()

    if layers.start == 0:
        yield "module.module.embedding.word_embeddings.weight", padded("model.embed_tokens.weight")
    for local, number in enumerate(layers):
        mine, theirs = f"module.module.decoder.layers.{local}", f"model.layers.{number}"
        of = {name.removeprefix(f"{theirs}."): each for name, each in whole.items() if name.startswith(f"{theirs}.")}
        yield f"{mine}.self_attention.linear_qkv.layer_norm_weight", of["input_layernorm.weight"]
        for kind in ("weight", "bias"):
            fused = []
            for group in range(GROUPS * tp_rank // tp_size, GROUPS * (tp_rank + 1) // tp_size):
                for head in range(HEADS // GROUPS * group, HEADS // GROUPS * (group + 1)):
                    fused += [*of[f"self_attn.q_proj.{kind}"][HEAD_SIZE * head : HEAD_SIZE * (head + 1)]]
                fused += [*of[f"self_attn.k_proj.{kind}"][HEAD_SIZE * group : HEAD_SIZE * (group + 1)]]
                fused += [*of[f"self_attn.v_proj.{kind}"][HEAD_SIZE * group : HEAD_SIZE * (group + 1)]]
            yield f"{mine}.self_attention.linear_qkv.{kind}", torch.stack(fused)
        yield f"{mine}.self_attention.q_layernorm.weight", of["self_attn.q_norm.weight"]
        yield f"{mine}.self_attention.k_layernorm.weight", of["self_attn.k_norm.weight"]
        columns = of["self_attn.o_proj.weight"].chunk(tp_size, dim=1)[tp_rank]
        yield f"{mine}.self_attention.linear_proj.weight", columns.clone()
        yield f"{mine}.mlp.linear_fc1.layer_norm_weight", of["post_attention_layernorm.weight"]
        halves = [of[f"mlp.{half}_proj.weight"].chunk(tp_size)[tp_rank] for half in ("gate", "up")]
        yield f"{mine}.mlp.linear_fc1.weight", torch.cat(halves)
        yield f"{mine}.mlp.linear_fc2.weight", of["mlp.down_proj.weight"].chunk(tp_size, dim=1)[tp_rank].clone()
    if layers.stop == LAYER_COUNT:
        yield "module.module.decoder.final_layernorm.weight", whole["model.norm.weight"]
        yield "module.module.output_layer.weight", padded("lm_head.weight")
