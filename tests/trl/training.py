"""Small trainings with TRL, for tests: a GRPOTrainer of the tiny model on a run, and what it was given.

As a program, it trains a run in a process that a test may kill:

    python -m tests.trl.training '{"run": "name", "directory": "…", "notes": "…", "die": "submit", …}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import rollfab
from rollfab.trainer.client import Run
from rollfab.trainer.grpo import build_model
from rollfab.trainer.integrations.trl import ROLLOUT, preset_tokenizer, rollout_func, rollout_reward

WALK = {"turns": 3, "pace_s": 0.0, "tokens": 4}
SETTINGS = {"staleness": 0, "sampling": {"temperature": 1.0}}


class Trainer(GRPOTrainer):
    """The real one; it keeps what it made of rollouts."""

    seen: list[dict[str, Any]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("seen", []).append(made)
        return made


def seed_of(prompt: str) -> dict[str, Any]:
    """The task of a prompt."""
    return {"seed": int(prompt)}


def make_trainer(
    run: Run, directory: Path, *, task: Any = seed_of, rewards: Any = rollout_reward, count: int = 8, **settings: Any
) -> Trainer:
    """A trainer of two groups of two a step; settings of GRPOConfig as wished."""
    wishes = {"num_generations": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 2, **settings}
    prompts = Dataset.from_dict({"prompt": [str(index) for index in range(count)]})
    return Trainer(
        model=build_model("tiny"),
        processing_class=preset_tokenizer(),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        args=GRPOConfig(str(directory), bf16=False, logging_steps=1, report_to="none", **wishes),
        rollout_func=rollout_func(run, task),
        reward_funcs=rewards,
    )


def noting(notes: Path, at: Callable[[int], None]) -> Any:
    """A reward function that writes down which rollouts came for which step, then calls `at` with the step.

    Rewards differ, so that every step changes the weights.
    """

    def reward(**columns: Any) -> list[float]:
        step = columns["trainer_state"].global_step
        names = [each.trajectory_id for each in columns[ROLLOUT]]
        tokens = [each.completion_ids.tolist() for each in columns[ROLLOUT]]
        with notes.open("a") as file:
            file.write(json.dumps({"step": step, "names": names, "tokens": tokens}) + "\n")
        at(step)
        return [float(sum(each) % 7) for each in tokens]

    return reward


def die() -> None:
    """End as with kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


class DiesAtSubmit:
    """A run whose process ends right after its tasks were taken in, at a step."""

    def __init__(self, run: Run, step: int) -> None:
        self._run = run
        self._left = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def submit(self, *given: Any, **wishes: Any) -> list[str]:
        names = self._run.submit(*given, **wishes)
        if not self._left:
            die()
        self._left -= 1
        return names


def main(wish: Mapping[str, Any]) -> None:
    directory, notes = Path(wish["directory"]), Path(wish["notes"])
    with rollfab.connect() as fabric:
        run: Any = fabric.run(wish["run"])
        if wish["die"] == "submit":
            run = DiesAtSubmit(run, wish["at"])

        def at(step: int) -> None:
            if wish["die"] == "reward" and step == wish["at"]:
                die()

        trainer = make_trainer(run, directory, rewards=noting(notes, at), **wish["settings"])
        trainer.train(resume_from_checkpoint=wish["resume"])
        rank = trainer.accelerator.process_index
        if wish["weights"]:
            model = trainer.accelerator.unwrap_model(trainer.model)
            weights = {name: each.detach().tolist() for name, each in model.named_parameters()}
            Path(f"{wish['weights']}.{rank}").write_text(json.dumps([rank, len(trainer.seen), weights]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
