"""What `rollfab up` gives its roles: what was typed, else what the file and the environment say, else its defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollfab.deploy.local import up
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.deploy.local.up import UpOptions, start_roles
from rollfab.deploy.main import app
from rollfab.deploy.roles import starting

FILE = """
[worker]
slots = 3
model = "small"
dtype = "bfloat16"
[agent]
environment = ["mine=tests.support.worlds.worlds:Walk"]
allow_hub = ["org/*"]
[api]
port = 9123
"""


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLFAB_CONFIG", "ROLLFAB_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[UpOptions]:
    """The records that `up` was started with."""
    monkeypatch.setattr(starting, "hide", lambda: None)  # would hold for all of this process
    records: list[UpOptions] = []
    monkeypatch.setattr(up, "run_up", lambda options: records.append(options) or 0)
    return records


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of settings, found by the environment."""
    path = tmp_path / "rollfab.toml"
    path.write_text(FILE)
    monkeypatch.setenv("ROLLFAB_CONFIG", str(path))
    return path


def start(*words: str) -> None:
    done = CliRunner().invoke(app, ["up", *words])
    assert done.exit_code == 0, (done.output, done.exception)


def words_of(options: UpOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    added: dict[str, list[str]] = {}
    monkeypatch.setattr(Supervisor, "add", lambda self, name, words, **_: added.__setitem__(name, list(words)))
    start_roles(Supervisor(tmp_path), "unix:///x", options)
    return added


def value_of(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_what_nobody_said_has_the_defaults(started: list[UpOptions]) -> None:
    start()
    (made,) = started
    assert (made.model, made.slot_count, made.engine, made.dtype, made.port) == (
        "tiny",
        64,
        "transformers",
        "auto",
        8765,
    )


def test_what_was_not_typed_comes_from_the_file(
    file: Path, started: list[UpOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("--data", str(tmp_path / "data"))
    (made,) = started
    assert (made.model, made.slot_count, made.dtype, made.port) == ("small", 3, "bfloat16", 9123)
    words = words_of(made, tmp_path, monkeypatch)
    assert value_of(words["dedicated-0"], "--slots") == "3"
    assert value_of(words["agent-0"], "--allow-hub") == "org/*"
    assert "--environment" not in words["agent-0"]  # which it reads in the file itself


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_every_worker_is_given_its_engine_its_words_and_a_log_beside_its_own(
    engine: str, started: list[UpOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "require_engine", lambda engine: None)
    own = ("--", "--block-size", "64") if engine == "vllm" else ()
    start("--engine", engine, "--dtype", "bfloat16", "--serving", "1", *own)
    found = words_of(started[0], tmp_path, monkeypatch)
    for name in ("dedicated-0", "serving-0"):
        words = found[name]
        assert (value_of(words, "--engine"), value_of(words, "--dtype")) == (engine, "bfloat16")
        assert tuple(words[words.index("--") :] if "--" in words else ()) == own
        if engine == "vllm":
            assert value_of(words, "--engine-log") == str(tmp_path / f"{name}.vllm.log")
        else:
            assert "--engine-log" not in words


def test_the_environment_is_before_the_file_and_what_is_typed_before_both(
    file: Path, started: list[UpOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLFAB_WORKER_SLOTS", "5")
    start()
    start("--slots", "64", "--model", "tiny", "--port", "0", "--environment", "other=tests.support.worlds.worlds:Walk")
    assert [(each.slot_count, each.model, each.port) for each in started] == [(5, "small", 9123), (64, "tiny", 0)]
    assert started[1].environments == ("other=tests.support.worlds.worlds:Walk",)


def test_words_and_weights_of_the_file_reach_the_roles(
    file: Path, started: list[UpOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        '[worker]\nengine = "vllm"\nengine_log = "-"\nwords = ["--seed", "3"]\n'
        f'[api]\nweights = "{tmp_path}"\nmodels_from = ["{tmp_path}"]\n'
    )
    monkeypatch.setattr(starting, "require_engine", lambda engine: None)
    start()
    words = words_of(started[0], tmp_path, monkeypatch)
    worker, api = words["dedicated-0"], words["api"]
    assert worker[worker.index("--") :] == ["--", "--seed", "3"] and "--engine-log" not in worker
    assert (value_of(api, "--weights"), value_of(api, "--models-from")) == (str(tmp_path), str(tmp_path))


def test_what_the_file_says_and_cannot_be_is_refused_before_anything_starts(
    file: Path, started: list[UpOptions]
) -> None:
    for text, says in (
        ('[worker]\nengine = "vlm"', "did you mean vllm?"),
        ("[worker]\nadapter_rank = 3", "--adapter-rank is for"),
        ('[agent]\nenvironment = ["mine=nope.games:MyGame"]', "Mend --environment mine=…"),
        ('[reward]\nreward = ["r=os:nothere"]', "--reward r: "),
    ):
        file.write_text(text)
        assert says in str(CliRunner().invoke(app, ["up"]).exception)
    assert started == []


def test_every_role_that_would_not_start_is_named_at_once(file: Path, started: list[UpOptions]) -> None:
    file.write_text(
        '[worker]\nadapter_rank = 3\n[agent]\nenvironment = ["mine=nope.games:MyGame"]\n'
        '[reward]\nreward = ["r=os:nothere"]\n[api]\ntls_key = "k.pem"'
    )
    told = str(CliRunner().invoke(app, ["up"]).exception)
    for says in (
        "[worker] --adapter-rank is for",
        "; [agent] environment 'mine': ",
        "; [reward] --reward r: ",
        "; [api] ",
    ):
        assert says in told
    assert started == []


def test_a_fault_that_several_roles_share_is_said_once(started: list[UpOptions]) -> None:
    told = str(CliRunner().invoke(app, ["up", "--run-as", "nobody-of-this-name"]).exception)
    assert told.count("nobody-of-this-name") == 1 and started == []


def test_a_broker_that_the_file_names_is_used_as_if_it_were_typed(started: list[UpOptions], file: Path) -> None:
    file.write_text(FILE.replace("[api]", 'url = "redis://there:1"\n[api]'))
    start()
    assert (started[-1].url, started[-1].url_from) == ("redis://there:1", "ROLLFAB_CONFIG's file")
    start("--url", "redis://typed:1")
    assert (started[-1].url, started[-1].url_from) == ("redis://typed:1", "--url")


def test_two_brokers_in_the_file_are_refused_by_name(started: list[UpOptions], file: Path) -> None:
    file.write_text(FILE.replace("[api]", 'url = "redis://here:1"\n[api]\nurl = "redis://there:1"'))
    done = CliRunner().invoke(app, ["up"])
    assert (done.exit_code, started) == (1, [])
    assert "[agent] names redis://here:1 and [api] names redis://there:1" in str(done.exception)
    start("--url", "redis://typed:1")
    assert started[-1].url == "redis://typed:1"
