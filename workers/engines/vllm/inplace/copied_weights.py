"""Checks whether vLLM computes with the weights that its loader writes, or with copies made from them after loading.

- A write into a parameter that nothing reads is ignored without a word. So only layers known to compute with the
  parameter itself are accepted; any other is refused, by name, before the first write.
- Some attention layers keep tensors made from a weight (latent attention its absorbed matrices, some kernels their
  sinks in float32). Their own code makes them again within every commit, in place and without taking memory; where it
  would take some, the layer is refused, as a commit that finds none would end half-way.
- The mixture-of-experts and GPU branches are read from vLLM's source and unverified on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.attention.backend import AttentionImplBase

from .....fabric.contract.errors import EngineUnsupported

PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
PLAIN_MOE = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)  # the others reorder the weights
AMX = "AMXMLAImpl"  # latent attention of CPUs with AMX, which vLLM takes by itself
TAKES_MEMORY = {  # what latent attention may be told, each with its cure
    "dcp_q_replicate": "--no-dcp-q-replicate",
    "is_aiter_triton_fp4_bmm_enabled": "VLLM_ROCM_USE_AITER_FP4BMM=0",
    "is_aiter_triton_fp8_bmm_enabled": "VLLM_ROCM_USE_AITER_FP8BMM=0",
}
ATTENTION = tuple(kind.process_weights_after_loading for kind in (Attention, MLAAttention, MMEncoderAttention))


def check_live(model: torch.nn.Module) -> None:
    """Require that every layer computes with its parameters themselves.

    Raises:
        EngineUnsupported: names the first that does not, and the cure.
    """
    latent: list[Any] = [module for module in model.modules() if isinstance(module, MLAAttention)]
    for_amx = [module.kv_b_proj for module in latent if type(module.impl).__name__ == AMX]
    for name, module in model.named_modules():
        why = _packed(module) or _transformed(module)
        if why and any(module is each for each in for_amx):
            why = "latent attention packs its weight for AMX. Start vLLM with --attention-backend CPU_MLA"
        if why:
            raise EngineUnsupported(f"vLLM's {name or 'model'} can not be written in place: {why}", module=name)


def derived_names(model: torch.nn.Module) -> frozenset[str]:
    """Name the parameters that latent attention makes from other ones."""
    return frozenset(
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, MLAAttention)
        for own, _ in module.named_parameters(recurse=False)
    )


def derive_again(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Have attention layers make again what they keep of a weight, at the same addresses; called after a write.

    Takes no memory but a few bytes a layer: of weights of this dtype, latent attention copies views
    (`MLAAttention.process_weights_after_loading`, `replace_parameter` in vLLM 0.32).

    Args:
        dtype: what vLLM computes in.
    """
    modules: list[Any] = [module for module in model.modules() if _keeps_copies(module)]
    for module in modules:
        module.process_weights_after_loading(dtype)


def _keeps_copies(module: Any) -> bool:
    if isinstance(module, MLAAttention):
        return True
    own = type(module.impl).process_weights_after_loading if isinstance(module, Attention) else None
    return own is not None and own is not AttentionImplBase.process_weights_after_loading


def _packed(module: Any) -> str:
    empty = [name for name, parameter in module.named_parameters(recurse=False) if parameter.numel() == 0]
    linear = getattr(module, "cpu_linear", None)
    # torch's own linear, and vLLM's wrapper of it, hold nothing; those with packed weights hold them in a closure
    if empty or getattr(linear, "__closure__", None):
        return (
            f"its {empty[0] if empty else 'weight'} was packed for the CPU after loading, and writes would be ignored."
            " Start vLLM with rollfab installed in its environment, weight_transfer_config={'backend': 'rollfab'}, and"
            " VLLM_PLUGINS unset or naming 'rollfab'"
        )
    return ""


def _transformed(module: Any) -> str:
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedFusedMoEMethod):
        if method.unquantized_backend in PLAIN_MOE:
            return ""
        return (
            f"its experts are rearranged for the kernels {method.unquantized_backend.value}. Start vLLM with"
            " --moe-backend triton"
        )
    if isinstance(method, QuantizeMethodBase) and not _is_plain(method):
        return f"its weights are transformed by {type(method).__name__}. Serve the model unquantised"
    if isinstance(module, MLAAttention):
        return _takes_memory(module)
    process = getattr(type(module), "process_weights_after_loading", None)
    if process is not None and process not in ATTENTION:
        return f"{type(module).__name__} computes with tensors that it makes from its weights after loading"
    return ""


def _takes_memory(latent: Any) -> str:
    cure = next((cure for name, cure in TAKES_MEMORY.items() if getattr(latent, name, False)), "")
    return f"it would take memory within every commit. Start vLLM with {cure}" if cure else ""


def _is_plain(method: QuantizeMethodBase) -> bool:
    process = type(method).process_weights_after_loading
    return any(process is plain.process_weights_after_loading for plain in PLAIN_METHODS)
