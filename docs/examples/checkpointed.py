"""A trainer that may be killed at any moment: what it has learnt holds every group once, and none is lost.

    python docs/examples/checkpointed.py DIRECTORY      # again after every kill; ROLLFAB_URL says where the broker is

What it learns is a toy. The order of its steps is the recipe; docs/training.md says why it holds.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import rollfab
from rollfab.fabric.contract.records import Group
from rollfab.trainer.client import Run

STEP_COUNT, GROUP_COUNT, GROUP_SIZE = 8, 2, 2
STALENESS = 1
REMEMBERED_COUNT = 1000  # names of groups: far more than can be on their way


@dataclass
class State:
    """All that a checkpoint holds."""

    step: int = 0
    version: int = -1
    done: list[str] = field(default_factory=list)  # names of groups that the weights have learnt from
    weights: list[float] = field(default_factory=lambda: [0.0] * 64)


def load(path: Path) -> State:
    return State(**json.loads(path.read_text())) if path.exists() else State()


def save(path: Path, state: State) -> None:
    """Put the whole checkpoint in place of the one before, in one rename."""
    new = path.with_suffix(".new")
    with new.open("w") as file:
        json.dump(asdict(state), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def learn(state: State, groups: list[Group]) -> None:
    """Add a rollout's reward to the weight of each token that it has; yours is an optimiser's step."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for token in rollout.completion_ids.tolist():
            state.weights[token] += rollout.reward


def submit(run: Run, state: State) -> None:
    """Keep this step's groups on their way, and those of steps ahead; a name that was pushed before changes nothing."""
    numbers = range(state.step * GROUP_COUNT, min(state.step + 1 + STALENESS, STEP_COUNT) * GROUP_COUNT)
    names = [f"group-{number}" for number in numbers]
    run.submit([{"seed": number} for number in numbers], group_size=GROUP_SIZE, group_ids=names)


def publish(run: Run, state: State, version: int) -> None:
    run.publish({"weights": np.array(state.weights, np.float32)}, version=version)
    state.version = version


def main(directory: Path) -> None:
    path = directory / "checkpoint.json"
    with rollfab.connect() as fabric:
        run = fabric.run("checkpointed", model="example/toy", environment="frozenlake", staleness=STALENESS)
        state = load(path)
        for name in state.done[-GROUP_COUNT:]:
            run.cancel(name)  # learnt, but perhaps not acknowledged: nobody needs it again
        if run.head_version() != state.version or state.version < 0:
            publish(run, state, run.head_version() + 1)  # what workers generate with is what we hold
        while state.step < STEP_COUNT:
            submit(run, state)
            with run.groups(count=GROUP_COUNT, keep=lambda group: group.group_id not in state.done) as groups:
                batch = list(groups)
                learn(state, batch)
                state.step += 1
                state.done = [*state.done, *(group.group_id for group in batch)][-REMEMBERED_COUNT:]
                publish(run, state, state.version + 1)
                save(path, state)  # the last thing before the groups are acknowledged, at the end of the block


if __name__ == "__main__":
    main(Path(sys.argv[1]))
