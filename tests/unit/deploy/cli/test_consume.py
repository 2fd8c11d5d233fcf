"""What `rollfab consume --output` keeps when no more groups can come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollfab.deploy.cli.data import until_stuck
from rollfab.fabric.contract.errors import NothingMoves
from rollfab.fabric.contract.records import Group
from rollfab.trainer.files import read_groups, write_groups


def test_groups_that_came_before_the_run_got_stuck_are_in_the_file(tmp_path: Path) -> None:
    def groups() -> Iterator[Group]:
        yield Group(group_id="g", task_id="t", rollouts=())
        raise NothingMoves("no worker is there", run_id="r")

    stuck: list[NothingMoves] = []
    assert write_groups(tmp_path / "x.jsonl", until_stuck(groups(), stuck)) == 1
    assert [each.group_id for each in read_groups(tmp_path / "x.jsonl")] == ["g"]
    assert [error.message for error in stuck] == ["no worker is there"]
