"""What `rollfab bench engine` accepts as the same work in both arms, and how its figures follow. No vLLM is needed."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import numpy as np
import pytest
from typer.testing import CliRunner

from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import Group
from tests.bench.cli import app
from tests.bench.engine.arms import Rollouts, same_fraction
from tests.bench.engine.control import Stop, row, worst
from tests.bench.engine.offline import Answers
from tests.bench.overhead.arms import GROUP_SIZE, count_tokens
from tests.support.records import new_rollout

WORK = Rollouts(
    name="work",
    model="tiny",
    trajectory_count=16,
    turn_count=2,
    completion_tokens_min=3,
    completion_tokens=5,
    observation_tokens=4,
)


def answered(work: Rollouts) -> tuple[list[Group], Answers]:
    """What both arms give when all goes well: every token is its place, and between two turns are a reply's."""
    requests = work.requests(work.tasks())
    groups, completions = [], []
    for index, length in enumerate(work.lengths):
        made = np.arange(work.turn_count * length, dtype=np.int32)
        reply = np.full(work.observation_tokens, 99, np.int32)
        parts = [part for turn in np.split(made, work.turn_count) for part in (turn, reply)][:-1]
        masks = [np.zeros(len(each), np.uint8) if each is reply else np.ones(len(each), np.uint8) for each in parts]
        rollout = new_rollout(
            np.concatenate(parts),
            trajectory_id=f"{index}.0",
            group_id=str(index),
            turn_count=work.turn_count,
            prompt_ids=np.array(requests.prompts[index * GROUP_SIZE], np.int32),
            completion_mask=np.concatenate(masks),
        )
        groups.append(Group(group_id=str(index), task_id="t", rollouts=(rollout,) * GROUP_SIZE))
        completions += [made.tolist()] * GROUP_SIZE
    return groups, Answers(duration_s=1.0, completions=completions)


def test_both_arms_are_asked_for_the_same_tokens() -> None:
    # Given a workload, as the fabric's tasks and as requests for offline generate
    tasks, requests = WORK.tasks(), WORK.requests(WORK.tasks())

    # Then there is a request for every trajectory, of a length that its group's task says, and all add up
    assert len(requests.prompts) == len(requests.lengths) == GROUP_SIZE * len(tasks) == WORK.trajectory_count
    assert list(requests.lengths) == [task["completion_tokens"] for task in tasks for _ in range(GROUP_SIZE)]
    assert sum(requests.lengths) * requests.turn_count == WORK.tokens
    assert sorted(WORK.lengths) == [3, 5]
    # And groups differ in their prompts
    assert len({tuple(prompt) for prompt in requests.prompts}) == len(tasks)
    assert {len(prompt) for prompt in requests.prompts} == {WORK.observation_tokens}


def test_a_fabric_that_loses_work_is_no_figure() -> None:
    # Given what a good fabric returns
    groups, answers = answered(WORK)
    assert count_tokens(groups, WORK) == WORK.tokens

    # When a group, a rollout, or a token of one is missing, then there is nothing to compare
    first, *others = groups[0].rollouts
    short = dataclasses.replace(groups[0], rollouts=tuple(others))
    cut = dataclasses.replace(first, completion_mask=np.where(first.completion_ids, first.completion_mask, 0))
    less = dataclasses.replace(groups[0], rollouts=(cut, *others))
    for lost in ([], groups[1:], [short, groups[1]], [less, groups[1]], [groups[0], groups[0]]):
        with pytest.raises(FabricError):
            count_tokens(lost, WORK)
    with pytest.raises(FabricError):
        same_fraction([short, groups[1]], WORK.requests(WORK.tasks()), answers)


def test_other_tokens_or_another_prompt_are_not_the_same() -> None:
    groups, answers = answered(WORK)
    requests = WORK.requests(WORK.tasks())
    assert same_fraction(groups, requests, answers) == 1.0

    # When one completion differs in a token
    answers.completions[0][2] += 1  # type: ignore[index]  # the eight of a group are one list here
    assert same_fraction(groups, requests, answers) == 0.5
    # And when all answer prompts that were not asked
    exchanged = dataclasses.replace(requests, prompts=requests.prompts[::-1])
    assert same_fraction(groups, exchanged, answers) == 0.0


def test_the_headline_is_the_worst_batch_and_the_worst_limit() -> None:
    # Given samples of two batches; the second's steps are longer
    calm = [Stop(steps=1, ms=4.0, answer_ms=5.0)] * 9
    rows = [
        row("abort", 1, [*calm, Stop(steps=3, ms=9.0, answer_ms=9.0)], [5.0] * 10),
        row("abort", 32, calm, [20.0] * 10),
        row("pause", 1, calm, [5.0] * 10),
        row("running", 1, calm, [5.0] * 10),
        row("step_tokens", 1, [*calm, Stop(steps=1, ms=8.0, answer_ms=0.0)], [5.0] * 10),
    ]

    # When they are summed up
    found = worst(rows)

    # Then one bad sample of one batch is seen
    assert (found["abort_steps_p50"], found["abort_steps_p99"], found["pause_steps_p99"]) == (1, 3, 1)
    assert (found["budget_ms_p50"], found["budget_ms_p99"]) == (4.0, 8.0)
    assert found["budget_over_step_ms_p99"] == 3.0
    assert found["step_ms_p50"] == 20.0


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_to_type() -> None:
    said = CliRunner().invoke(app, ["engine", "--quick", "--json"])
    assert (said.exit_code, said.stdout) == (1, "")
    assert "make bench BENCH=engine" in said.stderr
