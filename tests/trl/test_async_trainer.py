"""TRL's AsyncGRPOTrainer as a whole, on a CPU: all of it but its attention, which is a kernel for GPUs, and NCCL.

The kernel's one function is computed by torch here. It plays in two ways: TRL's own rollout worker, which speaks vLLM's
HTTP, before `rollfab gateway --inference`; and ours on a run. Weights are published either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient

from rollfab.trainer.client import Run
from rollfab.trainer.grpo import build_model
from rollfab.trainer.integrations.trl import preset_tokenizer
from rollfab.trainer.integrations.trl_async import RolloutWorker, WeightTransfer
from tests.support.processes.fabric_processes import Processes
from tests.support.processes.inference_process import RUN, InferenceProcess, running_inference

STEPS = 3

pytestmark = pytest.mark.timeout(400)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    *_: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What the kernel computes: each segment's last places attend to what is before them, (T, heads, width)."""
    assert causal and window_size == (-1, -1)
    repeats = query.shape[1] // key.shape[1]
    made = []
    for index in range(len(query_ends) - 1):
        own = query[query_ends[index] : query_ends[index + 1]].transpose(0, 1)
        keys, values = (
            each[key_ends[index] : key_ends[index + 1]].repeat_interleave(repeats, 1).transpose(0, 1)
            for each in (key, value)
        )
        mask = torch.ones(own.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - own.shape[1])
        found = torch.nn.functional.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=softmax_scale)
        made.append(found.transpose(0, 1))
    return torch.cat(made)


def short(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # it asks CUDA alone
    # TRL's worker wants vLLM to be installed beside the trainer; it uses nothing of it but its HTTP.
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)


@pytest.fixture
def model(tmp_path: Path) -> str:
    build_model("tiny").save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def train(model: str, directory: Path, **parts: Any) -> AsyncGRPOTrainer:
    """Train STEPS steps of two groups of four."""
    settings = {
        "vllm_server_base_url": parts.pop("url", "http://127.0.0.1:1"),
        "token_budget": parts.pop("token_budget", None),
    }
    tokenizer = preset_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=short,
        args=AsyncGRPOConfig(
            str(directory / "out"),
            dtype="float32",
            bf16=False,
            max_steps=STEPS,
            num_generations=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            max_completion_length=8,
            max_staleness=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"say {n}"}] for n in range(8)]}),
        processing_class=tokenizer,
        **parts,
    )
    trainer.train()
    return trainer


def logged(trainer: AsyncGRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.fixture
def fleet(fabric: Processes, tmp_path: Path) -> Iterator[InferenceProcess]:
    with running_inference(fabric, tmp_path) as fleet:
        yield fleet


def check_trained(trainer: AsyncGRPOTrainer, run: Run) -> None:
    """It trained on what its own model finds as likely as the workers did, and published each step."""
    assert trainer.state.global_step == STEPS
    (first, *later), differences = logged(trainer, "ratio"), logged(trainer, "kl")
    assert first == pytest.approx(1.0, abs=1e-4)
    assert differences[0] == pytest.approx(0.0, abs=1e-6)
    assert len(later) == STEPS - 1
    assert all(math.isfinite(each) for each in (*later, *differences))
    assert max(logged(trainer, "grad_norm")) > 0.0
    assert run.head_version() == STEPS
    held = run.weights()
    for name, each in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        assert held[name].tobytes() == each.detach().numpy().tobytes(), name


def test_trl_s_own_worker_plays_before_the_gateway(fleet: InferenceProcess, model: str, tmp_path: Path) -> None:
    # Given a gateway, as the only server that TRL is told of
    url, run = f"{fleet.url}/k/{fleet.key}", fleet.fabric.fabric.run(RUN)
    # When it trains: its worker asks for completions, and its weights are published
    trainer = train(model, tmp_path, url=url, weight_transfer=WeightTransfer(run))
    # Then all came of the fleet
    check_trained(trainer, run)
    assert all(1 <= each <= 8 for each in logged(trainer, "completions/mean_length"))
    # And TRL's client of the server has what it asks for, but is told why there is no collective
    client = VLLMClient(url)
    client.wait_for_server_ready()
    assert (client.get_world_size(), client.get_max_model_len()) == (1, 512)
    client.pause()
    client.resume()
    with pytest.raises(Exception, match=r"join no collective.*/update_weights_from_disk"):
        client.init_weight_transfer_engine({"master_address": "127.0.0.1"})


def test_our_worker_plays_a_run_s_own_environment(fabric: Processes, model: str, tmp_path: Path) -> None:
    run = fabric.fabric.run("async", model="tiny", environment="frozenlake", staleness=4)
    worker = RolloutWorker(run, [{"seed": seed} for seed in range(8)], num_generations=4, ahead=4)
    # When it trains, without any server
    trainer = train(model, tmp_path, rollout_worker=worker, weight_transfer=WeightTransfer(run), token_budget=0)
    # Then that is what it trained on, and what it had used is acknowledged
    check_trained(trainer, run)
    assert run.status().counters["groups_consumed"] > 0
