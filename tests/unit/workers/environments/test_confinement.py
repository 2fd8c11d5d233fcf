"""Is foreign code held in: what does it get, whom can it harm, and is what cannot be had refused or said?"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollfab.deploy.doctor import command as doctor
from rollfab.deploy.main import app
from rollfab.fabric.contract.errors import ConfigError, EnvironmentFailed
from rollfab.workers.environments import confinement
from rollfab.workers.environments.confinement import (
    Confinement,
    Means,
    User,
    holding,
    make_confinement,
    means,
    say_what_lacks,
)
from rollfab.workers.environments.pool import PoolConfig
from rollfab.workers.environments.registry import Registry
from tests.support.processes.process_groups import Groups

ROOT = Path(__file__).parents[4]
PYTHON = next(each for each in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable) if shutil.which(each))
NOBODY = User("nobody", 65534, 65534, (), "/nonexistent")
GIVEN = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LC_ALL": "C.UTF-8",
    "LC_MY_SECRET": "secret",
    "CUDA_VISIBLE_DEVICES": "1",
    "HF_TOKEN": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "ROLLFAB_URL": "redis://:secret@broker",
    "HTTPS_PROXY": "http://me:secret@proxy",
    "PYTHONPATH": "/mine",
    "MY_SETTING": "1",
}

pytestmark = pytest.mark.timeout(60)


# ---- what it gets


def test_variables_are_those_of_a_list_and_those_that_are_named() -> None:
    assert Confinement().variables(GIVEN) == {
        **{name: GIVEN[name] for name in ("PATH", "HOME", "LC_ALL", "CUDA_VISIBLE_DEVICES")},
        "PYTHONHASHSEED": "0",
    }
    assert Confinement(passed=("MY_SETTING",)).variables(GIVEN)["MY_SETTING"] == "1"
    assert Confinement(passed=("NOT_SET",)).variables({}) == {"PYTHONHASHSEED": "0"}
    assert Confinement(user=NOBODY).variables(GIVEN)["HOME"] == "/nonexistent"


@pytest.mark.parametrize("name", ["", "HF_TOKEN=secret", "ROLLFAB_URL"])
def test_what_is_no_name_of_a_variable_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--pass-env"):
        make_confinement((name,))


# ---- what it can reach


@pytest.fixture
async def registry(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.chdir(ROOT)
    async with Registry(["killer=tests.support.worlds.curious_worlds:Killer"]) as registry:
        yield registry


ATTACKS = ("kill_parent", "kill_everybody", "kill_group", "kill_by_number", "stop_first", "fork_bomb")


@pytest.mark.parametrize("attack", ATTACKS)
async def test_one_that_kills_all_it_can_reach_reaches_itself_alone(registry: Registry, attack: str) -> None:
    if means().namespaces is None:
        assert "can signal other processes" in means().lacks, "then it is said"
        return
    # Given a neighbour, and a process of the same user; when an environment kills whom it finds
    neighbour: Any = await registry.open("killer")
    await neighbour.reset({}, 0)
    bystander = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220 - a moment
    world: Any = await registry.open("killer")
    await world.reset({}, 0)
    groups = Groups([world.pid, neighbour.pid])
    try:
        with contextlib.suppress(EnvironmentFailed):  # it may have killed itself
            await world.step(attack)
        # Then those live, and nothing is left of it
        assert bystander.poll() is None
        assert (await neighbour.step("stop_first")).text == "."
    finally:
        bystander.kill()
        bystander.wait()
    await world.close()
    await neighbour.close()
    await registry.close()
    groups.check_gone()


MACHINE = """
for name in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/pid_max", "/sys/kernel/mm/ksm/run", "/sys/power/state"):
    try:
        open(name, "a").close()
        print("opened", name)
    except OSError:
        pass
import os
print(os.listdir("/sys/fs/cgroup") if os.path.exists("/sys/fs/cgroup") else [])
"""


def test_it_changes_no_setting_of_the_machine_and_has_no_control_groups() -> None:
    found = means()
    if found.namespaces != "plain":
        assert found.namespaces == "user" or found.lacks  # these files are root's
        return
    life, held = os.pipe()
    settings = {**Confinement().settings(found), "life": life, "memory": 0, "niceness": 0}
    done = subprocess.run(
        holding(settings, [sys.executable, "-c", MACHINE]), pass_fds=(life,), capture_output=True, text=True, check=True
    )
    for end in (life, held):
        os.close(end)
    assert done.stdout.strip() == "[]"


async def test_a_process_serves_one_run_alone(registry: Registry) -> None:
    pids = []
    for owner in ("run-1", "run-1", "run-2"):
        world: Any = await registry.open("killer", owner=owner)
        await world.reset({}, 0)
        pids.append(world.pid)
        await world.close()
    assert pids[0] == pids[1] != pids[2]


async def test_its_interpreter_is_run_by_nobody_else_than_asked_for() -> None:
    # Given an operator who names another user; when a world says who it is
    if os.geteuid() != 0:
        with pytest.raises(ConfigError, match="--run-as nobody: only root may"):
            make_confinement(run_as="nobody")
        return
    config = PoolConfig(confinement=make_confinement(run_as="nobody"))
    async with Registry([f"killer={PYTHON}:tests.support.worlds.curious_worlds:Killer"], pool=config) as registry:
        first = await (await registry.open("killer")).reset({}, 0)
    # Then it is that one, with his variables
    assert first.info["user"] == config.confinement.user.uid  # type: ignore[union-attr]
    assert first.info["home"] == config.confinement.user.home  # type: ignore[union-attr]


async def test_without_a_network_it_reaches_itself_alone() -> None:
    if means(is_offline=True).namespaces is None:
        with pytest.raises(ConfigError, match="--no-network: this machine cannot"):
            make_confinement(is_offline=True)
        return
    config = PoolConfig(confinement=make_confinement(is_offline=True))
    async with Registry([f"killer={PYTHON}:tests.support.worlds.curious_worlds:Killer"], pool=config) as registry:
        world = await registry.open("killer")
        await world.reset({}, 0)
        with pytest.raises(EnvironmentFailed, match="Network is unreachable"):
            await world.step("reach_out")
        await world.close()


@pytest.mark.parametrize("asked", [Confinement(user=NOBODY), Confinement(is_offline=True)])
async def test_where_it_is_to_be_held_in_a_class_that_trusts_itself_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, asked: Confinement
) -> None:
    monkeypatch.chdir(ROOT)
    settings = Confinement.settings
    monkeypatch.setattr(Confinement, "settings", lambda self, found: settings(Confinement(), found))  # had everywhere
    worlds = ["world=tests.support.worlds.worlds:Walk", "ours=rollfab.workers.environments.games.frozenlake:FrozenLake"]
    async with Registry(worlds) as registry:
        assert await registry.is_inside("world")
    async with Registry(worlds, pool=PoolConfig(confinement=asked)) as registry:
        assert not await registry.is_inside("world")
        assert await registry.is_inside("ours")


def test_a_role_that_hides_cannot_be_looked_at_by_others_of_its_user() -> None:
    hidden = "from rollfab.workers.environments.confinement import hide; hide(); import ctypes, sys; "
    code = hidden + "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) if sys.platform == 'linux' else 0)"
    words, environment = [sys.executable, "-c", code], {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"  # PR_GET_DUMPABLE


# ---- what cannot be had


@pytest.mark.parametrize(
    ("name", "text"), [("nobody-of-that-name", "there is no such user"), ("root", "that is root itself")]
)
def test_a_user_that_cannot_be_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=f"--run-as {name}: {text}"):
        make_confinement(run_as=name)


def test_who_is_not_root_runs_as_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root may run code as another user"):
        make_confinement(run_as="nobody")


def test_a_network_that_cannot_be_taken_away_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "means", lambda is_offline=False: Means(None, why_not="unshare: not permitted"))
    with pytest.raises(ConfigError, match=r"--no-network: .*unshare: not permitted.*leave the option out"):
        make_confinement(is_offline=True)


@pytest.mark.parametrize(
    ("found", "text"),
    [(Means(None, why_not="unshare: not permitted"), "no namespaces"), (Means("user"), "sees the arguments of all")],
)
def test_what_cannot_be_had_is_said_at_the_start_and_by_the_doctor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: Means, text: str
) -> None:
    monkeypatch.setattr(confinement, "means", lambda is_offline=False: found)
    monkeypatch.setattr(doctor, "means", lambda: found)
    say_what_lacks(Confinement())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert text in record.lacks and record.advice  # type: ignore[attr-defined]
    told = doctor.confinement_finding()
    assert not told.is_fine and told.is_optional and text in told.found and told.advice


def test_where_all_is_had_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "means", lambda: Means("plain", has_proc=True))
    assert doctor.confinement_finding().is_fine


def test_roles_have_the_options() -> None:
    for role, options in (("agent", 4), ("reward", 3), ("up", 4)):
        text = CliRunner().invoke(app, [role, "--help"], env={"COLUMNS": "200"}).output
        found = [name for name in ("--pass-env", "--run-as", "--no-network", "--allow-hub") if name in text]
        assert len(found) == options, role
