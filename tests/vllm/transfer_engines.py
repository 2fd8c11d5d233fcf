"""Small real vLLM engines for the tests of weight transfer, driven through AsyncLLM itself."""

import asyncio
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rollfab.fabric.format.layout import Layout
from rollfab.workers.engines.base import Bits, Writes
from rollfab.workers.engines.vllm.common.arena import PARCEL, Mirror, pack
from rollfab.workers.engines.vllm.common.names import BACKEND
from rollfab.workers.engines.vllm.common.shared import SharedFile
from rollfab.workers.engines.vllm.plugin import register

PROMPT = list(range(5, 70))  # two blocks of KV cache and a bit
TOKENS = 12

QWEN2: dict[str, Any] = {  # tied, biases, grouped queries, a vocabulary that vLLM pads to a multiple of 64
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
# vLLM's build for CPUs multiplies bfloat16 by oneDNN, which has no way to on a processor with AVX2 alone.
NEEDS_AVX512 = pytest.mark.skipif(
    " avx512f " not in Path("/proc/cpuinfo").read_text(), reason="bfloat16 is multiplied only where there is AVX-512"
)
LLAMA = {
    **QWEN2,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 130,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {  # latent attention: matrices absorbed from kv_b_proj after loading
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "float32",
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """Names, dtypes and shapes as the checkpoint of such a model has them."""
    hidden, inner, dtype = config["hidden_size"], config["intermediate_size"], config["torch_dtype"]
    head = hidden // config["num_attention_heads"]
    rows: list[list[Any]] = [["model.embed_tokens.weight", dtype, [config["vocab_size"], hidden]]]
    rows.append(["model.norm.weight", dtype, [hidden]])
    if not config["tie_word_embeddings"]:
        rows.append(["lm_head.weight", dtype, [config["vocab_size"], hidden]])
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        shapes: dict[str, list[int]] = {
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
            "mlp.gate_proj.weight": [inner, hidden],
            "mlp.up_proj.weight": [inner, hidden],
            "mlp.down_proj.weight": [hidden, inner],
        }
        if config["model_type"] == "deepseek_v2":
            heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
            nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            shapes |= {
                "self_attn.q_proj.weight": [heads * (nope + rope), hidden],
                "self_attn.kv_a_proj_with_mqa.weight": [rank + rope, hidden],
                "self_attn.kv_a_layernorm.weight": [rank],
                "self_attn.kv_b_proj.weight": [heads * (nope + value), rank],
                "self_attn.o_proj.weight": [hidden, heads * value],
            }
        else:
            kv = head * config["num_key_value_heads"]
            for name, width in (("q", hidden), ("k", kv), ("v", kv)):
                shapes[f"self_attn.{name}_proj.weight"] = [width, hidden]
                if config["model_type"] == "qwen2":
                    shapes[f"self_attn.{name}_proj.bias"] = [width]
            shapes["self_attn.o_proj.weight"] = [hidden, hidden]
        rows += [[f"{at}.{name}", dtype, shape] for name, shape in shapes.items()]
    return Layout.from_rows(rows)


def random_bits(layout: Layout, seed: int) -> dict[str, Bits]:
    """Stored bits of ordinary weights, all different from each other as far as the dtype allows."""
    dice = np.random.default_rng(seed)
    found = {}
    for spec in layout.tensors:
        values = dice.normal(0, 0.2, spec.element_count).astype(np.float32)
        if "norm" in spec.name:
            values = 1 + values
        found[spec.name] = floats_to_bits(values, spec.dtype)
    return found


def floats_to_bits(values: Any, dtype: str) -> Bits:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return bits if dtype == "float32" else (bits >> 16).astype(np.uint16)


def save_checkpoint(directory: Path, config: Mapping[str, Any], layout: Layout, bits: Mapping[str, Bits]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    head: dict[str, Any] = {}
    end = 0
    for spec in layout.tensors:
        start, end = end, end + spec.byte_count
        dtype = {"float32": "F32", "bfloat16": "BF16"}[spec.dtype]
        head[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    body = b"".join(bits[spec.name].tobytes() for spec in layout.tensors)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return directory


class Vllm:
    """One engine, on an event loop of its own, so that plain tests can share it."""

    def __init__(self, directory: Path, **arguments: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        register()
        config = json.loads((directory / "config.json").read_text())
        settings = AsyncEngineArgs(
            model=str(directory),
            **{
                "skip_tokenizer_init": True,
                "dtype": config["torch_dtype"],
                "enforce_eager": True,
                "max_model_len": 256,
                "max_num_seqs": 4,
                "block_size": 32,
                "num_gpu_blocks_override": 64,
                "kv_cache_memory_bytes": 64 << 20,
                "disable_log_stats": True,
                "weight_transfer_config": {"backend": BACKEND},
                **arguments,
            },
        ).create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._runner = asyncio.Runner()
        self._runner.get_loop()
        self.llm = self._runner.run(self._made(AsyncLLM, settings))
        self._count = 0

    async def _made(self, kind: Any, settings: Any) -> Any:
        return kind.from_vllm_config(settings, disable_log_stats=True)

    def close(self) -> None:
        processes = list(self.llm.engine_core.resources.engine_manager.processes)
        try:
            with suppress(psutil.NoSuchProcess):  # vLLM names a process that has just gone
                self.llm.shutdown(timeout=2.0)
        finally:
            for process in processes:
                process.kill()
            self._runner.close()

    def call(self, method: str, *args: Any) -> Any:
        return self._runner.run(getattr(self.llm, method)(*args))

    def set_up(self, layout: Layout) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self.call("init_weight_transfer_engine", WeightTransferInitRequest(init_info={"layout": layout.rows()}))

    def update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.call("start_weight_update")
        try:
            self.call("update_weights", WeightTransferUpdateRequest(update_info=info))
        except Exception:
            with suppress(Exception):  # the ranks that had nothing against it are still at it
                self.call("finish_weight_update")
            raise
        self.call("finish_weight_update")

    def write(self, writes: Writes) -> None:
        parcel = pack(writes)
        file = SharedFile(PARCEL, len(parcel))
        file.write(parcel)
        self.update({"parcel": str(file.path)})
        file.close()
        self.call("reset_prefix_cache")

    def export(self, layout: Layout) -> dict[str, Bits]:
        mirror = Mirror.create(layout)
        self.update({"export": str(mirror.path)})
        mirror.close()
        return mirror.bits

    def checksums(self) -> dict[str, str]:
        return {name: digest for rank in self.call("compute_weight_checksums") for name, digest in rank.items()}

    def greedy(self) -> tuple[list[int], list[float]]:
        return self._runner.run(self._greedy())

    async def _greedy(self) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        sampling = SamplingParams(
            max_tokens=TOKENS,
            temperature=0.0,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(prompt_token_ids=PROMPT)
        async for answer in self.llm.generate(prompt, sampling, f"greedy-{self._count}"):
            output = answer.outputs[0]
        return list(output.token_ids), [
            row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True)
        ]


@contextmanager
def engine(directory: Path, **arguments: Any) -> Iterator[Vllm]:
    vllm = Vllm(directory, **arguments)
    try:
        yield vllm
    finally:
        vllm.close()
