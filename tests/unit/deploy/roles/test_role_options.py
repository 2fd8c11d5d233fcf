"""A role's options: from the command line, the environment, a file or the field, into one record."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.deploy.roles import run, starting
from rollfab.deploy.roles.command import variables_of
from rollfab.deploy.roles.config_file import CONFIG_BYTES_MAX
from rollfab.deploy.roles.options import TABLES
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.host.options import describe, make

PASSWORD = "hunter-22"
HASH = "sha256:" + "0" * 64


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLFAB_CONFIG", "ROLLFAB_URL", "ROLLFAB_SERVER_KEY", "ROLLFAB_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The records that roles were started with."""
    records: list[Any] = []
    for role in TABLES:
        monkeypatch.setattr(run, f"run_{role}", records.append)
    return records


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of settings, found by the environment."""
    path = tmp_path / "rollfab.toml"
    path.write_text("")
    monkeypatch.setenv("ROLLFAB_CONFIG", str(path))
    return path


def typed(*words: str) -> Any:
    return CliRunner().invoke(app, words)


def start(*words: str) -> Any:
    done = (
        typed(*words, "--url", "redis://h") if "--" not in words else typed(words[0], "--url", "redis://h", *words[1:])
    )
    assert done.exception is None, (done.output, done.exception)
    return done


def refused(*words: str) -> str:
    error = typed(*words).exception
    assert isinstance(error, ConfigError), error
    return str(error)


# ---------------------------------------------------------------- the fields and what is made of them


@pytest.mark.parametrize("role", TABLES)
def test_every_field_is_an_option_with_its_help_its_variable_and_its_default(role: str) -> None:
    command = get_command(app).commands[role]  # type: ignore[attr-defined]
    known = {each.name: each for each in command.params}
    rows = [each for each in describe(TABLES[role]) if not each.option.is_variable_only]
    assert {each.key for each in rows} == set(known) - {"config"}
    for each in rows:
        made = known[each.key]
        assert "--" + each.key.replace("_", "-") in made.opts or each.option.is_positional
        assert (tuple(made.envvar), made.help) == (variables_of(each, role), each.option.help)


@pytest.mark.parametrize("role", TABLES)
def test_a_role_of_which_nothing_is_said_has_the_defaults_of_its_record(role: str, started: list[Any]) -> None:
    start(role)
    assert started == [TABLES[role](url="redis://h")]


def test_a_part_takes_its_options_and_the_rest_is_left() -> None:
    worker = make(TABLES["worker"], {"kv_memory": "release", "slots": 3, "region": "eu", "timeout": 1})
    values = {each.key: each.value_in(worker) for each in describe(TABLES["worker"])}
    assert (values["kv_memory"], values["slots"], values["region"], values["pool"]) == ("release", 3, "eu", "")


# ---------------------------------------------------------------- who has the last word


def test_the_command_line_is_before_the_environment_the_file_and_the_default(
    file: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start("worker")
    file.write_text("[worker]\nslots = 2\n[agent]\ncount = 9\n")
    start("worker")
    monkeypatch.setenv("ROLLFAB_WORKER_SLOTS", "3")
    start("worker")
    start("worker", "--slots", "4")
    assert [each.engine.slot_count for each in started] == [64, 2, 3, 4]


def test_a_file_on_the_command_line_is_before_the_one_of_the_environment(
    file: Path, tmp_path: Path, started: list[Any]
) -> None:
    file.write_text("[agent]\ncount = 2\n")
    other = tmp_path / "other.toml"
    other.write_text("[agent]\ncount = 3\n")
    start("agent", "--config", str(other))
    assert started[0].environment_count == 3


def test_a_file_holds_every_kind_of_value(file: Path, started: list[Any]) -> None:
    file.write_text(
        '[worker]\nsleep_after = 2\nshared_weights = false\nobserve = true\nengine = "vllm"\n'
        'words = ["--block-size", "32"]\n[agent]\nenvironment = ["a=b:c", "d=e f:g"]\nno_network = true\n'
    )
    start("worker")
    start("agent")
    worker, agent = started
    assert (worker.sleep_after_s, worker.supply.is_shared, worker.serving.is_observing) == (2.0, False, True)
    assert (worker.engine.engine, worker.engine.words) == ("vllm", ("--block-size", "32"))
    assert (agent.foreign.environments, agent.foreign.is_offline) == (("a=b:c", "d=e f:g"), True)


def test_words_after_the_dashes_are_before_those_of_the_file(file: Path, started: list[Any]) -> None:
    file.write_text('[worker]\nwords = ["--block-size", "32"]\n')
    start("worker", "--", "--seed", "3")
    assert started[0].engine.words == ("--seed", "3")


def test_what_a_file_says_of_the_api_is_not_for_the_commands_below_it(file: Path, tmp_path: Path) -> None:
    file.write_text(f'[api]\nkeys = "{tmp_path}/other.keys"\n')
    (tmp_path / "own.keys").touch(mode=0o600)
    done = typed("api", "keys", "ls", "--file", str(tmp_path / "own.keys"))
    assert done.exit_code == 0, done.exception


def test_a_key_of_a_server_comes_by_its_variable_alone(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFAB_SERVER_KEY", PASSWORD)
    start("worker")
    assert started[0].engine.server_key == PASSWORD and PASSWORD not in repr(started)
    assert typed("worker", "--server-key", "x").exit_code == 2


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[worker]\nslot = 3", "[worker] slot is no setting of it: did you mean slots?"),
        ("[worker]\nslots = 0", "[worker] slots is 0, expected 1 or more"),
        (f"[worker]\nslots = {10**400}", "is no TOML: a whole number in it has more than 1000 bits"),
        (f"[worker]\nslots = {'[' * 3000}{']' * 3000}", "is no TOML: it is nested too deep"),
        ("[worker]\nslots = 2026-01-01", "[worker] slots is 2026-01-01, expected a whole number"),
        ("[worker]\nslots = true", "[worker] slots is true, expected a whole number"),
        ('[worker]\nslots = "3"', "[worker] slots is '3', expected a whole number"),
        ("[worker]\nsleep_after = nan", "[worker] sleep_after is nan, expected 0 or more"),
        ('[worker]\nobserve = "yes"', "[worker] observe is 'yes', expected true or false"),
        ('[worker]\nengine = "vlm"', "[worker] engine is 'vlm': did you mean vllm?"),
        ("[worker.engine]\nslots = 3", "[worker] engine is {'slots': 3}, expected a text"),
        ('[agent]\nenvironment = "a=b:c"', "[agent] environment is 'a=b:c', expected a list of texts"),
        ("[agent]\ntimeout = 0", "[agent] timeout cannot be: --timeout is 0: give a finite number of seconds above 0"),
        ("[reward]\ntimeout = inf", "[reward] timeout cannot be: --timeout is inf"),
        ("[api]\nport = 70000", "[api] port is 70000, expected 65535 or less"),
        ("[woker]\nslots = 3", "[woker] is no role: did you mean worker?"),
        ("worker = 3", "worker is no table: write [worker]"),
        ("[agent]\na = 1\nb = 2\n[api]\nport = 70000", "expected 65535 or less"),
        ("[agent]\n" + "\n".join(f"a{n} = 1" for n in range(9)), "; and 1 more"),
        ("\n[worker", "is no TOML: line 2, its end: a table's name has no ] at its end. Mend the file there"),
        (
            "[worker]\nmodel = tiny",
            "is no TOML: line 2, column 9: a value is missing, or is a text without quotes. Mend",
        ),
        ("[api]\nport = 1\nport = 2", "is no TOML: line 3, its end: a setting or table is there twice. Mend"),
        ("[api]\n\udcff", "is no TOML: line 2 is no UTF-8 text: save the file as UTF-8"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_every_role_with_file_key_and_cause(
    file: Path, started: list[Any], text: str, says: str
) -> None:
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    for words in (("controller", "--url", "redis://h"), ("config", "check", str(file)), ("config", "show")):
        said = refused(*words)
        assert said.startswith(str(file)) and says in said
    assert started == []


def test_a_file_that_is_not_there_or_no_file_is_named(tmp_path: Path, started: list[Any]) -> None:
    assert f"{tmp_path}/none cannot be read" in refused("agent", "--config", f"{tmp_path}/none", "--url", "redis://h")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (CONFIG_BYTES_MAX + 1))
    for name, problem in {
        "pipe": "is no regular file",
        "large": "has 1,048,577 bytes",
        ".": "is no regular file",
    }.items():
        assert problem in refused("agent", "--config", f"{tmp_path}/{name}", "--url", "redis://h")


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        (f'[worker]\nurl = "redis://:{PASSWORD}@h"', "as ROLLFAB_URL, by the environment"),
        (f'[worker]\nserver = "http://user:{PASSWORD}@h"', "by the environment"),
        (f'[worker]\nserver_key = "{PASSWORD}"', "by the environment, ROLLFAB_SERVER_KEY"),
        (f'[worker]\nwords = ["--api-key", "{PASSWORD}"]', "by the environment, ROLLFAB_SERVER_KEY"),
        (f'[worker]\npassword = "{PASSWORD}"', "by the environment"),
        (f'[api]\nread_key = ["{PASSWORD}"]', "set ROLLFAB_READ_KEYS"),
    ],
)
def test_a_secret_in_a_file_is_refused_and_not_repeated(file: Path, text: str, instead: str) -> None:
    file.write_text(text)
    said = refused("config", "check", str(file))
    assert instead in said and PASSWORD not in said


def test_a_hash_of_a_key_is_no_secret(file: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f'[api]\nread_key = ["{HASH}"]\n')
    monkeypatch.setenv("ROLLFAB_CONTROL_KEYS", f"plain {HASH}")
    start("api")
    assert (started[0].read_keys, started[0].control_keys) == ((HASH,), ("plain", HASH))
    assert "--control-key would show a key" in refused("api", "--control-key", "plain", "--url", "redis://h")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ROLLFAB_WORKER_SLOTS", "none", "ROLLFAB_WORKER_SLOTS is 'none', expected a whole number"),
        ("ROLLFAB_WORKER_SLOTS", "0", "ROLLFAB_WORKER_SLOTS is 0, expected 1 or more"),
        ("ROLLFAB_WORKER_OBSERVE", "maybe", "ROLLFAB_WORKER_OBSERVE is 'maybe', expected true or false"),
        ("ROLLFAB_WORKER_ENGINE", "vlm", "ROLLFAB_WORKER_ENGINE is 'vlm': did you mean vllm?"),
    ],
)
def test_a_variable_with_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    assert refused("worker", "--url", "redis://h") == says
    assert started == []


def test_variables_hold_switches_and_lists(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setenv("ROLLFAB_WORKER_OBSERVE", "yes")
    monkeypatch.setenv("ROLLFAB_WORKER_PEER_WEIGHTS", "0")
    monkeypatch.setenv("ROLLFAB_AGENT_ENVIRONMENT", "a=b:c d=e:f")
    start("worker")
    start("agent")
    assert (started[0].serving.is_observing, started[0].supply.believes_peers) == (True, False)
    assert started[1].foreign.environments == ("a=b:c", "d=e:f")


def test_a_variable_that_is_misspelt_is_told(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setenv("ROLLFAB_WORKER_SLOT", "3")
    monkeypatch.setenv("ROLLFAB_WORKER_IMAGE", "compose's")
    done = start("worker")
    said = " ".join(done.output.split())
    assert "ROLLFAB_WORKER_SLOT is no setting of worker: did you mean ROLLFAB_WORKER_SLOTS" in said
    assert "ROLLFAB_WORKER_IMAGE" not in said and len(started) == 1


# ---------------------------------------------------------------- rollfab config


def test_what_holds_is_shown_with_where_it_comes_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[worker]\nslots = 2\ncontext = 64\n")
    monkeypatch.setenv("ROLLFAB_WORKER_CONTEXT", "128")
    monkeypatch.setenv("ROLLFAB_URL", f"redis://:{PASSWORD}@h")
    monkeypatch.setenv("ROLLFAB_SERVER_KEY", PASSWORD)
    rows = json.loads(typed("config", "show", "worker", "--json").output)["worker"]
    assert rows["slots"] == {"value": 2, "from": str(file)}
    assert rows["context"] == {"value": 128, "from": "ROLLFAB_WORKER_CONTEXT"}
    assert rows["model"] == {"value": "tiny", "from": "default"}
    assert rows["url"] == {"value": "redis://:***@h", "from": "ROLLFAB_URL"}
    assert rows["server_key"] == {"value": "***", "from": "ROLLFAB_SERVER_KEY"}
    said = typed("config", "show").output
    assert PASSWORD not in said and "worker.context = 128  (ROLLFAB_WORKER_CONTEXT)" in said
    assert "agent.name = not set  (default)" in said
    assert refused("config", "show", "worke") == "there is no role 'worke': did you mean worker?"


def test_a_file_is_checked_as_a_whole(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('[worker]\nslots = 2\nrole = "serving"\n[agent]\ncount = 3\n')
    assert typed("config", "check", str(file)).output.endswith("is right: 3 settings of worker, agent\n")
    file.write_text("")
    assert (
        f"{file} sets nothing: every role would run as if it were not given"
        in typed("config", "check", str(file)).output
    )
    file.write_text('[worker]\nrole = "serving"\nprobe = "/dev/shm/x"\nslo_ttft_ms = 3\n')
    assert f"{file}: [worker] --probe needs the serving team's objectives" in refused("config", "check", str(file))
    monkeypatch.setenv("ROLLFAB_WORKER_SLO_TPOT_MS", "3")
    assert typed("config", "check", str(file)).exit_code == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[agent]\nenvironment = ["my-game"]', "--environment 'my-game' does not name code"),
        ('[agent]\nenvironment = ["my-game=nope.games:MyGame"]', "Mend --environment my-game=…"),
        ('[agent]\nenvironment = ["a=os:path", "a=os:sep"]', "--environment a=… is given twice"),
        ('[agent]\nenvironment = ["mine = os:path"]', "the name 'mine ' begins or ends with a blank"),
        ('[agent]\nrun_as = "nosuchuser"', "nosuchuser"),
        (f"[agent]\ncount = {10**24}", "count is 1000000000000000000000000, expected 1000000 or less"),
        ('[reward]\nreward = ["r=os:nothere"]', "--reward r: "),
        (f"[worker]\nslots = {10**26}", "expected 1000000 or less"),
        (f"[worker]\nseed = {10**26}", "expected 9223372036854775807 or less"),
        ('[worker]\nmodel = ""', "model is empty: leave it out"),
        ('[worker]\ndevice = "gpu"', "device 'gpu' is none"),
        ('[worker]\nurl = "rediss:/x"', "the broker URL *** is not usable"),
        ('[api]\ntls_cert = "/none/such"', "the api's TLS certificate /none/such"),
    ],
)
def test_a_file_whose_role_would_not_start_is_refused_before_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setattr(starting, "hide", lambda: None)  # would hold for all of this process
    path = tmp_path / "rollfab.toml"
    path.write_text(text)
    said = refused("config", "check", str(path))
    assert said.startswith(f"{path}: [") and says in said


def test_all_code_that_cannot_be_loaded_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "hide", lambda: None)
    path = tmp_path / "rollfab.toml"
    path.write_text(
        '[agent]\nenvironment = ["a=nope.a:A", "b=nope.b:B"]\n[reward]\nreward = ["r=os:none", "s=os:nothing"]\n'
    )
    said = refused("config", "check", str(path))
    told = (
        "[agent] ",
        "environment 'a': ",
        "environment 'b': ",
        "a=… and --environment b=…",
        "[reward] --reward r: ",
        "; --reward s: ",
    )
    assert said.startswith(f"{path}: [agent] ") and [each for each in told if each not in said] == []


@pytest.mark.parametrize("url", ["htp://x", "redis://h?durabilty=disk"])
def test_a_file_is_checked_with_the_url_of_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    file.write_text("[controller]\n")
    assert "[controller] has no broker yet: set ROLLFAB_URL" in typed("config", "check", str(file)).output
    monkeypatch.setenv("ROLLFAB_URL", url)
    assert "is not usable" in refused("config", "check", str(file))


def test_code_beside_the_user_is_found_and_a_misspelt_variable_is_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "hide", lambda: None)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("class World:\n    def reset(self): ...\n    def step(self): ...\n")
    file.write_text('[agent]\nenvironment = ["mine=beside:World"]\n')
    monkeypatch.setenv("ROLLFAB_AGENT_COUNTS", "3")
    said = " ".join(typed("config", "check", str(file)).output.split())
    assert said.endswith("is right: 1 setting of agent")
    assert "ROLLFAB_AGENT_COUNTS is no setting of agent: did you mean ROLLFAB_AGENT_COUNT" in said


# ---------------------------------------------------------------- the broker's users


@pytest.mark.parametrize(
    ("role", "user", "needed"),
    [
        ("agent", "worker", "agent"),
        ("worker", "agent", "worker"),
        ("reward", "agent", "reward"),
        ("controller", "operator", "controller"),
        ("api", "agent", "api-control"),
        ("gateway", "trainer", "gateway"),
    ],
)
def test_a_role_with_another_role_s_user_is_told_whose_it_is_and_whose_it_needs(
    monkeypatch: pytest.MonkeyPatch, role: str, user: str, needed: str
) -> None:
    monkeypatch.setenv("ROLLFAB_URL", f"redis://rollfab-{user}:{PASSWORD}@h")
    said = refused(role)
    assert said.startswith(f"the broker URL has the user of role {user}, rollfab-{user}: role {role} needs ")
    assert f"needs rollfab-{needed}. Look at its environment file" in said and PASSWORD not in said


@pytest.mark.parametrize("user", ["rollfab-worker", "mine", "rollfab-mine", ""])
def test_a_role_takes_its_own_user_and_those_that_we_do_not_know(user: str) -> None:
    TABLES["worker"](url=f"redis://{user}:{PASSWORD}@h").check()
    TABLES["worker"](url=f"unix:///x?username={user}&password={PASSWORD}").check()


def test_a_name_of_hardware_that_is_too_long_is_refused() -> None:
    assert "--hardware has 101 characters, and may have 100" in refused(
        "worker", "--url", "redis://h", "--hardware", "x" * 101
    )
