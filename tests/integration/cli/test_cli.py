"""The command line as a person meets it: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollfab import __version__ as rollfab_version
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.trainer.client import connect as rollfab_connect


def rollfab(*words: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "ROLLFAB_URL"}
    if url is not None:
        environment["ROLLFAB_URL"] = url
    return subprocess.run(
        [sys.executable, "-m", "rollfab", *words], capture_output=True, text=True, env=environment, timeout=60
    )


def test_without_a_broker_a_command_says_how_to_get_one() -> None:
    done = rollfab("status")
    assert done.returncode == 2
    assert "no broker: give --url" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_broker_is_named_without_a_traceback() -> None:
    done = rollfab("status", "--url", "redis://127.0.0.1:1")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_usage_is_exit_code_two(url: str) -> None:
    assert rollfab("status", "--nonsense", url=url).returncode == 2
    done = rollfab("lend", "maybe", url=url)
    assert (done.returncode, "expected on, observe, off" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("role", "name"), [("controller", "a b"), ("agent", "a b"), ("worker", "a b"), ("reward", "a b"), ("worker", "x*")]
)
@pytest.mark.timeout(30)
def test_a_name_that_cannot_be_part_of_a_key_is_refused(url: str, role: str, name: str) -> None:
    done = rollfab(role, "--name", name, url=url)
    assert done.returncode == 2
    assert f"worker {name!r} is not a valid name: use 1 to 63 letters" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("role", "given"), [("agent", "0"), ("agent", "-1"), ("agent", "nan"), ("reward", "inf")])
def test_a_timeout_that_cannot_pass_is_refused(url: str, role: str, given: str) -> None:
    done = rollfab(role, "--timeout", given, url=url)
    assert done.returncode == 2
    assert f"--timeout is {given}: give a finite number of seconds above 0" in " ".join(done.stderr.split())


@pytest.mark.parametrize("port", ["-1", "0", "70000"])
def test_a_broker_takes_only_ports_that_there_are(port: str, tmp_path: Path) -> None:
    done = rollfab("broker", "--data", str(tmp_path / "data"), "--port", port)
    assert done.returncode == 2
    assert "Invalid value for '--port'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "option"), [("train", "--output"), ("demo", "--output"), ("up", "--data")])
@pytest.mark.timeout(30)
def test_a_file_where_a_directory_belongs_is_named(url: str, tmp_path: Path, command: str, option: str) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    done = rollfab(command, option, str(file), url=url)
    assert done.returncode == 2
    assert f"error: {option}: the directory" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("--environment", "bad", "--environment 'bad' does not name code: write --environment NAME=module:attr"),
        (
            "--environment",
            "w=/nowhere/python:m:W",
            "virtual environment, --environment NAME=/venv/bin/python:module:attr",
        ),
        ("--reward", "bad", "--reward 'bad' does not name code: write --reward NAME=module:attr"),
        ("--reward", "r=python:m:f", "a reward function is written --reward NAME=module:attr"),
    ],
    ids=["environment", "interpreter", "reward", "reward-with-interpreter"],
)
def test_up_starts_nothing_that_its_agents_would_refuse(tmp_path: Path, option: str, given: str, says: str) -> None:
    done = rollfab("up", "--data", str(tmp_path / "data"), "--port", "0", option, given)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in " ".join(done.stderr.split())
    assert not (tmp_path / "data").exists()


def test_up_starts_nothing_without_a_port_for_its_page(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = rollfab("up", "--data", str(tmp_path / "data"), "--port", str(port))
    assert (done.returncode, done.stdout) == (2, "")
    said = " ".join(done.stderr.split())
    assert f"--port {port}: the page cannot listen" in said
    assert "choose another port, or --port 0 for a free one" in said
    assert not (tmp_path / "data").exists()


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


@pytest.mark.timeout(60)  # four processes, each a second or more to start
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


def test_a_line_that_is_no_task_is_named(url: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"seed": 1}\n[1]\n')
    done = rollfab("submit", str(file), "--run", "cli", url=url)
    assert (done.returncode, "line 2 is list" in done.stderr) == (1, True)


def test_the_doctor_lists_what_is_there() -> None:
    rows = json.loads(rollfab("doctor", "--json").stdout)
    assert {"Python", "GPU"} <= {row["what"] for row in rows}
    assert all(row["is_fine"] for row in rows if row["what"] == "Python")


@pytest.mark.timeout(90)  # some processes, each a second or more to start
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dead ls --run r", "run r has no dead letters"),
        ("weights ls r", "nothing is published in run r yet"),
        ("rows ls", "every row can be read"),
        ("consume --run r --timeout 1", "stopped: no group came within 1 s"),
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
