"""Learns what a checkpoint's tensors are called, without loading it.

- Names and shapes are those that the trainer's torch model gives, not those that vLLM fuses them into.
- The model is built on the meta device: no memory, no arithmetic, so a process that did it may still be forked.
"""

from __future__ import annotations

from .....fabric.chat.vision import FAMILIES
from .....fabric.contract.errors import EngineError
from .....fabric.format.layout import ELEMENT_BYTES, Layout, TensorSpec


def checkpoint_layout(model_path: str, dtype: str) -> Layout:
    """List the tensors of a model's named_parameters() as a layout, tied parameters once.

    The model is what AutoModelForCausalLM makes; of those that see, AutoModelForImageTextToText.

    Args:
        model_path: directory with a config.json, or hub name.
        dtype: torch's name without the prefix; "auto": what the config says, float32 where it says nothing.

    Raises:
        EngineError: no such checkpoint, or transformers does not know the model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if dtype != "auto" and dtype not in ELEMENT_BYTES:
        raise EngineError(f"dtype {dtype!r} is none of {', '.join(ELEMENT_BYTES)}", dtype=dtype)
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        chosen = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
        kind = AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(config, dtype=chosen)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise EngineError(
            f"the tensors of model {model_path!r} can not be listed: {error}. It must be a directory with a config.json"
            " or a hub name, of a causal language model that transformers knows",
            model=model_path,
        ) from error
    return Layout(
        tuple(
            TensorSpec(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
            for name, parameter in model.named_parameters()  # yields tied parameters once
        )
    )


def vocabulary_size(model_path: str) -> int:
    """Count the token ids that the model knows, from 0. The config must be there: see `checkpoint_layout`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)


def sees(model_path: str) -> bool:
    """Tell whether a model is of a family whose images are taken. The config must be there."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path, trust_remote_code=False).model_type in FAMILIES


def quantization_of(model_path: str) -> str | None:
    """Say how a checkpoint's weights are quantised, by its config; None: they are not. The config must be there."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    found = getattr(config, "quantization_config", None)
    said = found if isinstance(found, dict) or found is None else found.to_dict()
    return None if said is None else str(said.get("quant_method") or "unnamed")
