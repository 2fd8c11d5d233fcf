"""How long trajectories are, and what the broker calls their tasks: rules/queue/length.py."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from rollfab.fabric import queue
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.rules.queue.length import (
    KNOWN_COUNT,
    LENGTH_MAX,
    LONG,
    RUN_COUNT,
    TASK_COUNT,
    TOKENS_PER_S,
    length_of,
    task_name,
)
from tests.support.records import new_rollout

RUN = RunConfig(run_id="r", model="tiny", environment="frozenlake")


@pytest.mark.parametrize(
    ("turn_ms", "seconds"),
    [
        ([], 0),
        ([0, 900, 900], 0),  # a turn of 900 ms is waiting and tokens, which count for themselves
        ([0, 900, 2900, 2900, 3000, 4000], 3),
        ([0, 900, 400], 0),  # a clock that went back
        ([0, 900], 0),
        ([0, 0, 1 << 52], LENGTH_MAX),
    ],
)
def test_a_length_is_tokens_and_the_environments_seconds(turn_ms: list[int], seconds: int) -> None:
    made = new_rollout((4, 5, 6), completion_mask=np.array([1, 0, 1], np.uint8), turn_ms=turn_ms)

    assert length_of(made) == min(LENGTH_MAX, 2 + seconds * TOKENS_PER_S)


def test_tasks_have_few_names_and_none_where_a_run_does_not_ask() -> None:
    names = {task_name(RUN, f"task-{index}") for index in range(1000)}

    assert len(names) > 950
    assert all(re.fullmatch("[0-9a-f]{4}", name) for name in names)
    assert task_name(replace(RUN, longest_first=False), "t") == ""


def test_the_brokers_script_has_the_same_bounds() -> None:
    text = (files(queue) / "lua" / "use" / "length.lua").read_text("utf-8")

    names, values = re.findall(r"^local ([A-Z_, ]+) = (.+)$", text, re.MULTILINE)[0]
    assert dict(zip(names.split(", "), map(float, values.split(", ")), strict=True)) == {
        "LONG": LONG,
        "KNOWN_COUNT": KNOWN_COUNT,
        "TASK_COUNT": TASK_COUNT,
        "RUN_COUNT": RUN_COUNT,
    }
