"""TRL in processes of its own: killed and resumed from its checkpoints, and several that train one model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import PYTHONPATH, ROOT, Processes, check_totals
from tests.trl.training import SETTINGS, WALK, make_trainer, noting

RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def walk(fabric: Processes, name: str) -> Run:
    return fabric.fabric.run(name, model="tiny", environment="walk", environment_options=WALK, **SETTINGS)


def train(fabric: Processes, wish: dict[str, Any], *, launcher: tuple[str, ...] = ()) -> int:
    """Train in a process of its own; returns how it ended."""
    place = {**os.environ, "PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": fabric.url}
    defaults = {"die": "", "at": -1, "resume": None, "weights": "", "settings": {}}
    command = [sys.executable, "-W", "ignore", *launcher, "-m", "tests.trl.training", json.dumps({**defaults, **wish})]
    return subprocess.run(command, env=place, cwd=ROOT, timeout=200).returncode


def test_a_killed_training_resumes_without_using_a_rollout_twice(fabric: Processes, tmp_path: Path) -> None:
    # Given a training with a checkpoint every two steps
    run, notes = walk(fabric, "resumed"), tmp_path / "notes.jsonl"
    settings = {"save_steps": 2, "max_steps": 6, "count": 12}
    place = {"run": "resumed", "directory": str(tmp_path / "training"), "notes": str(notes), "settings": settings}
    # When it is killed right behind a checkpoint, as its tasks are out, and resumed
    assert train(fabric, {**place, "die": "submit", "at": 2}) == -signal.SIGKILL
    assert run.status().counters["groups_submitted"] == 3 * 2
    # And killed again, as it has its rollouts, a step behind the next checkpoint, and resumed
    assert train(fabric, {**place, "die": "reward", "at": 5, "resume": True}) == -signal.SIGKILL
    trainer = make_trainer(run, tmp_path / "training", rewards=noting(notes, lambda step: None), **settings)
    trainer.train(resume_from_checkpoint=True)

    # Then each step that counts was trained on rollouts of its own, of its own weights
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 4, 5]
    names = [name for row in rows for name in row["names"]]
    assert len(set(names)) == len(names) == 8 * 4
    # And the tasks that were out at the first kill were not submitted again, but those of the steps that were undone
    counters = run.status().counters
    assert counters["groups_submitted"] == 8 * 2
    assert [row["names"][0].split("-")[1] for row in rows] == ["0", "1", "2", "3", "4", "5", "6", "7"]
    # And what was learnt is what workers have
    weights = run.weights()
    for name, each in trainer.model.named_parameters():
        np.testing.assert_array_equal(weights[name], each.detach().numpy())
    assert trainer.state.global_step == 6


def test_rollouts_that_a_killed_step_had_are_trained_by_the_next_process(fabric: Processes, tmp_path: Path) -> None:
    # Given a training with a checkpoint at each step, killed as it has its rollouts
    run, notes = walk(fabric, "again"), tmp_path / "notes.jsonl"
    settings = {"save_steps": 1, "max_steps": 2}
    place = {"run": "again", "directory": str(tmp_path / "training"), "notes": str(notes), "settings": settings}
    assert train(fabric, {**place, "die": "reward", "at": 1}) == -signal.SIGKILL
    # When it is resumed
    make_trainer(run, tmp_path / "training", rewards=noting(notes, lambda step: None), **settings).train(
        resume_from_checkpoint=True
    )
    # Then it gets the very same ones, and nothing was made twice or is left
    first, killed, resumed = (json.loads(line) for line in notes.read_text().splitlines())
    assert killed == resumed
    assert not set(first["names"]) & set(resumed["names"])
    assert check_totals(fabric, run)["trajectories_completed"] == 2 * 4


def test_each_of_several_processes_gets_its_own_rows(fabric: Processes, tmp_path: Path) -> None:
    # Given groups of four, and two processes that train two rows at a time
    run, notes, weights = walk(fabric, "ranks"), tmp_path / "notes.jsonl", tmp_path / "weights"
    settings = {"num_generations": 4, "per_device_train_batch_size": 2, "max_steps": 2}
    place = {"run": "ranks", "directory": str(tmp_path / "training"), "notes": str(notes), "settings": settings}
    # When they train
    assert train(fabric, {**place, "weights": str(weights)}, launcher=RANKS) == 0
    # Then every group was submitted once, and each process trained its half
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    for step in range(2):
        shares = [[int(name.rpartition(".")[2]) for name in row["names"]] for row in rows if row["step"] == step]
        assert sorted(shares) == [[0, 1], [2, 3]]
    assert check_totals(fabric, run)["groups_consumed"] == 2
    # And both hold the weights that workers have
    published = run.weights()
    for rank in range(2):
        said, count, mine = json.loads(Path(f"{weights}.{rank}").read_text())
        assert (said, count) == (rank, 2)
        for name, each in mine.items():
            np.testing.assert_array_equal(published[name], np.array(each, np.float32))
