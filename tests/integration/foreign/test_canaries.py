"""Secrets wherever foreign code must not see them: a hostile environment and reward look everywhere, and learn none."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

import rollfab
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.environments import spawn
from rollfab.workers.environments.base import Environment
from rollfab.workers.environments.confinement import Means, make_confinement
from rollfab.workers.environments.pool import PoolConfig
from rollfab.workers.environments.registry import Registry
from tests.support.brokers.redis_server import RedisServer
from tests.support.processes.fabric_processes import PYTHONPATH, ROOT, Processes

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(180)]

VARIABLES = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ROLLFAB_SERVER_KEY", "WANDB_API_KEY", "HTTPS_PROXY", "MY_PASSWORD")
PYTHON = next(each for each in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable) if shutil.which(each))
LOOK = (
    "import json, sys; from tests.support.worlds.curious_worlds import look; "
    "print(json.dumps(look(json.loads(sys.argv[1]))))"
)


def canary() -> str:
    return f"canary-{secrets.token_hex(8)}"


class Guarded(Processes):
    """Roles whose variables hold secrets, on a broker with a password and a secret; their URL is a variable, too."""

    def __init__(self, directory: Path) -> None:
        self.password, self.in_broker = canary(), canary()
        self.variables = {name: canary() for name in VARIABLES}
        lines = ("appendonly yes", "maxmemory-policy noeviction", f"requirepass {self.password}")
        self.server = RedisServer(directory, *lines)
        self.server.start()
        self.url = f"redis://:{self.password}@127.0.0.1:{self.server.port}/0"
        self.supervisor = Supervisor(directory / "logs")
        self.fabric = rollfab.connect(self.url)
        self.redis = Redis.from_url(self.url)
        self.redis.set("secret", self.in_broker)
        self.secrets = sorted([self.password, self.in_broker, *self.variables.values()])

    def start(self, name: str, role: str, *words: str) -> None:
        environment = {"PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": self.url, **self.variables}
        self.supervisor.add(name, [role, *words], environment=environment)

    def close(self) -> None:
        self.redis.close()
        self.supervisor.stop()
        self.fabric.close()
        self.server.kill()


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    fabric = Guarded(tmp_path_factory.mktemp("canaries"))
    try:
        allowed = [
            "--environment",
            "curious=tests.support.worlds.curious_worlds:Curious",
            "--reward",
            "curious=tests.support.worlds.curious_worlds:score",
        ]
        fabric.start("reward", "reward", *allowed)
        fabric.start_roles(agent=allowed)
        fabric.wait_for_role("reward")
        yield fabric
    finally:
        fabric.close()


def test_a_hostile_environment_and_reward_learn_no_secret(fabric: Guarded) -> None:
    # Given secrets in the variables of every role, in the broker, and with a process that is nobody's business
    task: dict[str, Any] = {"brokers": [fabric.server.port]}
    task["pids"] = [fabric.supervisor.children[name].pid for name in ("agent", "reward")]
    run = fabric.new_run("curious", "curious", reward="curious", attempt_count_max=1)
    # When both look wherever they get
    run.submit([task], group_size=2)
    (group,) = fabric.collect(run, 1, 120.0)
    # Then they have found nothing
    assert fabric.dead_letters(run) == {}
    assert [rollout.info["found"] for rollout in group.rollouts] == [[], []]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]


async def test_without_namespaces_the_roles_hide_what_they_hold(
    fabric: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a machine without namespaces, and beside the roles a process that does not hide
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(spawn, "means", lambda is_offline: Means(None))
    with bystanding(secret := canary()) as bystander:
        pids = [fabric.supervisor.children[name].pid for name in ("agent", "reward", "controller")]
        async with Registry(["curious=tests.support.worlds.curious_worlds:Curious"]) as registry:
            world = await registry.open("curious")
            # When a world looks at them all, then it sees that process at most: root's, only if it may trace root
            assert await found_by(world, {"only": pids}) == []
            assert await found_by(world, {"only": [bystander.pid]}) == ([] if os.geteuid() == 0 else [secret])
            await world.close()


@contextmanager
def bystanding(secret: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds a secret, and does not hide."""
    with subprocess.Popen(["sleep", "1000"], env={"SECRET": secret, "PATH": os.environ["PATH"]}) as bystander:
        try:
            yield bystander
        finally:
            bystander.kill()


async def found_by(world: Environment, task: dict[str, Any]) -> list[str]:
    await world.reset(task, 0)
    found: list[str] = (await world.step("")).info["found"]
    return found


def test_one_that_is_not_held_in_finds_them(fabric: Guarded) -> None:
    # Given the same code, started as any other process of the user; when it looks at one that does not hide
    secret = canary()
    with bystanding(secret) as bystander:
        words = [sys.executable, "-c", LOOK, json.dumps({"only": [bystander.pid], "brokers": [fabric.server.port]})]
        others = {"PYTHONPATH": PYTHONPATH, "PATH": os.environ["PATH"]}
        done = subprocess.run(words, cwd=ROOT, env=others, capture_output=True, text=True, check=True)
    # Then it finds what that holds; the broker still asks for its password
    assert json.loads(done.stdout) == [secret]


async def test_as_another_user_it_opens_no_file_and_no_socket_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        with pytest.raises(ConfigError, match="only root may"):
            make_confinement(run_as="nobody")
        return
    # Given a file and a broker without a password that are our user's alone
    monkeypatch.chdir(ROOT)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(canary())
    server = RedisServer(tmp_path)
    server.start()
    try:
        with Redis.from_url(server.unix_url) as redis:
            redis.set("secret", canary())
        task = {"files": [str(secret)], "brokers": [str(server.path)]}
        # When a world looks that runs as another user, then it opens neither
        config = PoolConfig(confinement=make_confinement(run_as="nobody"))
        async with Registry([f"curious={PYTHON}:tests.support.worlds.curious_worlds:Curious"], pool=config) as registry:
            world = await registry.open("curious")
            assert await found_by(world, task) == []
            await world.close()
        # as one does that runs as we do
        async with Registry([f"curious={PYTHON}:tests.support.worlds.curious_worlds:Curious"]) as registry:
            world = await registry.open("curious")
            assert len(await found_by(world, task)) == 2
            await world.close()
    finally:
        server.kill()
