"""verl's whole PPO trainer, from its command line: one rank of FSDP2 on the CPU, rollouts from a fabric."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import rollfab
from rollfab.trainer.grpo import build_model
from rollfab.trainer.integrations.trl import preset_tokenizer
from tests.support.processes.fabric_processes import PYTHONPATH, Processes, check_totals
from tests.verl.training import ENGINE, SAMPLING, settings_of

STEP_COUNT, PROMPT_COUNT, SIZE = 3, 2, 4
ON_A_CPU = {
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform,rollfab.trainer.integrations.verl_weights",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    "PYTHONPATH": os.pathsep.join([PYTHONPATH, str(Path(__file__).parent)]),
}


def wishes(directory: Path) -> list[str]:
    """Settings of a small training on the CPU, beside the page's."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        f"data.train_files={directory}/prompts.parquet",
        f"data.val_files={directory}/prompts.parquet",
        f"data.train_batch_size={PROMPT_COUNT}",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={directory}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.dtype=float32",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.use_torch_compile=False",
        f"{actor}.ppo_mini_batch_size={PROMPT_COUNT}",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
        f"{rollout}.n={SIZE}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={STEP_COUNT}",
        f"trainer.save_freq={STEP_COUNT}",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={directory}/checkpoints",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.num_warmup_batches=0",
        "ray_kwargs.ray_init.num_cpus=16",
        "reward.num_workers=1",
        "+ray_kwargs.ray_init.num_gpus=1",  # ray's word for a place of a rank; there is none
    ]


@pytest.mark.timeout(240)
def test_verl_trains_on_rollouts_of_a_run(roles: Processes, tmp_path: Path) -> None:
    # Given a model and prompts in files, and a run
    tokenizer = preset_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for each in (tokenizer, build_model("tiny")):
        each.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "go"}], "data_source": "lake", "index": seed} for seed in range(8)]
    asked = [{"reward_model": {"ground_truth": ""}, "extra_info": {"task": {"seed": seed}}} for seed in range(8)]
    pd.DataFrame([{**row, **each} for row, each in zip(rows, asked, strict=True)]).to_parquet(
        tmp_path / "prompts.parquet"
    )
    with rollfab.connect(roles.url) as fabric:
        run = fabric.run(
            "whole",
            model="tiny",
            environment="frozenlake",
            environment_options={"map": ["SFG"]},
            turn_count_max=5,
            staleness=1,
            sampling=SAMPLING,
        )
        # When verl's command trains, with the page's settings
        given = {each.lstrip("+").partition("=")[0]: each for each in [*settings_of(), f"+{ENGINE}.run=whole"]}
        given |= {each.lstrip("+").partition("=")[0]: each for each in wishes(tmp_path)}
        command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *given.values()]
        place = {**os.environ, **ON_A_CPU, "ROLLFAB_URL": roles.url, "VERL_LOGGING_LEVEL": "WARNING"}
        with (tmp_path / "log").open("wb") as log:
            code = subprocess.run(command, env=place, cwd=tmp_path, stdout=log, stderr=log, timeout=230).returncode
        assert code == 0, (tmp_path / "log").read_text("utf-8", "replace")[-4000:]
        # Then each of its steps trained its prompts' groups, once, and published
        assert check_totals(roles, run)["groups_consumed"] == STEP_COUNT * PROMPT_COUNT
        assert run.status().counters["trajectories_completed"] == STEP_COUNT * PROMPT_COUNT * SIZE
        assert run.head_version() == STEP_COUNT
        # And what the run has is what verl saved, bit for bit, and what was learnt
        (saved,) = (tmp_path / "checkpoints").glob(f"global_step_{STEP_COUNT}/actor/huggingface/*.safetensors")
        ours, theirs, before = run.weights(), load_file(saved), run.weights(0)
        assert not set(ours) - set(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
        assert any((ours[name] != before[name]).any() for name in ours)
