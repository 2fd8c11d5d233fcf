"""vLLM's own engine arguments: read from words as vLLM reads them, and completed with what a rollout worker needs.

- What the user gives wins over our defaults.
- A few are the fabric's: log-probabilities, weights, limits and versions depend on them. Giving another value for one
  of those is an error that says why, never a silent change.
"""

from __future__ import annotations

import argparse
import difflib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from ....fabric.contract.errors import ConfigError, EngineUnsupported
from ....fabric.contract.text import told
from ....fabric.model.presets import dtype_of, is_preset, model_config
from .common.names import BACKEND

if TYPE_CHECKING:
    from .common.config import VllmConfig

CPU_BLOCK_TOKENS = 32  # the smallest that its kernels take: short prefixes are found in the cache too
CPU_KV_BYTES = 64 << 20  # nominal: the count of blocks decides, this spares vLLM's guess of 92 % of the machine
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has kernels for
SEEING: Mapping[str, tuple[Any, str]] = {
    "mm_device_do_normalize": (False, "the worker makes what the model reads of an image, whole"),
    "mm_processor_cache_gb": (0.0, "it would never be asked, as the worker makes what the model reads of an image"),
}
KV_SIZES = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """Engine arguments by field name, only those that the words give, as `vllm serve` would understand them.

    Imports vLLM: call environment.import_vllm first, which says in short what is wrong where that fails. `--help` and
    `--help=KEYWORD` print vLLM's own help and end the process.

    Raises:
        ConfigError: vLLM does not know a word, or not that value.
    """
    if not words:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(_explained(message, self._option_string_actions), words=list(words))

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="rollfab worker --engine vllm --", usage=argparse.SUPPRESS))
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # what the user did not say is not in the answer
    try:
        found = vars(parser.parse_args(list(words)))
    except ConfigError:
        raise
    except (AttributeError, IndexError, OSError, TypeError, ValueError) as error:  # --config FILE, --some.key alone
        raise ConfigError(f"vLLM can not read the words after `--`: {error}", words=list(words)) from error
    known = {field.name for field in fields(AsyncEngineArgs)}
    return {name: value for name, value in found.items() if name in known}


def _explained(message: str, options: Mapping[str, Any]) -> str:
    """argparse's complaint with the cause first and what to type next."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "errors.pydantic.dev" not in line]
    complaint = " ".join(lines)
    if not complaint.startswith("unrecognized arguments: "):
        return f"vLLM refuses its {complaint}; `rollfab worker --engine vllm -- --help=all` lists what it takes"
    word = complaint.removeprefix("unrecognized arguments: ").split()[0]
    near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), options, n=3)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    return f"vLLM has no engine argument {word}: {advice}`rollfab worker --engine vllm -- --help=all` lists all"


def engine_arguments(config: VllmConfig, model_path: str, *, on_cpu: bool, sees: bool = False) -> dict[str, Any]:
    """Fields of AsyncEngineArgs for a vLLM of our own.

    Args:
        config: `arguments` are the user's.
        model_path: where the model's config is: a directory made for a preset, else a path or hub name.
        on_cpu: whether vLLM computes on a CPU; on a GPU all but what the fabric needs is left to vLLM.
        sees: whether it is given images, as arrays.

    Raises:
        ConfigError: the user's contradict what the fabric needs.
        EngineUnsupported: as `refuse_unwritable`; or an adapter beside a model that sees.
    """
    if sees and config.adapter_rank is not None:
        raise EngineUnsupported(
            f"model {config.model!r} sees, and what an adapter beside it would do to its eyes is not tried: leave out"
            " --adapter-rank, and publish the model itself",
            name="adapter_rank",
        )
    given = config.arguments
    refuse_unwritable(config, given.get("quantization"), moves_experts=bool(given.get("enable_eplb")))
    fixed = _fixed(config) | (dict(SEEING) if sees else {})
    _refuse_contradictions(config, fixed)
    ours: dict[str, Any] = {"seed": secrets.randbits(31)}  # vLLM's 0 would make all workers draw the same tokens
    dtype = dtype_of(config.model, config.dtype)
    if dtype != "auto":
        ours["dtype"] = dtype  # on a GPU vLLM's own "auto" makes bfloat16 of float32
    if sees:
        ours["limit_mm_per_prompt"] = {"video": 0}
    if on_cpu:
        ours = _cpu_defaults(config) | ours
        if sees:
            ours["skip_mm_profiling"] = True  # the largest image that a model takes may be minutes of a CPU
    return ours | dict(config.arguments) | {name: value for name, (value, _) in fixed.items()} | {"model": model_path}


def refuse_unwritable(config: VllmConfig, quantization: str | None, *, moves_experts: bool) -> None:
    """Refuse an engine whose weights could not be written in place as they are published.

    Args:
        config: an adapter is written beside a model that stays as it is, which may be quantised.
        quantization: vLLM's name of how the model's weights are.
        moves_experts: whether vLLM moves experts between ranks while it runs.

    Raises:
        EngineUnsupported: says why, and what to do.
    """
    if config.adapter_rank is not None:
        return
    if quantization is not None:
        raise EngineUnsupported(
            f"vLLM would hold quantised weights ({quantization}): a run's weights are written as the bits that are"
            " published, and quantising them again would make other weights on every engine. Give the unquantised model"
            " and leave out --quantization, or publish an adapter (--adapter-rank), beside which the model may be"
            " quantised",
            quantization=quantization,
        )
    if moves_experts:
        raise EngineUnsupported(
            "vLLM's --enable-eplb moves experts between ranks while it runs, so weights written in place would land in"
            " other experts: leave it out (--enable-expert-parallel alone keeps them in their places)",
            name="enable_eplb",
        )


def _cpu_defaults(config: VllmConfig) -> dict[str, Any]:
    """float32: a batch computes the very numbers of a request alone. Eager: compiling costs a minute at start."""
    given = config.arguments
    ours: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE") or any(name in given for name in KV_SIZES):
        return ours
    ours["kv_cache_memory_bytes"] = CPU_KV_BYTES
    context = _context(config)
    if context is not None:
        block_tokens = given.get("block_size") or CPU_BLOCK_TOKENS
        ours["num_gpu_blocks_override"] = config.slot_count * -(-context // block_tokens) + 1  # one is vLLM's own
    return ours


def _fixed(config: VllmConfig) -> dict[str, tuple[Any, str]]:
    """List what the fabric decides: value and reason."""
    fixed: dict[str, tuple[Any, str]] = {
        "logprobs_mode": ("processed_logprobs", "a rollout says how likely a token was where it was drawn from"),
        "max_num_seqs": (config.slot_count, "the fabric leases that many slots; give `--slots` before the `--`"),
    }
    context = _context(config)
    if context is not None:
        fixed["max_model_len"] = (context, "turns are cut there; give `--context` before the `--`")
    if config.seed is not None:
        fixed["seed"] = (config.seed, "that is the `--seed` before the `--`; give one of them")
    if config.dtype != "auto":
        fixed["dtype"] = (config.dtype, "that is the `--dtype` before the `--`; give one of them")
    if is_preset(config.model):
        fixed["skip_tokenizer_init"] = (True, "a preset has no tokenizer files")
        fixed["load_format"] = ("dummy", "a preset has no weights; they come from the trainer")
    if config.adapter_rank is None:
        fixed["weight_transfer_config"] = ({"backend": BACKEND}, "the trainer's weights come in by that backend")
    else:
        reason = "weights come as an adapter of that rank"
        fixed["enable_lora"] = (True, reason)
        fixed["max_lora_rank"] = (_lora_rank(config.adapter_rank), reason)
    return fixed


def _refuse_contradictions(config: VllmConfig, fixed: Mapping[str, tuple[Any, str]]) -> None:
    given = config.arguments
    for name, (value, reason) in fixed.items():
        theirs = given.get(name, value)
        theirs = {"backend": theirs.backend} if hasattr(theirs, "backend") else theirs
        if theirs != value:
            raise ConfigError(f"vLLM's {_word(name)} is {told(theirs)}, must be {told(value)}: {reason}", name=name)
    if given.get("model", config.model) != config.model:
        raise ConfigError(
            f"vLLM's --model is {given['model']!r}, but the worker's is {config.model!r}: give it before the `--`, as"
            " its runs are found by that name",
            name="model",
        )
    if given.get("scheduler_cls") is not None:
        raise ConfigError("vLLM's --scheduler-cls is taken: rollfab's holds leases and limits", name="scheduler_cls")
    for name in ("data_parallel_size", "pipeline_parallel_size", "nnodes"):
        if given.get(name, 1) != 1:
            raise ConfigError(
                f"vLLM's {_word(name)} is {given[name]}, must be 1 in a rollout worker: start one worker per replica,"
                " and divide a model by --tensor-parallel-size",
                name=name,
            )


def _word(name: str) -> str:
    return "--" + name.replace("_", "-")


def _context(config: VllmConfig) -> int | None:
    """Most tokens of a request; a preset's positions bound it. None: the model's own."""
    if not is_preset(config.model):
        return config.context_tokens_max
    positions = int(model_config(config.model)["max_position_embeddings"])
    return min(config.context_tokens_max or positions, positions)


def _lora_rank(rank: int) -> int:
    for each in LORA_RANKS:
        if each >= rank:
            return each
    raise ConfigError(f"adapter_rank is {rank}, vLLM takes up to {LORA_RANKS[-1]}", name="adapter_rank")
