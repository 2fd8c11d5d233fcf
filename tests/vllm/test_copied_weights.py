"""What vLLM's latent attention keeps of a weight is made again within a commit without taking memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import MLAAttention

from rollfab.fabric.contract.errors import EngineUnsupported
from rollfab.workers.engines.vllm.inplace.copied_weights import TAKES_MEMORY, check_live, derive_again, derived_names

HEADS, NOPE, VALUE, RANK = 4, 32, 16, 64
DTYPE = torch.bfloat16


class Taken(TorchDispatchMode):
    """Counts the bytes of memories that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
            self.byte_count += made.untyped_storage().nbytes()
        return made


class Latent(MLAAttention):  # type: ignore[misc]
    """vLLM's layer with what its process_weights_after_loading reads, and no more: the rest wants a running vLLM."""

    def __init__(self, weight: torch.Tensor, **settings: bool) -> None:
        torch.nn.Module.__init__(self)
        self.kv_b_proj = torch.nn.Module()
        self.kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.kv_b_proj.quant_method = None
        self.impl = SimpleNamespace(process_weights_after_loading=lambda dtype: None)
        self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim, self.v_head_dim = RANK, HEADS, NOPE, VALUE
        self.quant_config, self.layer_name = None, "latent"
        self.is_amx_bmm_enabled = self.dcp_q_replicate = False
        self.is_aiter_triton_fp4_bmm_enabled = self.is_aiter_triton_fp8_bmm_enabled = False
        for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            self.register_buffer(name, torch.ones(()))
        for name, value in settings.items():
            setattr(self, name, value)


def weight(seed: int) -> torch.Tensor:
    return torch.randn(HEADS * (NOPE + VALUE), RANK, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def test_absorbed_matrices_follow_a_write_in_place_and_take_no_memory() -> None:
    # Given a layer that holds its matrices apart from the weight
    latent = Latent(weight(1))
    derive_again(latent, DTYPE)
    for name in derived_names(latent):
        owned = getattr(latent, name.removeprefix("."))
        owned.data = owned.data.clone()
    places = {name: getattr(latent, name.removeprefix(".")).data_ptr() for name in derived_names(latent)}

    # When its weight is written
    fresh = weight(2)
    with torch.no_grad(), Taken() as taken:
        latent.kv_b_proj.weight.copy_(fresh)
        derive_again(latent, DTYPE)

    # Then they are what a layer that loaded that weight has, where they were
    loaded = Latent(weight(2))
    derive_again(loaded, DTYPE)
    assert places and places == {name: getattr(latent, name.removeprefix(".")).data_ptr() for name in places}
    assert all(torch.equal(getattr(latent, name[1:]), getattr(loaded, name[1:])) for name in places)
    assert taken.byte_count <= 16  # two scales on the host


def test_what_takes_memory_is_seen() -> None:
    latent = Latent(weight(1))
    with torch.no_grad(), Taken() as taken:
        derive_again(latent, torch.float32)  # of another dtype: vLLM converts the weight first
    assert taken.byte_count >= 4 * latent.kv_b_proj.weight.numel()


@pytest.mark.parametrize("name", TAKES_MEMORY)
def test_layers_that_take_memory_within_a_commit_are_refused_with_the_cure(name: str) -> None:
    latent = Latent(weight(1), **{name: True})
    model = torch.nn.Module()
    model.attention = latent
    with pytest.raises(EngineUnsupported, match=TAKES_MEMORY[name]):
        check_live(model)
    setattr(latent, name, False)
    check_live(model)
