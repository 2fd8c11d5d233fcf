"""Lets a vLLM without torchvision load Qwen2-VL and Qwen2.5-VL, as its build for CPUs is.

- vLLM takes a function and a processor of images and videos from modules of transformers that need torchvision. The
  function is in the module for Pillow too; the processor is asked for the sizes of images alone, as ours are given to
  vLLM as arrays (engines/vllm/images.py).
- Where torchvision is, nothing is changed here.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from .....fabric.chat.vision import FAMILIES

BY_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


def see_without_torchvision() -> None:
    """Call in every process of vLLM before a model is loaded; may be called again."""
    if find_spec("torchvision") is not None:
        return
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl
    from vllm.multimodal.processing.context import InputProcessingContext

    sys.modules.setdefault(BY_TORCHVISION, image_processing_pil_qwen2_vl)
    load = InputProcessingContext.get_hf_processor
    if getattr(load, "sees_by_pillow", False):
        return

    def get_hf_processor(context: Any, kind: Any = None, /, **options: Any) -> Any:
        if kind is None or context.model_config.hf_config.model_type not in FAMILIES:
            return load(context, kind, **options)
        return _processor(context.model_config.model, kind, context.tokenizer)

    get_hf_processor.sees_by_pillow = True  # type: ignore[attr-defined]
    InputProcessingContext.get_hf_processor = get_hf_processor


@lru_cache(maxsize=8)
def _processor(model: str, kind: Any, tokenizer: Any) -> Any:
    """A processor of `kind` that was never begun: it would look for one of videos."""
    from transformers import AutoImageProcessor
    from transformers.processing_utils import VideosKwargs

    made = kind.__new__(kind)
    made.image_processor = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
    made.video_processor = SimpleNamespace(valid_kwargs=VideosKwargs)
    made.tokenizer = tokenizer
    made.image_token, made.video_token = "<|image_pad|>", "<|video_pad|>"
    return made
