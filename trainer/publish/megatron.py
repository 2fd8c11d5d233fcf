"""Slices of a Megatron-Core model under the names that its Hugging Face checkpoint has, without gathering anything.

- For dense decoders of the Llama and Qwen form (gated MLP, RMS norms, grouped queries, biases and norms of queries and
  keys where they have them), split by tensor and pipeline parallelism. What has another name is refused, never guessed.
- Megatron keeps queries, keys and values of a query group side by side, gate and up of a rank one above the other, a
  norm within the linear layer that follows (Transformer Engine), and the vocabulary padded. Source of these forms:
  Megatron-Bridge, models/conversion/param_mapping.py (QKVMapping, GatedMLPMapping, AutoMapping).
- Tested with parameters laid out so; not yet with Megatron-Core itself.
- Queries, keys and values are copied to be in order, a third of the attention weights at most; all else is a view.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...fabric.contract.errors import InputError
from .slices import Slice

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
WHOLE = {  # the same on every rank of a tensor-parallel group
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
COLUMNS = {  # split along dimension 1
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
QKV, FC1 = "self_attention.linear_qkv.", "mlp.linear_fc1.weight"


@dataclass(frozen=True)
class _Split:
    """See `megatron_slices`."""

    rank: int
    size: int
    head_count: int
    group_count: int
    head_size: int

    def rows(self, tensor: Any, row_count: int | None = None) -> Slice | None:
        """This rank's equal part of the rows; None if all of it is padding. row_count: without padding."""
        start, end = self.rank * len(tensor), (self.rank + 1) * len(tensor)
        row_count = self.size * len(tensor) if row_count is None else row_count
        if start >= row_count:
            return None
        kept = tensor[: min(end, row_count) - start]
        rest = tuple(tensor.shape[1:])
        return Slice(kept, (row_count, *rest), (start, *(0 for _ in rest)))

    def columns(self, tensor: Any) -> Slice:
        row_count, count = tensor.shape
        return Slice(tensor, (row_count, count * self.size), (0, self.rank * count))

    def attention(self, tensor: Any, kind: str) -> Iterator[tuple[str, Slice]]:
        """The fused projection: for each query group its queries, its key and its value. kind: weight or bias."""
        per_group = self.head_count // self.group_count
        rest = tuple(tensor.shape[1:])
        groups = tensor.reshape(self.group_count // self.size, per_group + 2, self.head_size, *rest)
        parts = {"q": groups[:, :per_group], "k": groups[:, per_group], "v": groups[:, per_group + 1]}
        for name, part in parts.items():
            made = self.rows(part.reshape(-1, *rest))
            assert made is not None
            yield f"self_attn.{name}_proj.{kind}", made


def megatron_slices(
    named: Iterable[tuple[str, Any]],
    config: Any,
    *,
    vocabulary_size: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    first_layer: int = 0,
    is_tied: bool = False,
) -> Iterator[tuple[str, Slice]]:
    """Yield what this rank holds of the model, for `run.publish(…, group=…)` on every rank.

    Args:
        named: `named_parameters()` of the rank's part of the model; of several chunks call this for each.
        config: the model's TransformerConfig: num_attention_heads, num_query_groups, kv_channels, gated_linear_unit.
        vocabulary_size: without Megatron's padding.
        tp_rank, tp_size: of parallel_state.get_tensor_model_parallel_rank() and …_world_size().
        first_layer: number of the chunk's first layer in the whole model (get_transformer_layer_offset).
        is_tied: whether the output layer is the embedding: the copy of the last stage is left out.

    Raises:
        InputError: a parameter or a setting that this does not know; names it. Publish a Slice of your own for it.
    """
    group_count = config.num_query_groups or config.num_attention_heads
    if group_count % tp_size:
        raise InputError(f"{group_count} query groups cannot be split over {tp_size} ranks here: publish Slices")
    if not config.gated_linear_unit:
        raise InputError("this model's MLP has no gate (gated_linear_unit is False): publish Slices of your own")
    split = _Split(tp_rank, tp_size, config.num_attention_heads, group_count, config.kv_channels)
    for given, tensor in named:
        name = re.sub(r"^(module\.)+", "", given)
        tensor = tensor.detach()
        if name == "output_layer.weight" and is_tied:
            continue
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            made = split.rows(tensor, vocabulary_size)
            if made is not None:
                yield "lm_head.weight" if name == "output_layer.weight" else "model.embed_tokens.weight", made
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", Slice(tensor, tuple(tensor.shape))
        elif found := LAYER.fullmatch(name):
            for own, part in _of_layer(found[2], tensor, split, given):
                yield f"model.layers.{first_layer + int(found[1])}.{own}", part
        else:
            raise _unknown(given)


def _of_layer(name: str, tensor: Any, split: _Split, given: str) -> Iterator[tuple[str, Slice]]:
    if name in WHOLE:
        yield WHOLE[name], Slice(tensor, tuple(tensor.shape))
    elif name in COLUMNS:
        yield COLUMNS[name], split.columns(tensor)
    elif name in (f"{QKV}weight", f"{QKV}bias"):
        yield from split.attention(tensor, name.removeprefix(QKV))
    elif name == FC1:
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            made = split.rows(half)
            assert made is not None
            yield f"mlp.{part}_proj.weight", made
    else:
        raise _unknown(given)


def _unknown(name: str) -> InputError:
    return InputError(
        f"parameter {name!r} is none that is known of a dense Megatron-Core decoder: publish it as a rollfab.Slice,"
        " under the name that its Hugging Face checkpoint has",
        name=name,
    )
