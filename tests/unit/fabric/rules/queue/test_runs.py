"""Does a run ask for what no worker can do?"""

from __future__ import annotations

from typing import Any

import pytest

from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from rollfab.fabric.rules.queue.runs import undoable


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        ({"guided_json": '{"type": "object"}', "temperature": 0.5}, ["guided_json"]),
        ({"guided_json": "", "top_p": 1}, []),  # as if they were not there
        ({}, []),
    ],
)
def test_only_what_a_run_really_asks_for_can_be_undoable(sampling: dict[str, Any], names: list[str]) -> None:
    worker = WorkerInfo(worker_id="w", role="dedicated", pid=1, host="h", engine="e", cannot=["guided_json", "top_p"])
    run = RunConfig(run_id="r", model="m", environment="e", sampling=sampling)

    assert undoable(run, [worker]) == {name: ["e"] for name in names}
    assert undoable(run, []) == {}
