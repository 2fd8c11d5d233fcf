"""Keeps a CPU engine's weights where a write changes what is computed.

- On a CPU vLLM packs each linear layer's weight for its kernels after loading, and drops the weight: there is nothing
  left to write. Engines with our weight transfer keep the weight. The part that a commit changes is packed beside the
  old one while the engine generates, and the commit only switches.
- torch's own `linear` over the live weight would do without packing, but takes twice the time, and computes other bits
  for a batch than for one request.
- Engines without our transfer, in the same process or another, are as they were.
- On a GPU nothing is packed, and nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..common.names import BACKEND

if TYPE_CHECKING:
    from .prepared import GoOn, Prepared

PRIMITIVES_KEPT = 32  # shapes of input that a layer's kernels stay compiled for: vLLM's own number


class PackedLinear:
    """Computes with oneDNN over a packed copy of a layer's weight (out, in)."""

    def __init__(self, weight: Any) -> None:
        self.handler = packed(weight)

    def __call__(self, x: Any, weight: Any, bias: Any) -> Any:
        """Multiply: x (…, in) → (…, out)."""
        from vllm import _custom_ops as ops

        return ops.onednn_mm(self.handler, x, bias)


def packed(weight: Any) -> Any:
    """Pack what `weight` holds now, for oneDNN to compute with."""
    from vllm import _custom_ops as ops

    return ops.create_onednn_mm(weight.t(), PRIMITIVES_KEPT)


def packed_beside(model: Any, prepared: Prepared, go_on: GoOn) -> Callable[[], None]:
    """Pack each layer that a commit changes, as it will be; the result, when called, switches the layers to that."""
    found = []
    for module in model.modules():
        linear = getattr(module, "cpu_linear", None)
        if isinstance(linear, PackedLinear):
            go_on()
            weight = prepared.applied(module.weight.data)
            if weight is not None:
                found.append((linear, packed(weight)))

    def switch() -> None:
        for linear, handler in found:
            linear.handler = handler

    return switch


def pack_again(model: Any) -> None:
    """Pack every layer's weight again, after a write that was none of our commits."""
    for module in model.modules():
        linear = getattr(module, "cpu_linear", None)
        if isinstance(linear, PackedLinear):
            linear.handler = packed(module.weight)


def keep_weights_live() -> None:
    """Have vLLM keep linear weights beside what is packed of them, in engines whose weight transfer is ours.

    Call in every process of vLLM before a model is loaded; may be called again.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm import _custom_ops as ops
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, "keeps_live", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        transfer = None if config is None else config.weight_transfer_config
        if transfer is None or transfer.backend != BACKEND:
            pack(layer, remove_weight)
        elif layer.weight.is_meta or layer.weight.ndim != 2 or not ops._supports_onednn:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            layer.cpu_linear = PackedLinear(layer.weight)

    dispatch.keeps_live = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch
    _pack_after_reloads()


def _pack_after_reloads() -> None:
    """Pack again after vLLM's own reloading of a checkpoint, which forgets an output layer tied to the embedding."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    reload_weights = CPUModelRunner.reload_weights

    def reload_and_pack(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = reload_weights(runner, *args, **kwargs)
        pack_again(runner.get_model())
        return result

    CPUModelRunner.reload_weights = reload_and_pack
