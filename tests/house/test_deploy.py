"""Files of deploy/ for containers and systemd: what they name exists, and what can be run of them here works.

No image is built, no container and no unit is started: docs/deploying.md says so.
"""

from __future__ import annotations

import copy
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from rollfab.deploy.cli.arguments import refuse_secrets
from rollfab.deploy.main import app
from rollfab.fabric.queue.acl import RIGHTS, user_name

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
COMMON = UNITS / "rollfab-.service.d" / "common.conf"
SERVICES = sorted(UNITS.glob("*.service"))
FOREIGN = ("agent", "reward")  # roles that run code which nobody has read
CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text("utf-8"))
PAGE = (ROOT / "docs" / "deploying.md").read_text("utf-8")
Wrong = typer.BadParameter.__base__  # what the command line raises for any wrong usage


def check_words(words: list[str]) -> None:
    """Parse a command of ours, as the command line would, and run nothing.

    Raises:
        Wrong: there is no such command or option, or its value is none.
        ConfigError: a secret is among them.
    """
    refuse_secrets(words)
    command: Any = get_command(app)
    name, rest = "rollfab", list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        name = rest.pop(0)
        command = command.commands[name]
    context = command.make_context(name, rest)
    left = [*context.args, *getattr(context, "_protected_args", ())]
    if left:
        raise typer.BadParameter(f"{left[0]} is no part of {name}")


def entries(path: Path) -> list[tuple[str, str, str]]:
    """(section, key, value) of a unit, in order."""
    section, found = "", []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, is_there, value = line.partition("=")
            assert is_there, line
            found.append((section, key, value))
    return found


def of(path: Path, key: str) -> list[str]:
    return [value for _, name, value in entries(path) if name == key]


def started(path: Path) -> list[str]:
    """What a unit starts."""
    [line] = of(path, "ExecStart")
    return shlex.split(line.replace(" $ROLLFAB_OPTIONS", "").replace("%i", "0"))


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction of the Containerfile."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINERFILE.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def values(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def shown_commands() -> Iterator[list[str]]:
    """Commands of ours in the shell blocks of the page."""
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        for line in re.findall(r"^rollfab (.+?)(?: +#.*)?$", block, re.MULTILINE):
            yield shlex.split(line)
        for role, options in re.findall(r"^# /etc/rollfab/([a-z]+)\S*\.options\nROLLFAB_OPTIONS=(.+)$", block, re.M):
            yield [role, *shlex.split(options)]
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        yield from (each["command"] for each in yaml.safe_load(block)["services"].values())


def all_commands() -> Iterator[tuple[str, list[str]]]:
    for path in SERVICES:
        if started(path)[0] == "/opt/rollfab/bin/rollfab":
            yield path.name, started(path)[1:]
    for name, service in COMPOSE["services"].items():
        if "entrypoint" not in service:
            yield f"compose {name}", [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]
    yield "Containerfile", yaml.safe_load(values("CMD")[0])
    for number, words in enumerate(shown_commands()):
        yield f"page {number}", words


COMMANDS = [pytest.param(words, id=where) for where, words in all_commands() if words != ["--help"]]


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_and_each_option_exists(words: list[str]) -> None:
    check_words(words)


def test_each_role_has_a_unit_and_a_container() -> None:
    roles = {"broker", "controller", "agent", "reward", "worker", "api"}
    assert {path.stem.removeprefix("rollfab-").rstrip("@") for path in SERVICES} == roles == set(COMPOSE["services"])
    assert len(COMMANDS) >= 2 * (len(roles) - 1) + 6


@pytest.mark.parametrize(
    "words", [["agent", "--made-up"], ["worker", "--slots", "none"], ["api", "made-up"], ["made-up"], ["agent", "word"]]
)
def test_a_command_that_is_made_up_is_found(words: list[str]) -> None:
    with pytest.raises(Wrong):
        check_words(words)


# ---------------------------------------------------------------- units

KEYS = {
    "Unit": "Description After Wants PartOf StartLimitIntervalSec",
    "Install": "WantedBy",
    "Service": "Type User Group WorkingDirectory StateDirectory StateDirectoryMode Environment EnvironmentFile "
    "ExecStart Restart RestartSec RestartPreventExitStatus KillMode KillSignal TimeoutStopSec OOMPolicy UMask "
    "LimitNOFILE NoNewPrivileges CapabilityBoundingSet LockPersonality PrivateDevices PrivateTmp ProtectClock "
    "ProtectControlGroups ProtectHome ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables "
    "ProtectProc ProtectSystem RestrictAddressFamilies RestrictNamespaces RestrictRealtime RestrictSUIDSGID "
    "SystemCallArchitectures",
}


@pytest.mark.parametrize("path", [*SERVICES, COMMON, UNITS / "rollfab.target"], ids=lambda path: path.name)
def test_a_unit_has_settings_that_systemd_knows(path: Path) -> None:
    assert [(section, key) for section, key, _ in entries(path) if key not in KEYS[section].split()] == []


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_unit_names_users_and_files_that_there_are(path: Path) -> None:
    users = re.findall(r"^u (\S+)", (UNITS / "rollfab.sysusers.conf").read_text("utf-8"), re.MULTILINE)
    assert of(path, "User") == of(path, "Group")
    assert of(path, "User")[0] in users
    assert of(path, "WantedBy") == ["rollfab.target"]
    secret = [Path(name).stem for name in of(path, "EnvironmentFile") if not name.startswith("-")]
    assert set(secret) <= set(map(user_name, RIGHTS))
    assert len(secret) == (path.name != "rollfab-broker.service")


def test_units_of_foreign_code_leave_what_it_is_held_in_by() -> None:
    """Namespaces, and a /proc that nothing covers in part: then alone may an unprivileged process mount another."""
    taken = {"RestrictNamespaces", "ProtectKernelTunables", "ProtectKernelLogs", "ProtectProc", "SystemCallFilter"}
    own = {of(path, "User")[0] for path in SERVICES if path.stem.removeprefix("rollfab-") in FOREIGN}
    assert len(own) == len(FOREIGN)
    for path in SERVICES:
        is_foreign = path.stem.removeprefix("rollfab-") in FOREIGN
        given = {key for _, key, _ in [*entries(path), *entries(COMMON)]} & taken
        assert bool(given) != is_foreign, path.name
        assert is_foreign or own.isdisjoint(of(path, "User"))


def verify(tmp_path: Path, line: str = "") -> str:
    """What systemd says of the units, with a line more for all of them; what they start stands elsewhere here."""
    place = tmp_path / "units"
    shutil.copytree(UNITS, place)
    for path in place.glob("*.service"):
        path.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text("utf-8"), flags=re.MULTILINE))
    common = place / COMMON.relative_to(UNITS)
    common.write_text(f"{common.read_text('utf-8')}{line}\n")
    names = [str(path) for path in (*place.glob("*.service"), *place.glob("*.target"))]
    words = ["systemd-analyze", "verify", "--man=no", *names]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.timeout(90)
def test_systemd_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    assert verify(tmp_path / "as they are") == ""
    assert "MadeUp" in verify(tmp_path / "with a fault", "MadeUp=yes")


# ---------------------------------------------------------------- compose

TOP = {"name", "services", "networks", "secrets", "x-role", "x-after-broker"}
SERVICE = set(
    "image pull_policy user init read_only tmpfs cap_drop security_opt restart stop_grace_period depends_on entrypoint "
    "command env_file secrets volumes networks ports healthcheck shm_size deploy".split()
)
HEALTHCHECK = {"test", "interval", "timeout", "retries", "start_period"}


def faults(compose: dict[str, Any]) -> list[str]:
    """What the specification does not know, or the file itself does not have. The words are those that it uses."""
    found = [f"{key}?" for key in compose.keys() - TOP]
    for name, service in compose["services"].items():
        found += [f"{name}: {key}?" for key in service.keys() - SERVICE]
        found += [f"{name}: healthcheck {key}?" for key in service.get("healthcheck", {}).keys() - HEALTHCHECK]
        for kind in ("networks", "secrets"):
            found += [f"{name}: no {kind} {each}" for each in service.get(kind, ()) if each not in compose[kind]]
        for other, need in service.get("depends_on", {}).items():
            is_asked = "healthcheck" in compose["services"].get(other, {})
            if need != {"condition": "service_healthy"} or not is_asked:
                found.append(f"{name}: cannot wait for {other}")
        if service["restart"] not in ("no", "always", "on-failure", "unless-stopped"):
            found.append(f"{name}: restart {service['restart']}?")
        if Path(service.get("env_file", "rollfab-agent.env")).stem not in map(user_name, RIGHTS):
            found.append(f"{name}: nobody writes {service['env_file']}")
    return found


def test_compose_has_words_that_docker_knows() -> None:
    assert faults(COMPOSE) == []
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        for service in yaml.safe_load(block)["services"].values():
            assert service.keys() <= SERVICE


@pytest.mark.parametrize(
    ("place", "word", "value"),
    [
        (("services", "agent"), "made-up", 1),
        (("services", "api", "healthcheck"), "made-up", 1),
        (("services", "agent"), "networks", ["made-up"]),
        (("services", "agent"), "env_file", "access/made-up.env"),
        (("services", "agent"), "depends_on", {"controller": {"condition": "service_healthy"}}),
        ((), "made-up", 1),
    ],
)
def test_a_word_that_is_made_up_is_found(place: tuple[str, ...], word: str, value: object) -> None:
    changed = copy.deepcopy(COMPOSE)
    inner = changed
    for name in place:
        inner = inner[name]
    inner[word] = value
    assert len(faults(changed)) == 1


def linted(program: str, *words: str) -> tuple[int, str]:
    """The exit status and the words of a linter of this environment."""
    done = subprocess.run([Path(sys.executable).parent / program, *words], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fault", ["", "    made-up: 1\n", "    cap_drop: ALL\n"])
def test_compose_fits_the_schema_of_its_specification(tmp_path: Path, fault: str) -> None:
    text = (ROOT / "deploy" / "compose" / "compose.yaml").read_text("utf-8")
    path = tmp_path / "compose.yaml"
    path.write_text(text.replace("  agent:\n", "  agent:\n" + fault), "utf-8")
    status, said = linted("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))
    assert (status == 0) == (fault == ""), said


@pytest.mark.parametrize(
    ("fault", "rule"), [("", ""), ("\nMAINTAINER nobody\n", "DL4000"), ("\nRUN sudo true\n", "DL3004")]
)
def test_the_containerfile_s_linter_finds_nothing(tmp_path: Path, fault: str, rule: str) -> None:
    path = tmp_path / "Containerfile"
    path.write_text(CONTAINERFILE.read_text("utf-8") + fault, "utf-8")
    status, said = linted("hadolint", "--no-color", str(path))
    assert (status == 0) == (fault == "") and rule in said, said


def test_agents_and_rewards_reach_the_broker_alone() -> None:
    for role in FOREIGN:
        [network] = COMPOSE["services"][role]["networks"]
        assert COMPOSE["networks"][network] == {"internal": True}
        assert {name for name, each in COMPOSE["services"].items() if network in each["networks"]} == {"broker", role}


def test_no_container_has_a_secret_in_this_file_or_more_rights_than_it_needs() -> None:
    for service in COMPOSE["services"].values():
        refuse_secrets([*service.get("entrypoint", ()), *service["command"]])
        assert "environment" not in service
        assert service["cap_drop"] == ["ALL"] and service["read_only"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_each_variable_of_compose_is_explained() -> None:
    text = (ROOT / "deploy" / "compose" / "compose.yaml").read_text("utf-8")
    named = set(re.findall(r"\$\{(\w+)", text))
    assert named
    assert {name for name in named if name not in PAGE} == set()


# ---------------------------------------------------------------- image

WORDS = {"ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
OPTIONS = {
    "pip": "--require-hashes --no-deps --no-build-isolation --index-url --extra-index-url -r",
    "python": "-m",
    "apt-get": "-y --no-install-recommends",
    "useradd": "--system --uid --user-group --home-dir --shell",
    "rm": "-rf",
    "ln": "-s",
}


def test_the_image_is_described_in_words_that_docker_knows() -> None:
    assert {word for word, _ in instructions()} <= WORDS
    for line in values("RUN"):
        program = ""
        for word in shlex.split(line):
            program = word if word in OPTIONS else program
            assert not word.startswith("-") or word in OPTIONS[program].split(), f"{program} {word}"


def test_each_stage_is_there_and_the_engine_is_one() -> None:
    froms = [line.split() for line in values("FROM")]
    stages = [words[2] for words in froms if words[1:2] == ["AS"]]
    [engine] = [value.partition("=")[2] for value in values("ARG") if value.startswith("ENGINE=")]
    assert engine in stages
    assert {words[0] for words in froms} <= {*stages, "${BASE}", "${ENGINE}"}
    assert set(re.findall(r"--from=(\S+)", " ".join(values("COPY")))) <= set(stages)
    assert set(re.findall(r"^\| `([\w-]+)`", PAGE, re.MULTILINE)) == set(stages) - {"empty", "installed"}


def test_the_image_installs_by_digest_and_runs_as_nobody_else() -> None:
    locked = [part for line in values("RUN") for part in line.split("&&") if "pip install" in part]
    assert [part for part in locked if "--require-hashes" not in part and "--no-deps" not in part] == []
    for name in re.findall(r"-r (\S+)", " ".join(values("RUN")) + " "):
        assert not name.startswith("deploy") or (ROOT / name).is_file(), name
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", values("USER")[-1])
    assert values("ENTRYPOINT") == ['["rollfab"]']


def copied() -> list[str]:
    """What of this tree is copied into the image, or what it is built from."""
    lines = [shlex.split(line)[:-1] for line in values("COPY") if "--from" not in line]
    return [word for words in lines for word in words]


def test_the_build_is_sent_what_it_copies_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {line.removeprefix("!") for line in rules if line.startswith("!")}
    assert allowed == {name.split("/")[0] for name in copied()}
    left = [line for line in rules[1:] if not line.startswith("!")]
    assert not any(fnmatch(name, rule) for name in copied() for rule in left)
    assert all((ROOT / name).exists() for name in copied())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a tree without git")
@pytest.mark.parametrize("name", ["access/rollfab-agent.env", "access/api.keys", "data/appendonlydir/x", ".env"])
def test_what_compose_keeps_beside_its_file_goes_into_no_image_and_no_commit(name: str) -> None:
    assert "deploy/compose" in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    words = ["git", "check-ignore", "--quiet", f"deploy/compose/{name}"]
    assert subprocess.run(words, cwd=ROOT, timeout=30, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(120)  # 3 s on a laptop; a cold disk takes its time
def test_what_the_image_copies_makes_the_package(tmp_path: Path) -> None:
    tree = tmp_path / "src"
    tree.mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, dirs_exist_ok=True)
        else:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"rollfab/{path.relative_to(ROOT)}" for path in (ROOT / "fabric").rglob("*.lua")} <= names
    assert {"rollfab/deploy/main.py", "rollfab/__main__.py", "rollfab/py.typed"} <= names
    assert not [name for name in names if name.startswith("rollfab/deploy/systemd")]
