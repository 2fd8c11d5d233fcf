"""Rounds of which what takes long is put off, on a real fabric: pushed, cancelled, gone on with after an interrupt."""

from __future__ import annotations

import json
from typing import Any

import pytest

import rollfab
from rollfab.fabric.contract.records import Group
from rollfab.trainer.client import Run
from tests.support.processes.fabric_processes import Processes, tiny_weights

pytestmark = [pytest.mark.redis, pytest.mark.timeout(150)]

TASKS = [{"seed": seed} for seed in range(11)]
OPTIONS = {"turns": 2, "pace_s": 0.0, "tokens": 12, "any_length": True}


class Interrupted(Exception):
    """What a signal's handler raises."""


def train(run: Run, state: Any, *, round_count: int, dies_in: int = -1) -> tuple[list[int], Any]:
    """Train some rounds; returns the seeds trained on and the state that was saved with them."""
    rounds = rollfab.TailRounds(TASKS, group_count=4, group_size=2, state=state)
    seeds: list[int] = []
    for number in range(round_count):
        batch = rounds.next()
        if batch is None:
            break
        run.submit(**batch.push)
        with run.groups(count=batch.needed, keep=batch.has, timeout=60.0) as groups:
            done: list[Group] = []
            for group in groups:
                done.append(group)
                if number == dies_in and len(done) == 2:
                    raise Interrupted
            assert len(done) == batch.needed, groups.ended_why
            assert {len(group.rollouts) for group in done} == {2}
            for name in rounds.end(done):
                run.cancel(name)
            task_of = dict(zip(batch.group_ids, batch.tasks, strict=True))
            seeds += [task_of[group.group_id]["seed"] for group in done]
            state = json.loads(json.dumps(rounds.state()))
    return seeds, state


def test_every_task_is_trained_on_once_also_where_a_trainer_dies_in_a_round(fabric: Processes) -> None:
    run = fabric.fabric.run("tails", model="tiny", environment="walk", environment_options=OPTIONS, staleness=0)
    run.publish(tiny_weights(), version=0)
    seeds, state = train(run, None, round_count=1)
    with pytest.raises(Interrupted):
        train(run, state, round_count=2, dies_in=0)
    with rollfab.connect(fabric.url) as again:
        more, _ = train(
            again.run("tails", model="tiny", environment="walk", environment_options=OPTIONS, staleness=0),
            state,
            round_count=10,
        )
    assert sorted(seeds + more) == [task["seed"] for task in TASKS]
    assert run.status().dead_count == 0


def is_odd(group: Group) -> bool:
    return int(group.task_id) % 2 == 1


def train_on_odd(run: Run, state: Any, *, dies_after: int | None = None) -> tuple[list[int], Any]:
    """Train on what is odd until no task is left; dies after so many groups were looked at."""
    tasks = [{**task, "task_id": str(task["seed"])} for task in TASKS]
    rounds = rollfab.TailRounds(tasks, group_count=3, group_size=2, keep=is_odd, state=state)
    seeds: list[int] = []
    seen = 0
    while (batch := rounds.next()) is not None:
        run.submit(**batch.push)
        with run.groups(timeout=60.0) as groups:
            done: list[Group] = []
            for group in groups:
                seen += 1
                if seen == dies_after:
                    raise Interrupted
                if rounds.takes(group):
                    done.append(group)
                if (more := rounds.more()) is not None:
                    run.submit(**more.push)
                if rounds.is_over:
                    break
            assert rounds.is_over, groups.ended_why
            for name in rounds.end(done):
                run.cancel(name)
            seeds += [int(group.task_id) for group in done]
            state = json.loads(json.dumps(rounds.state()))
    return seeds, state


def test_what_teaches_nothing_makes_way_for_other_tasks_also_where_a_trainer_dies(fabric: Processes) -> None:
    options = {"model": "tiny", "environment": "walk", "environment_options": OPTIONS, "staleness": 0}
    run = fabric.fabric.run("varied", **options)
    run.publish(tiny_weights(), version=0)
    with pytest.raises(Interrupted):
        train_on_odd(run, None, dies_after=5)
    with rollfab.connect(fabric.url) as again:
        seeds, _ = train_on_odd(again.run("varied", **options), None)
    assert sorted(seeds) == [task["seed"] for task in TASKS if task["seed"] % 2]
    assert run.status().dead_count == 0
