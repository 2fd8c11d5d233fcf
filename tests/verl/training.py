"""verl's own code around a manager: its settings, its trainer's methods that submit and consume, its replay buffers."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import transfer_queue as tq
from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from rollfab.trainer.client import Run
from rollfab.trainer.integrations.verl import AgentLoopManager

WALK = {"turns": 3, "pace_s": 0.0, "tokens": 4}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
PAGE = Path(__file__).parents[2] / "docs" / "verl.md"


def settings_of(page: Path = PAGE) -> list[str]:
    """The settings that the page tells people to give verl."""
    block = page.read_text("utf-8").split("```sh\npython -m verl.trainer.main_ppo", 1)[1].split("```", 1)[0]
    return [line.removesuffix("\\").strip() for line in block.splitlines() if "=" in line]


def config_of(run: Run, url: str, *wishes: str) -> Any:
    """verl's whole configuration, as the page says, for this run."""
    wishes = (*settings_of(), f"+{ENGINE}.run={run.run_id}", f"+{ENGINE}.url={url}", "data.train_batch_size=2", *wishes)
    last = {wish.lstrip("+~").partition("=")[0]: wish for wish in wishes}
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(last.values()))


ENGINE = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rollfab"


class Trainer(SimpleNamespace):
    """What verl's PPOTrainer is to its own methods that submit prompts and consume rows."""

    def __init__(self, config: Any, manager: AgentLoopManager, mode: str, **buffer: Any) -> None:
        kind = ReplayBuffer if mode == "sync" else ReplayBufferAsync
        super().__init__(config=config, agent_loop_manager=manager, trainer_mode=mode, global_steps=1, refilled=[])
        self.use_critic = self.use_reference_policy = False
        self.replay_buffer = kind(
            mode,
            config.trainer.v1.get(mode, {}),
            buffer.pop("threshold", None),
            "drop",
            {},
            poll_interval=0.05,
            refill_fn=self.refilled.append,
            **buffer,
        )

    def submit(self, seeds: list[int], **columns: list[Any]) -> list[str]:
        """Hand prompts over as verl does; returns their uids."""
        items = [
            {"raw_prompt": [{"role": "user", "content": str(seed)}], "data_source": "walk", "index": index}
            | {"extra_info": {"task": {"seed": seed}}, "reward_model": {"ground_truth": ""}}
            for index, seed in enumerate(seeds)
        ]
        batch_dict = collate_fn(items)
        batch_dict["uid"] = np.array([str(uuid.uuid4()) for _ in seeds], dtype=object)
        batch_dict |= {name: np.array(values, dtype=object) for name, values in columns.items()}
        batch = tu.get_tensordict(batch_dict)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        PPOTrainer._submit_batch_to_rollout(self, batch)
        return list(batch_dict["uid"])

    def validate(self, seeds: list[int]) -> Any:
        """Hand prompts over for validation, and wait, as verl's _validate does; returns what came."""
        items = [{"raw_prompt": [], "extra_info": {"task": {"seed": seed}}} for seed in seeds]
        batch = tu.get_tensordict({**collate_fn(items), "uid": np.array([str(uuid.uuid4()) for _ in seeds], object)})
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        tu.assign_non_tensor_data(batch, "validate", True)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps}] * len(seeds)
        tq.kv_batch_put(keys=list(batch["uid"]), partition_id="val", tags=tags)
        self.agent_loop_manager.generate_sequences(batch)
        return self.replay_buffer.sample(self.global_steps, "val", len(seeds))[0]

    def sample(self, count: int) -> Any:
        """Wait for so many prompts' rows, as verl does; returns their keys and tags."""
        return self.replay_buffer.sample(self.global_steps, "train", count)[0]

    def advantages(self, batch: Any) -> Any:
        """Let verl compute what it trains on; returns all columns."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
        data["old_log_probs"] = data.pop("rollout_log_probs")
        tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=data)
        PPOTrainer._compute_advantage(self, batch, {})
        return tq.kv_batch_get(keys=batch.keys, partition_id="train")
