"""The command line as a person meets it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollfab import __version__ as rollfab_version
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.deploy.main import app
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.host.directories import held
from rollfab.trainer.client import connect as rollfab_connect


def rollfab(*words: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, as a process of its own takes a second to start; errors end it as in `main`."""
    with ThreadPoolExecutor(1) as thread:  # in which no event loop runs
        done = thread.submit(CliRunner(env={"ROLLFAB_URL": url}).invoke, app, words).result()
    error, code, said = done.exception, done.exit_code, done.stderr
    if error is not None and not isinstance(error, SystemExit):
        code, said = 2 if isinstance(error, ConfigError) else 1, f"{said}{error}"
    return subprocess.CompletedProcess(words, code, done.stdout, said)


@pytest.mark.parametrize("is_ours", [True, False], ids=["own-broker", "given-broker"])
@pytest.mark.timeout(60)
def test_up_says_that_it_keeps_work_only_where_the_broker_was_its_own(url: str, tmp_path: Path, is_ours: bool) -> None:
    words = ["up", "--data", str(tmp_path / "data"), "--port", "0", "--dedicated", "0", "--agents", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "ROLLFAB_URL"}
    place = {} if is_ours else {"ROLLFAB_URL": url}
    with subprocess.Popen(
        [sys.executable, "-m", "rollfab", *words], stdout=subprocess.PIPE, text=True, env={**environment, **place}
    ) as process:
        try:
            assert process.stdout is not None
            while "rollfab is up" not in (line := process.stdout.readline()):
                assert line, "it ended"
            assert f"(the key is in {tmp_path}/data/api.key)" in line  # for what is kept has no key in it
            assert (tmp_path / "data" / "api.key").read_text().strip() not in line
        finally:
            process.terminate()
        said = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert ("queued work and weights are kept in" in said) is is_ours


@pytest.mark.parametrize("words", ["up --port 0 --dedicated 0 --agents 0 --data", "demo --output"])
def test_a_second_command_leaves_the_files_of_the_first_one_alone(url: str, tmp_path: Path, words: str) -> None:
    # Given a directory that an `up` on this broker works in
    (tmp_path / "logs").mkdir()
    files = {tmp_path / "api.key": "k", tmp_path / "summary.json": "{}", tmp_path / "logs" / "agent-0.log": "a line"}
    for path, text in files.items():
        path.write_text(text)

    with held(tmp_path, "--data"):
        done = rollfab(*words.split(), str(tmp_path), url=url)

    assert done.returncode == 2 and "is in use by another command" in done.stderr
    assert {path: path.read_text() for path in files} == files
    with held(tmp_path, "--data"):
        pass


def test_the_last_words_of_a_role_are_of_its_last_life(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        child = supervisor.add("role", ["version"])
        while child.start_count < 2 or child.is_running:
            supervisor.watch()
            time.sleep(0.01)
        supervisor.watch()
        assert child.tail().splitlines()[:2] == [rollfab_version] * 2
        assert child.last_words == rollfab_version


@pytest.mark.parametrize(
    ("command", "variable"), [("status", "ROLLFAB_URL"), ("up", "ROLLFAB_URL"), ("replay", "ROLLFAB_SERVER_KEY")]
)
def test_the_help_names_the_variable_once(command: str, variable: str) -> None:
    said = rollfab(command, "--help").stdout
    assert said.count(variable) == 1
    assert f"[env: {variable}]" in " ".join(said.replace("│", " ").split())
    assert "\\" not in said


def test_status_is_one_object(url: str) -> None:
    done = rollfab("status", "--json", url=url)
    assert done.returncode == 0
    assert set(json.loads(done.stdout)) == {"runs", "workers", "leases", "lends", "bad_rows"}


def test_the_switch_is_kept_and_shown(url: str) -> None:
    assert rollfab("lend", "on", "--all", url=url).returncode == 0
    assert "all serving workers: on" in rollfab("lend", "status", url=url).stdout
    lends = json.loads(rollfab("lend", "3", "--worker", "w9", "--future", "--json", url=url).stdout)["lends"]
    assert {name: (said["mode"], said["slot_count_max"]) for name, said in lends.items()} == {
        "*": ("on", None),
        "w9": ("on", 3),
    }


def test_tasks_of_a_file_become_groups(url: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"seed": 1}\n\n{"seed": 2}\n')
    words = ("--run", "cli", "--group-size", "2")
    unknown = rollfab("submit", str(file), *words, url=url)
    assert (unknown.returncode, "run 'cli' does not exist" in unknown.stderr) == (2, True)
    done = rollfab("submit", str(file), *words, "--model", "tiny", "--environment", "frozenlake", "--json", url=url)
    assert len(json.loads(done.stdout)["group_ids"]) == 2
    (row,) = json.loads(rollfab("status", "--json", url=url).stdout)["runs"]
    assert (row["run_id"], row["depth"], row["trajectories"]["queued"]) == ("cli", 4, 4)
    assert json.loads(rollfab("dead", "ls", "--run", "cli", "--json", url=url).stdout) == []


def test_the_doctor_lists_what_is_there() -> None:
    rows = json.loads(rollfab("doctor", "--json").stdout)
    assert {"Python", "GPU"} <= {row["what"] for row in rows}
    assert all(row["is_fine"] for row in rows if row["what"] == "Python")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_has_not_every_character_is_told_the_rest_by_number(encoding: str) -> None:
    with EmbeddedBroker.start() as broker:
        with rollfab_connect(broker.url) as fabric:
            fabric.run("r", model="tiny", environment="frozenlake")
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "ROLLFAB_URL": broker.url}
        done = subprocess.run([sys.executable, "-m", "rollfab", "status"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and b"  \\u2192 " in done.stdout


def test_the_doctor_says_whether_the_broker_of_a_url_can_be_used() -> None:
    with EmbeddedBroker.start() as broker:
        done = rollfab("doctor", url=broker.url)
    assert done.returncode == 0 and "ok      broker: answers, and can be used" in done.stdout
    gone = rollfab("doctor", url="redis://127.0.0.1:1")
    assert gone.returncode == 1 and "broken  broker: the broker redis://127.0.0.1:1/0 is not reachable" in gone.stdout
    strange = json.loads(rollfab("doctor", "--json", url="http://x").stdout)
    assert [row["is_fine"] for row in strange if "its scheme must be redis" in row["found"]] == [False]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dead ls --run r", "run r has no dead letters"),
        ("weights ls r", "nothing is published in run r yet"),
        ("rows ls", "every row can be read"),
        ("consume --run r --timeout 1", "stopped: no group came within 1 s"),
        ("consume --run r --peek", "run r has no complete group that is not acknowledged"),
        ("api keys ls --file {keys}", "/keys holds no keys: `"),
        ("runs ls", "there are no runs on this broker"),
    ],
)
def test_a_listing_that_is_empty_says_so_beside_it(tmp_path: Path, words: str, says: str) -> None:
    with EmbeddedBroker.start(tmp_path / "broker") as broker:
        if " r" in words:
            with rollfab_connect(broker.url) as fabric:
                fabric.run("r", model="tiny", environment="frozenlake")
        (tmp_path / "keys").touch(mode=0o600)
        done = rollfab(*words.format(keys=tmp_path / "keys").split(), url=broker.url)
        assert (done.returncode, done.stdout) == (0, "") and says in done.stderr


def test_a_run_that_is_over_is_deleted(url: str) -> None:
    with rollfab_connect(url) as fabric:
        fabric.run("over", model="tiny", environment="frozenlake").submit([{"seed": 1}], group_size=4)
        fabric.run("kept", model="tiny", environment="frozenlake")

    listed = {row["run_id"]: row["depth"] for row in json.loads(rollfab("runs", "ls", "--json", url=url).stdout)}
    assert (listed["over"], listed["kept"]) == (4, 0)
    refused = rollfab("runs", "rm", "over", url=url)
    assert (refused.returncode != 0, "4 trajectories" in refused.stderr) == (True, True)
    assert rollfab("runs", "rm", "over", "--yes", url=url).stdout == "run over is deleted\n"

    left = rollfab("runs", "ls", url=url).stdout
    assert "kept" in left and "over" not in left
    unknown = rollfab("runs", "rm", "over", "--yes", url=url)
    assert unknown.returncode == 2 and "there are " in unknown.stderr
