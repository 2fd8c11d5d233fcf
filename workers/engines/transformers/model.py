"""The model inside the transformers engine: how it is built, what its tensors are, and how they are written in place.

- Parameters never move: weights are written into the storage they have, so views and captured graphs stay valid.
- Only the engine's thread writes, between two steps.
- A commit is checked whole before its first byte is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from ....fabric.chat.vision import FAMILIES
from ....fabric.contract.errors import EngineError, EngineUnsupported
from ....fabric.contract.text import DAMAGED
from ....fabric.format.layout import Layout, TensorSpec
from ....fabric.inspect.safetensors import damage_in
from ....fabric.model.presets import is_preset, model_config
from ....fabric.versions.commit import COMMIT_THREAD_COUNT_MAX, write
from ..base import Bits, Writes

PRESET_SEED = 0  # a preset starts from the same random weights in every process
INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load_model(model: str, dtype: str, device: str) -> Any:
    """A causal language model in evaluation mode, on its device.

    Args:
        model: preset, path or hub name.
        dtype: torch's name without the prefix.
        device: torch's name, like "cpu" or "cuda:0".

    Raises:
        EngineError: it can not be loaded.
        EngineUnsupported: it is quantised, or sees.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise EngineError(f"dtype {dtype!r} is no floating-point type of torch: use float32 or bfloat16", dtype=dtype)
    try:
        loaded = _from_preset(model, torch_dtype) if is_preset(model) else _from_hub(model, torch_dtype)
        return loaded.to(device).eval().requires_grad_(False)
    except SafetensorError as error:
        why = damage_in(Path(model)) or f"one of its files cannot be read as safetensors. {DAMAGED}"
        raise EngineError(f"model {model!r} can not be loaded: {why}", model=model) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(f"model {model!r} can not be loaded on {device}: {error}", model=model) from error


def _from_preset(model: str, dtype: torch.dtype) -> Any:
    options = model_config(model)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.random.fork_rng(devices=[]):  # the random state of whoever shares this process stays as it was
        torch.manual_seed(PRESET_SEED)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def _from_hub(model: str, dtype: torch.dtype) -> Any:
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise EngineUnsupported(
            f"model {model!r} is quantised: a run's weights are written as the bits that are published. Give the"
            " unquantised model",
            model=model,
        )
    if config.model_type in FAMILIES:
        raise EngineUnsupported(
            f"model {model!r} sees, and this engine reads tokens alone: take --engine vllm", model=model
        )
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)


class ParameterStore:
    """A model's parameters as stored bits: reads for everyone, writes for the engine's thread.

    On a CPU the bits are the parameters themselves. On any other device they are a copy in host memory, and a
    commit writes both: the device through index_copy_ on an integer view, then the copy. The device path has not
    been run on a GPU yet.
    """

    def __init__(self, model: Any) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():  # yields tied parameters once
            if not parameter.is_contiguous():
                raise EngineError(f"parameter {name!r} is not contiguous: it has no flat view to write to", name=name)
            tensor = parameter.detach()
            self._parameters[name] = tensor.view(INTEGER_OF_BYTES[tensor.element_size()]).view(-1)
        self.layout = Layout(
            tuple(
                TensorSpec(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
                for name, parameter in model.named_parameters()
            )
        )
        self._thread_count = min(COMMIT_THREAD_COUNT_MAX, torch.get_num_threads())
        self._device = next(iter(self._parameters.values())).device
        self._on_host = self._device.type == "cpu"
        self._bits: dict[str, Bits] = {name: _host_bits(flat) for name, flat in self._parameters.items()}
        self.bits: dict[str, Bits] = {name: _read_only(bits) for name, bits in self._bits.items()}

    def commit(self, writes: Writes) -> None:
        """Write checked values in place.

        Raises:
            IndexError: an index is out of range; earlier tensors are written, so the model is torn.
        """
        if not self._on_host:
            for name, (indices, values) in writes.items():
                self._write_device(self._parameters[name], indices, values)
        write(writes, self._bits, thread_count=self._thread_count)
        if not self._on_host:
            torch.accelerator.synchronize(self._device)  # another device may be this thread's current one

    def read(self, name: str) -> Bits:
        """A copy of one parameter's bits as they are on the device now; for the engine's thread."""
        bits = _host_bits(self._parameters[name])
        return _read_only(bits.copy() if self._on_host else bits)

    @staticmethod
    def _write_device(flat: torch.Tensor, indices: NDArray[np.int64] | None, values: Bits) -> None:
        source = torch.from_numpy(np.ascontiguousarray(values)).view(flat.dtype)
        if indices is None:
            flat.copy_(source, non_blocking=True)
        else:
            positions = torch.from_numpy(np.ascontiguousarray(indices)).to(flat.device, non_blocking=True)
            flat.index_copy_(0, positions, source.to(flat.device, non_blocking=True))


def _host_bits(flat: torch.Tensor) -> Bits:
    array: Bits = flat.cpu().numpy()  # shares memory with a CPU tensor, copies any other
    return array.view(np.dtype(f"<u{array.itemsize}"))


def _read_only(bits: Bits) -> Bits:
    view = bits.view()
    view.flags.writeable = False
    return view
