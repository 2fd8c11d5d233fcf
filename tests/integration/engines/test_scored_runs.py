"""A teacher on real processes: what it finds of ids that another model made is what the model itself says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.integration.gateway.exactness import check_exact
from tests.support.processes.fabric_processes import Processes, processes

pytest.importorskip("torch")
LAKE = "rollfab.workers.environments.games.frozenlake:FrozenLake"
pytestmark = [pytest.mark.redis, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("scored")) as fabric:
        worlds = ("score=rollfab.workers.environments.score:Score", f"lake={LAKE}")
        fabric.start_roles(agent=tuple(word for world in worlds for word in ("--environment", world)))
        yield fabric


def test_a_teacher_says_how_likely_ids_are(fabric: Processes) -> None:
    dice = np.random.default_rng(0)
    lines = {f"line-{index}": dice.integers(3, 100, 20 + index).tolist() for index in range(6)}
    run = fabric.new_run("teacher", "score", is_lively=True, sampling={"prompt_logprobs": 5})

    run.submit([{"ids": ids} for ids in lines.values()], group_size=1, group_ids=list(lines))

    for group in fabric.collect(run, len(lines), 60.0):
        (rollout,) = group.rollouts
        (branch,) = rollout.branches()
        assert branch.prompt_ids.tolist() == lines[group.group_id]
        check_exact(rollout)
        own, top = (branch.side(name, of_prompt=True) for name in ("prompt_logprobs", "prompt_top_logprobs"))
        assert own is not None and top is not None and top.shape == (len(branch.prompt_ids), 5)
        assert (own[1:] <= top[1:, 0]).all(), "no token is likelier than the likeliest"


def test_a_task_without_ids_is_a_dead_letter_that_says_so(fabric: Processes) -> None:
    run = fabric.new_run("odd", "score", attempt_count_max=1)
    run.submit([{}, {"ids": [-1]}, {"ids": [1.5]}], group_size=1, group_ids=["none", "below", "half"])
    fabric.collect(run, 3, 60.0)
    letters = {name: letter.reason for name, letter in fabric.dead_letters(run).items()}
    assert 'the task has no "ids"' in letters["none.0"]
    assert "number 0 of its ids is -1, expected a token id, 0 to 2,147,483,647" in letters["below.0"]
    assert "number 0 of its ids is 1.5, expected a token id" in letters["half.0"]


def test_what_no_turn_read_of_a_last_observation_is_minus_infinity(fabric: Processes) -> None:
    """Given a world cut off after two turns, then what it said first was read, and what it said last was not."""
    sampling = {"prompt_logprobs": 0, "logit_bias": {5: 100.0}}  # a space: no move, so the episode goes on
    run = fabric.new_run("cut", "lake", is_lively=True, turn_count_max=2, sampling=sampling)

    run.submit([{"seed": 0}], group_size=1)

    (group,) = fabric.collect(run, 1, 60.0)
    (rollout,) = group.rollouts
    (branch,) = rollout.branches()
    told = branch.side("prompt_logprobs")
    assert rollout.finish_reason == "turns"
    assert branch.completion_mask.tolist() == [1, 0, 1, 0] and told is not None
    assert np.isfinite(told[1]) and np.isneginf(told[3])
