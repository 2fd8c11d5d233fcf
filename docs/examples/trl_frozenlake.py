"""TRL's GRPOTrainer learns FrozenLake from rollouts of a fabric: docs/trl.md.

rollfab up                                   # prints the ROLLFAB_URL to set
python docs/examples/trl_frozenlake.py       # in an environment with rollfab and trl
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import rollfab
from rollfab.trainer.grpo import build_model
from rollfab.trainer.integrations.trl import preset_tokenizer, rollout_func, rollout_reward

fabric = rollfab.connect()
run = fabric.run("trl-lake", model="tiny", environment="frozenlake", staleness=0, sampling={"temperature": 1.0})
batch = {"num_generations": 16, "per_device_train_batch_size": 32, "steps_per_generation": 2, "num_iterations": 2}
learning = {"max_steps": 240, "learning_rate": 3e-3, "adam_beta2": 0.99, "entropy_coef": 0.003, "bf16": False}
trainer = GRPOTrainer(
    model=build_model("tiny"),
    processing_class=preset_tokenizer(),
    train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in range(1000)]}),
    args=GRPOConfig("trl-lake", **batch, **learning, logging_steps=1),
    rollout_func=rollout_func(run, task=lambda prompt: {"seed": int(prompt)}),
    reward_funcs=rollout_reward,
)
trainer.train()
fabric.close()
rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
print(f"mean reward {rewards[0]:.2f} at first, {sum(rewards[-3:]) / 3:.2f} at the end")
