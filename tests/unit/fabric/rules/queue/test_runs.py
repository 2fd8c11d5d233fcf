"""Does a run ask for what no worker can do, and whose prompts share KV cache?"""

from __future__ import annotations

from typing import Any

import pytest

from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from rollfab.fabric.rules.queue.runs import cache_salt, undoable


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


def test_only_turns_of_one_run_have_the_same_salt_and_where_that_is_asked_for_only_those_of_one_trajectory() -> None:
    run = RunConfig(run_id="r", model="m", environment="e")
    careful = RunConfig(run_id="r", model="m", environment="e", prefix_cache="trajectory")
    other = RunConfig(run_id="r2", model="m", environment="e")

    assert cache_salt(run, "g.0.0") == cache_salt(run, "h.1.7")
    assert cache_salt(careful, "g.0.0") == cache_salt(careful, "g.0.7")
    salts = [cache_salt(run, "g.0.0"), cache_salt(other, "g.0.0"), cache_salt(careful, "g.0.0")]
    salts += [cache_salt(careful, "g.1.0"), cache_salt(careful, "g.10.0"), cache_salt(careful, "h.0.0")]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 32 and salt.isalnum() for salt in salts)  # as vLLM takes them, however long names are
