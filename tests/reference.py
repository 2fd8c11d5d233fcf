"""What a plain forward pass of torch says, to compare engines with."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from rollfab.fabric.models import model_config
from rollfab.fabric.records import Float32, Int32


def plain_logprobs(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, temperature: float
) -> Float32:
    """float32 (T, V): log-softmax of the logits that precede each token of the completion.

    Args:
        model: a preset.
        bits: its float32 parameters as stored bits, uint32, flat.
    """
    import torch
    import transformers

    options = model_config(model)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(torch.from_numpy(bits[name].view(np.float32).copy()).view(parameter.shape))
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        logits = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    found: Float32 = torch.log_softmax(logits / temperature, dim=-1).numpy()
    return found


def plain_logprobs_elsewhere(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, temperature: float
) -> Float32:
    """The same, in a process of its own: one that forks vLLM engines must compute nothing with torch."""
    copies = {name: np.array(each) for name, each in bits.items()}
    return _elsewhere().submit(plain_logprobs, model, copies, prompt, completion, temperature).result()


@functools.cache
def _elsewhere() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool
