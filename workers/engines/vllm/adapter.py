"""Weights as a LoRA adapter: the base model stays as it was loaded, the trainer publishes only the adapter.

- The layout is that of the adapter: two matrices for each adapted module, by the names that PEFT gives them in
  `peft.get_peft_model_state_dict(model)`.
- A commit replaces the whole adapter in vLLM at once; it is small. Every request that begins afterwards uses it.
- Before the first commit requests run on the base model, version -1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ....fabric.contract.errors import EngineError
from ....fabric.format.layout import Layout, TensorSpec
from ....fabric.inspect.safetensors import save_bits
from ..base import Writes
from .common.arena import Mirror
from .common.backend import Abilities
from .local import LocalDoor, translated

if TYPE_CHECKING:
    from .common.config import VllmConfig

PREFIX = "base_model.model."  # PEFT's
NAME, NUMBER = "policy", 1  # what vLLM knows the adapter by


def adapter_layout(base: Layout, targets: Sequence[str], rank: int) -> Layout:
    """The tensors of a LoRA adapter of `rank` on every linear module of `base` whose last name is in `targets`.

    lora_A.weight: shape (rank, inputs). lora_B.weight: shape (outputs, rank). Source: LoRA, arXiv 2106.09685.

    Raises:
        EngineError: no module has such a name.
    """
    found = []
    for spec in base.tensors:
        module, _, last = spec.name.rpartition(".")
        if last != "weight" or len(spec.shape) != 2 or module.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = spec.shape
        found.append(TensorSpec(f"{PREFIX}{module}.lora_A.weight", spec.dtype, (rank, inputs)))
        found.append(TensorSpec(f"{PREFIX}{module}.lora_B.weight", spec.dtype, (outputs, rank)))
    if not found:
        raise EngineError(f"the model has no linear module named {' or '.join(targets)}: give other adapter targets")
    return Layout(tuple(found))


class AdapterDoor(LocalDoor):
    """A vLLM of our own whose weights are a LoRA adapter. See common/backend.py, Door."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self._adapter: Mirror | None = None
        self._files = tempfile.TemporaryDirectory(prefix="rollfab-adapter-")
        self._lora: Any = None

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, weights="adapter")

    async def _connect_weights(self) -> None:
        assert self._config.adapter_rank is not None
        layout = adapter_layout(self.facts.layout, self._config.adapter_targets, self._config.adapter_rank)
        self._facts = replace(self.facts, layout=layout)
        self._adapter = Mirror.create(layout)

    async def close(self) -> None:
        await super().close()
        if self._adapter is not None:
            self._adapter.close()
        self._files.cleanup()

    def _lora_request(self) -> Any:
        return self._lora

    async def write(self, writes: Writes, version: int) -> None:
        from vllm.lora.request import LoRARequest

        assert self._adapter is not None
        self._adapter.take(writes)
        with translated(self._config.log_path, "vLLM did not take the adapter"):
            self._save()
            self._lora = LoRARequest(NAME, NUMBER, self._files.name, load_inplace=True)
            if not await self._llm.add_lora(self._lora):
                raise EngineError("vLLM did not load the adapter")
            self._lora = LoRARequest(NAME, NUMBER, self._files.name)
            await self._llm.update_weight_version(str(version))

    def _save(self) -> None:
        """The adapter as PEFT saves it."""
        assert self._adapter is not None
        rank = self._config.adapter_rank
        settings = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": self._config.adapter_alpha or rank,
            "target_modules": list(self._config.adapter_targets),
            "bias": "none",
        }
        directory = Path(self._files.name)
        save_bits(directory / "adapter_model.safetensors", self.facts.layout, self._adapter.bits)
        (directory / "adapter_config.json").write_bytes(orjson.dumps(settings))

    async def read(self, into: Mirror) -> None:
        """Return what was written last: vLLM does not show an adapter's matrices."""
        assert self._adapter is not None
        for name, bits in self._adapter.bits.items():
            into.bits[name][:] = bits
