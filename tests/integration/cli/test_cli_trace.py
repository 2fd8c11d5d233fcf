"""`rollfab trace` and `rollfab history`, as a person meets them, on a real broker; and the files that they write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from rollfab.fabric.contract.records import Failure, RunConfig, Span
from rollfab.fabric.inspect.trace import kept_group
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.fabric.ports.reading import SeenGroup
from rollfab.trainer.files import read_groups
from tests.contracts.test_queue import group_of_size, letter_of
from tests.integration.cli.test_cli import rollfab
from tests.support.records import new_rollout, rollout_of
from tests.unit.fabric.inspect.test_history import sample
from tests.unit.trainer.test_files import bits

RUN = RunConfig(run_id="lake", model="tiny", environment="frozenlake")
WORKER = "w" * 63


@pytest.fixture
async def fabric(url: str) -> AsyncIterator[RedisFabric]:
    async with await RedisFabric.open(url, client_name="tests") as found:
        await found.board._client.flushall()
        await found.board.create_run(RUN)
        yield found


async def play(fabric: RedisFabric, claim: TrajectoryClaim, said: str, reward: float) -> None:
    """One turn that says so, and a reward."""
    made = CharTokenizer().encode(said)
    rollout = replace(
        rollout_of(claim.job, reward),
        completion_ids=made,
        completion_mask=np.ones(len(made), np.uint8),
        logprobs=np.full(len(made), -0.5, np.float32),
        spans=(Span(0, len(made), WORKER, 7),),
        turn_ms=[3, 40, 41],
    )
    assert await fabric.trajectories(RUN).settle(claim, rollout, is_scored=True)


async def test_what_holds_up_a_step_is_listed_and_one_that_ended_is_told_in_full(
    fabric: RedisFabric, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "no trajectory is under way" in rollfab("trace", url=url).stderr
    # Given a group of two, of which one is under way and one has ended
    await fabric.rollouts(RUN).push([group_of_size("g1", 2)])
    first, second = await fabric.trajectories(RUN).claim("agent-1", 2)
    await play(fabric, second, "all the way left\nand \x1b[31mright", 0.5)
    # Then the one under way is listed, with where it is
    said = rollfab("trace", "--run", "lake", url=url)
    assert "lake  1 trajectory under way" in said.stdout
    assert "g1.0" in said.stdout and "the environment's reset, on agent agent-1" in said.stdout
    assert "g1.1" not in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80
    # And the other is told in full, in lines that fit
    said = rollfab("trace", "g1.1", url=url)
    assert said.returncode == 0
    assert "all the way left" in said.stdout
    assert "reward 0.5" in said.stdout
    assert f"by {WORKER} at version 7" in " ".join(said.stdout.split())
    assert "37 ms" in said.stdout
    assert "\x1b[31m" not in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80
    found = json.loads(rollfab("trace", "g1.1", "--json", url=url).stdout)
    assert (found["state"], found["reward"], found["pieces"][1]["kind"]) == ("completed", 0.5, "turn")
    # When all is consumed, it is among the finished
    await play(fabric, first, "up", 0.0)
    assert "1 group for the trainer" in rollfab("trace", "--state", "waiting", url=url).stdout
    (delivery,) = await fabric.rollouts(RUN).receive("t", 1, 1.0)
    await fabric.rollouts(RUN).acknowledge(delivery)
    said = rollfab("trace", "--state", "finished", url=url)
    assert "1 group kept" in said.stdout and "terminated" in said.stdout


async def test_what_is_asked_for_wrongly_says_what_to_do(fabric: RedisFabric, url: str) -> None:
    said = rollfab("trace", "g9.0", url=url)
    assert said.returncode == 1
    assert "no trajectory 'g9.0' now" in said.stderr and "rollfab trace --state finished" in said.stderr
    said = rollfab("trace", "--run", "lakes", url=url)
    assert "run 'lakes' does not exist" in said.stderr and "lake" in said.stderr
    said = rollfab("trace", "--state", "done", url=url)
    assert said.returncode == 2 and "waiting" in said.stderr and "finished" in said.stderr
    for word in ("12", "h", "-1h", "1e9d"):
        said = rollfab("history", f"--since={word}", url=url)
        assert said.returncode == 2 and "30m, 12h or 3d" in said.stderr, word


async def add_samples(fabric: RedisFabric) -> None:
    """Three samples, a minute apart, in which a worker lent and was late."""
    term = await fabric.board.lead("c1", 2_000)
    now_ms = await fabric.board.wall_ms()
    for minute in range(3):
        counts = {"request_count": 100 * minute, "request_count_alone": 100 * minute}
        late = {"violation_count": 20 * minute, "violation_count_alone": minute, "ttft_ms_p99": 250}
        made = sample(minute, 6_000 * minute, **counts, **late)
        (run,) = made.runs
        made = replace(made, runs=(replace(run, run_id="lake", rollout_count=60 * minute, groups_waiting=minute),))
        assert await fabric.board.add_sample(term, replace(made, time_ms=now_ms - (2 - minute) * 60_000))


async def test_history_says_what_happened_and_whether_lending_hurt(
    fabric: RedisFabric, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "a sample a minute" in rollfab("history", url=url).stderr
    # Given samples of three minutes, in which a worker lent and was late
    await add_samples(fabric)
    said = rollfab("history", "--since", "1h", url=url)
    assert "tokens/s" in said.stdout and "100 now" in said.stdout
    assert "s1  yes: 40 of 200 requests beside rollouts" in " ".join(said.stdout.split("\n"))
    assert max(map(len, said.stdout.splitlines())) <= 80
    found = json.loads(rollfab("history", "--json", url=url).stdout)
    assert [point["tokens_per_s"] for point in found["points"]] == [100.0, 100.0]
    assert found["lending"][0]["answer"] == "yes"


# ---------------------------------------------------------------- files


def names_in(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_kept_groups_in_a_file_are_what_the_trainer_received(
    fabric: RedisFabric, url: str, tmp_path: Path, suffix: str
) -> None:
    # Given consumed groups: a whole one; one of which a trajectory failed; one whose quorum left a trajectory behind
    output = tmp_path / f"kept{suffix}"
    words = ("trace", "--state", "finished", "--output", str(output))
    said = rollfab(*words, url=url)
    assert said.returncode == 0 and "is not written: no consumed group is kept" in said.stderr
    stream, received = fabric.rollouts(RUN), []
    for name, quorum in (("whole", 2), ("failed", 2), ("quorum", 1)):
        await stream.push([replace(group_of_size(name, 2), quorum=quorum)])
        first, second = await fabric.trajectories(RUN).claim("agent-1", 2)
        await play(fabric, first, "left", 0.5)
        if name == "whole":
            await play(fabric, second, "right", 1.0)
        if name == "failed":
            fence, letter = second.fence, letter_of(second)
            assert await fabric.trajectories(RUN).fail(second.job.trajectory_id, fence, letter, is_final=True) == "dead"
        (delivery,) = await stream.receive("t", 1, 1.0)
        assert await stream.acknowledge(delivery)
        received.append(delivery.group)
    assert [len(each.failures) for each in received] == [0, 1, 0]
    assert [len(each.cancelled) for each in received] == [0, 0, 1]

    # When they are written, then they are equal to what was received, arrays to the bit, the newest first
    said = rollfab(*words, url=url)
    assert said.stdout == f"3 groups written to {output}; they are still kept\n"
    assert list(map(bits, read_groups(output))) == list(map(bits, reversed(received)))
    assert all(each.turn_ms == [3, 40, 41] for group in read_groups(output) for each in group.rollouts)

    # And what is there already stays as it is; the newest alone are written where so many are asked for
    before = output.read_bytes()
    said = rollfab(*words, url=url)
    assert said.returncode == 1 and "is there already: name another file, or move it away" in said.stderr
    assert output.read_bytes() == before
    some = tmp_path / f"some{suffix}"
    said = rollfab(*words[:-1], str(some), "--count", "1", "--json", url=url)
    assert json.loads(said.stdout) == {"path": str(some), "group_count": 1}
    assert [each.group_id for each in read_groups(some)] == ["quorum"]
    assert names_in(tmp_path) == [output.name, some.name]


def test_a_failed_trajectory_whose_letter_is_gone_is_told_from_a_cancelled_one_only_where_it_can_be() -> None:
    seen = SeenGroup(
        group_id="g",
        state="finished",
        task_id="t",
        task={},
        size=3,
        quorum=1,
        completed_count=1,
        failed_count=2,
        rollouts={"g.0": new_rollout()},
    )
    lost = kept_group(seen)
    assert [each.trajectory_id for each in lost.failures] == ["g.1", "g.2"] and not lost.cancelled
    mixed = kept_group(replace(seen, failed_count=1))
    assert mixed.cancelled == ("g.1", "g.2") and not mixed.failures
    bad = kept_group(replace(seen, failed_count=0, unread={"g.1": "torn"}))
    assert bad.failures == (Failure("g.1", "torn"),) and bad.cancelled == ("g.2",)


@pytest.mark.parametrize("words", ["history", "trace --state finished --run lake"])
def test_a_file_that_cannot_be_written_is_refused_in_one_line_before_the_broker_is_asked(
    tmp_path: Path, words: str
) -> None:
    def refused(name: str) -> str:
        said = rollfab(*words.split(), "--output", str(tmp_path / name), url="redis://127.0.0.1:1")
        assert said.returncode and said.stdout == "" and len(said.stderr.splitlines()) == 1, said.stderr
        return said.stderr

    assert "x.csv ends in .csv: name it .jsonl or .parquet" in refused("x.csv")
    assert "none/x.jsonl is not there: make it first" in refused("none/x.jsonl")
    (tmp_path / "x.parquet").touch()
    assert "x.parquet is there already: name another file, or move it away" in refused("x.parquet")
    (tmp_path / "pyarrow.py").write_text("raise ImportError")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from rollfab.deploy.main import main; main()"
    shadowed = [sys.executable, "-c", code, str(tmp_path), *words.split(), "--output", str(tmp_path / "y.parquet")]
    said = subprocess.run(
        [*shadowed, "--url", "redis://127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert said.returncode == 2 and "pip install 'rollfab[parquet]', or take .jsonl" in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_trace_writes_nothing_but_kept_groups(tmp_path: Path) -> None:
    for words in (("trace",), ("trace", "g.0"), ("trace", "--state", "waiting")):
        said = rollfab(*words, "--output", str(tmp_path / "x.jsonl"), url="redis://127.0.0.1:1")
        assert said.returncode == 1 and "add --state finished and name no trajectory" in said.stderr


async def test_history_in_a_file_has_a_row_for_each_sample(fabric: RedisFabric, url: str, tmp_path: Path) -> None:
    said = rollfab("history", "--output", str(tmp_path / "h.jsonl"), url=url)
    assert said.returncode == 0 and "h.jsonl is not written: nothing is kept of the last 12h" in said.stderr
    await add_samples(fabric)
    for suffix in ("jsonl", "parquet"):
        said = rollfab("history", "--since", "1h", "--output", str(tmp_path / f"h.{suffix}"), url=url)
        assert said.stdout == f"2 rows written to {tmp_path}/h.{suffix}\n", said.stderr
    lines = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    table = pyarrow.parquet.read_table(tmp_path / "h.parquet")
    assert table.to_pylist() == lines
    told = json.loads(rollfab("history", "--since", "1h", "--json", url=url).stdout)["points"]
    assert [{**row, "runs": row["runs"][0], "serving": row["serving"][0]} for row in lines] == [
        {
            **point,
            "runs": {"run_id": "lake", **point["runs"]["lake"]},
            "serving": {"worker_id": "s1", **point["serving"]["s1"]},
        }
        for point in told
    ]
    assert [row["tokens_per_s"] for row in lines] == [100.0, 100.0]
    types = {name: str(table.schema.field(name).type) for name in ("time_ms", "tokens_per_s", "runs")}
    assert types["time_ms"] == "int64" and types["tokens_per_s"] == "double"
    assert types["runs"].startswith("list<element: struct<run_id: string, tokens_per_s: double")
    assert names_in(tmp_path) == ["h.jsonl", "h.parquet"]
