"""What a plain forward pass of torch says, to compare engines with."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from rollfab.fabric.chat.vision import find_vision
from rollfab.fabric.contract.images import Image
from rollfab.fabric.contract.records import Float32, Int32, Sampling
from rollfab.fabric.model.presets import model_config


def plain_logprobs(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, temperature: float
) -> Float32:
    """float32 (T, V): log-softmax of the logits that precede each token of the completion.

    Args:
        model: a preset.
        bits: its float32 parameters as stored bits, uint32, flat.
    """
    import torch

    logits = torch.from_numpy(plain_logits(model, bits, prompt, completion))
    found: Float32 = torch.log_softmax(logits / temperature, dim=-1).numpy()
    return found


def plain_logits(model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32) -> Float32:
    """float32 (T, V): the logits that precede each token of the completion."""
    import torch

    plain = _plain_model(model, bits)
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    with torch.no_grad():
        found: Float32 = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1].numpy()
    return found


def shaped_logprobs(logits_T_V: Float32, prompt: Int32, completion: Int32, sampling: Sampling) -> Float32:
    """float64 (T, V): natural log of the distribution that each token is drawn from; -inf: it cannot be."""
    rows = []
    for index, logits_V in enumerate(logits_T_V.astype(np.float64)):
        made_V = np.bincount(completion[:index], minlength=len(logits_V))
        is_known_V = np.isin(np.arange(len(logits_V)), np.concatenate([prompt, completion[:index]]))
        for token, bias in sampling.logit_bias.items():
            logits_V[token] += bias
        repetition = np.where(logits_V > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        logits_V = np.where(is_known_V, logits_V * repetition, logits_V)
        logits_V = logits_V - sampling.frequency_penalty * made_V - sampling.presence_penalty * (made_V > 0)
        rows.append(_log_softmax(logits_V) if sampling.temperature == 0 else _cut(logits_V, sampling))
    return np.array(rows)


def _cut(logits_V: Float32, sampling: Sampling) -> Float32:
    logs_V = _log_softmax(logits_V / sampling.temperature)
    if sampling.min_p:
        logs_V = np.where(logs_V < logs_V.max() + np.log(sampling.min_p), -np.inf, logs_V)
    order_V = np.argsort(-logs_V)
    if sampling.top_k:
        logs_V[order_V[sampling.top_k :]] = -np.inf
    before_V = np.cumsum(np.exp(_log_softmax(logs_V))[order_V]) - np.exp(_log_softmax(logs_V))[order_V]
    if sampling.top_p < 1:
        logs_V[order_V[before_V >= sampling.top_p]] = -np.inf
    return _log_softmax(logs_V)


def _log_softmax(logits_V: Any) -> Any:
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


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


def seeing_logprobs(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, images: Sequence[Image]
) -> Float32:
    """float32 (T, V): log-softmax of the logits that precede each token of the completion, of a model that sees.

    Args:
        model: a directory.
        bits: its float32 parameters as stored bits, uint32, flat.
        images: those of the prompt, at least one.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    plain = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    _fill(plain, bits)
    vision = find_vision(model)
    assert vision is not None
    arrays = vision.arrays([image.data for image in images])
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    kinds = torch.zeros_like(ids)
    for image in images:
        kinds[:, image.start : image.end] = 1
    with torch.no_grad():
        logits = plain(
            input_ids=ids,
            mm_token_type_ids=kinds,
            **{name: torch.from_numpy(each) for name, each in arrays.items()},
        ).logits[0, len(prompt) - 1 : -1]
    found: Float32 = torch.log_softmax(logits, dim=-1).numpy()
    return found


def _plain_model(model: str, bits: Mapping[str, Any]) -> Any:
    import torch
    import transformers

    options = model_config(model)
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _fill(plain, bits)
    return plain


def _fill(plain: Any, bits: Mapping[str, Any]) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(torch.from_numpy(bits[name].view(np.float32).copy()).view(parameter.shape))


def plain_logprobs_elsewhere(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, temperature: float
) -> Float32:
    """The same, in a process of its own: one that forks vLLM engines must compute nothing with torch."""
    copies = {name: np.array(each) for name, each in bits.items()}
    return _elsewhere().submit(plain_logprobs, model, copies, prompt, completion, temperature).result()


def plain_logits_elsewhere(model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32) -> Float32:
    """The same as `plain_logits`, in that process."""
    copies = {name: np.array(each) for name, each in bits.items()}
    return _elsewhere().submit(plain_logits, model, copies, prompt, completion).result()


def kept_logprobs_elsewhere(
    model: str, old: Mapping[str, Any], new: Mapping[str, Any], context: Int32, rest: Int32
) -> Float32:
    """The same as `kept_logprobs`, in that process."""
    copies = [{name: np.array(each) for name, each in bits.items()} for bits in (old, new)]
    return _elsewhere().submit(kept_logprobs, model, *copies, context, rest).result()


def seeing_logprobs_elsewhere(
    model: str, bits: Mapping[str, Any], prompt: Int32, completion: Int32, images: Sequence[Image]
) -> Float32:
    """The same as `seeing_logprobs`, in that process."""
    copies = {name: np.array(each) for name, each in bits.items()}
    return _elsewhere().submit(seeing_logprobs, model, copies, prompt, completion, images).result()


@functools.cache
def _elsewhere() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool
