"""What a plain forward pass of torch says, to compare engines with."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from rollfab.fabric.contract.models import model_config
from rollfab.fabric.contract.records import Float32, Int32


def plain_logprobs(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, temperature: float
) -> Float32:
    """float32 (T, V): log-softmax of the logits that precede each token of the completion.

    Args:
        model: a preset.
        bits: its float32 parameters as stored bits, uint32, flat.
    """
    import torch

    plain = _plain_model(model, bits)
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    with torch.no_grad():
        logits = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    found: Float32 = torch.log_softmax(logits / temperature, dim=-1).numpy()
    return found


def kept_logprobs(model: str, old: Mapping[str, Any], new: Mapping[str, Any], context: Int32, rest: Int32) -> Float32:
    """float32 (R, V): of each token of the rest, where weights changed after the context and its KV cache was kept.

    Args:
        model: a preset.
        old, new: its float32 parameters before and after, as stored bits, uint32, flat.
        context: prompt and the tokens made before; the last of them is read by the new weights.
        rest: int32 (R,), made since.
    """
    import torch

    ids = torch.from_numpy(np.concatenate([context, rest]).astype(np.int64))[None]
    count = len(context) - 1
    with torch.no_grad():
        kept = _plain_model(model, old)(input_ids=ids[:, :count], use_cache=True).past_key_values
        logits = _plain_model(model, new)(input_ids=ids[:, count:-1], past_key_values=kept).logits[0]
    found: Float32 = torch.log_softmax(logits, dim=-1).numpy()
    return found


def _plain_model(model: str, bits: Mapping[str, Any]) -> Any:
    import torch
    import transformers

    options = model_config(model)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(torch.from_numpy(bits[name].view(np.float32).copy()).view(parameter.shape))
    return plain


def plain_logprobs_elsewhere(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, temperature: float
) -> Float32:
    """The same, in a process of its own: one that forks vLLM engines must compute nothing with torch."""
    copies = {name: np.array(each) for name, each in bits.items()}
    return _elsewhere().submit(plain_logprobs, model, copies, prompt, completion, temperature).result()


def kept_logprobs_elsewhere(
    model: str, old: Mapping[str, Any], new: Mapping[str, Any], context: Int32, rest: Int32
) -> Float32:
    """The same as `kept_logprobs`, in that process."""
    copies = [{name: np.array(each) for name, each in bits.items()} for bits in (old, new)]
    return _elsewhere().submit(kept_logprobs, model, *copies, context, rest).result()


@functools.cache
def _elsewhere() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool
