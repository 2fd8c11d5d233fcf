"""What README.md tells a newcomer to type works as it stands there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollfab

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def snippet(heading: str) -> str:
    """The first Python block under a heading of the README."""
    part = README.split(f"## {heading}", 1)[1]
    found = re.search(r"```python\n(.*?)```", part, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def fabric_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`rollfab up`, with the URL that it prints exported as it says."""
    mine = "countdown=docs.examples.my_environment:Countdown"
    process = subprocess.Popen(
        [sys.executable, "-m", "rollfab", "up", "--port", "0", "--data", str(tmp_path / "data"), "--environment", mine],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        url = ""
        while not url:
            line = process.stdout.readline()
            assert line, "rollfab up ended before it said where the broker is"
            url = line.partition("ROLLFAB_URL=")[2].strip()
        monkeypatch.setenv("ROLLFAB_URL", url)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_trainer_of_the_readme_runs(fabric_up: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Given the README's loop, cut to two steps
    source = snippet("Bring your own trainer")
    assert "first + 100)" in source
    names: dict[str, Any] = {}
    opened: list[rollfab.Fabric] = []
    # When it is run as it stands, twice
    for _ in range(2):
        exec(compile(source.replace("first + 100)", "first + 3)"), "README.md", "exec"), names)
        # Then both steps learnt
        assert capsys.readouterr().out.count("mean reward") == 2
        opened.append(names["fabric"])
    with rollfab.connect() as fabric:
        run = fabric.run("my-run")
        assert run.head_version() == 5
        assert run.status().counters["groups_consumed"] == 32
        assert set(run.weights()) == {name for name, _ in names["model"].named_parameters()}
    for fabric in opened:
        fabric.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_environment_of_one_s_own_is_played(fabric_up: str) -> None:
    from rollfab.trainer.grpo import build_model

    with rollfab.connect() as fabric:
        # The agent has to be there: nobody else knows the environment
        deadline = 100
        while deadline and "countdown" not in _offered(fabric_up):
            deadline -= 1
        run = fabric.run("mine", model="tiny", environment="countdown", environment_options={"start": 3})
        run.publish(build_model("tiny").named_parameters(), version=0)
        run.submit([{"task_id": "from three"}], group_size=4)
        (group,) = run.groups(count=1, timeout=60)
    assert group.task_id == "from three"
    assert len(group.rollouts) == 4
    for rollout in group.rollouts:
        assert 3 <= rollout.turn_count <= 12
        assert rollout.reward == pytest.approx(sum(rollout.info["rewards"]))


def _offered(url: str) -> list[str]:
    status = subprocess.run(
        [sys.executable, "-m", "rollfab", "status", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "ROLLFAB_URL": url},
    )
    return [name for row in json.loads(status.stdout)["workers"] for name in row["environments"]]


def test_every_file_that_the_readme_names_is_there() -> None:
    root = Path(__file__).parents[2]
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (root / target).exists(), f"README.md links to {target}"


def test_every_command_that_the_readme_names_exists() -> None:
    listed = subprocess.run([sys.executable, "-m", "rollfab", "--help"], capture_output=True, text=True).stdout
    for command in set(re.findall(r"`rollfab ([a-z]+)", README)):
        assert command in listed, f"README.md names `rollfab {command}`"
