"""vLLM's own offline generate, as a user would write it: what the fabric is measured against.

- The engine arguments are the worker's own (engine_arguments), less what only the fabric needs: its scheduler and its
  way for weights. On a CPU vLLM then packs weights as it always does.
- As in a worker, the EngineCore is a process of its own and computes in that process.
- Runs in a process of its own (bench/remote.py), because it must not share one with what measures it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rollfab.fabric.model.presets import model_config
from rollfab.workers.engines.vllm.arguments import engine_arguments
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.common.environment import prepare_environment

ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass(frozen=True, kw_only=True)
class Requests:
    """One round. prompts: token ids; lengths: new tokens of every turn; reply: token ids between two turns."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    turn_count: int
    reply: Sequence[int]
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Answers:
    """completions: token ids of each request, all turns in one list, without the replies between them."""

    duration_s: float
    completions: Sequence[Sequence[int]]


class Offline:
    """A `vllm.LLM` with the checkpoint of a preset."""

    def __init__(self, checkpoint: Path, config: VllmConfig) -> None:
        self._checkpoint = checkpoint
        self._config = config

    def __enter__(self) -> Offline:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # an EngineCore of its own, as AsyncLLM always has
        prepare_environment(model=self._config.model)
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        arguments = engine_arguments(self._config, str(self._checkpoint), on_cpu=on_cpu)
        del arguments["weight_transfer_config"]
        if on_cpu:
            arguments["distributed_executor_backend"] = ONE_PROCESS  # by name, or vLLM would add a third process
        self._llm: Any = LLM(**arguments | {"load_format": "auto"})
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def generate(self, asked: Requests) -> Answers:
        """All requests; several turns are as many calls, so each waits for the longest of the one before.

        Timed from the first call to the last one's return.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        parameters = [
            SamplingParams(
                temperature=asked.temperature,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for length in asked.lengths
        ]
        contexts = [list(each) for each in asked.prompts]
        completions: list[list[int]] = [[] for _ in contexts]
        start_s = time.perf_counter()
        for _ in range(asked.turn_count):
            prompts = [tokens_input(prompt_token_ids=each) for each in contexts]
            for index, output in enumerate(self._llm.generate(prompts, parameters, use_tqdm=False)):
                made = list(output.outputs[0].token_ids)
                completions[index] += made
                contexts[index] += [*made, *asked.reply]
        return Answers(duration_s=time.perf_counter() - start_s, completions=completions)


def write_checkpoint(model: str, weights: dict[str, NDArray[np.float32]], directory: Path) -> None:
    """A preset with these weights, as a directory that vLLM loads."""
    from safetensors.numpy import save_file

    text = {**model_config(model), "architectures": ["Qwen2ForCausalLM"], "dtype": "float32"}
    (directory / "config.json").write_bytes(orjson.dumps(text))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
