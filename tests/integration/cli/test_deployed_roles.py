"""What deploy/ starts in containers and units, started here as plain processes: same words, same files, other ports."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
import yaml

from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.cli.status import snapshot
from rollfab.fabric.broker.server_process import server_binary
from tests.support.brokers.redis_server import free_port
from tests.support.processes.fabric_processes import PYTHONPATH
from tests.support.until import wait_until

ROOT = Path(__file__).resolve().parents[3]
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text("utf-8"))["services"]
PAGE = (ROOT / "docs" / "deploying.md").read_text("utf-8")
STARTED_S = 60.0  # a worker loads torch: 10 s on an idle machine
ROLES = ("controller", "agent", "reward", "worker", "api")

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page's own commands make, in the directory where it says to type them."""
    [block] = re.findall(r"```sh\n(umask .*?)```", PAGE, re.DOTALL)
    place = tmp_path_factory.mktemp("access")
    ours = f'set -eu; rollfab() {{ {shlex.quote(sys.executable)} -m rollfab "$@"; }}\n'
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    subprocess.run(["bash", "-c", ours + block], cwd=place, env=environment, check=True, timeout=50)
    return place


def words_of(unit_or_container: str) -> list[str]:
    """What starts the broker, after its program."""
    if unit_or_container == "container":
        return list(SERVICES["broker"]["command"])
    unit = (ROOT / "deploy" / "systemd" / "rollfab-broker.service").read_text("utf-8")
    [line] = re.findall(r"^ExecStart=\S+/valkey-server (.+)$", unit, re.MULTILINE)
    return shlex.split(line)


@contextmanager
def broker(access: Path, data: Path, words: list[str]) -> Iterator[int]:
    """The broker of a unit or a container, on a port of its own; it must end well when asked."""
    data.mkdir()
    port = free_port()
    places = {
        "/etc/rollfab/broker.conf": ROOT / "deploy" / "systemd" / "broker.conf",
        "/data": data,
        "/var/lib/rollfab/broker": data,
        "/run/secrets/users.acl": access / "users.acl",
        "/etc/rollfab/users.acl": access / "users.acl",
        "0.0.0.0": "127.0.0.1",
    }
    assert set(words) <= {*places, "--dir", "--aclfile", "--bind", "127.0.0.1"}
    process = subprocess.Popen([server_binary(), *(str(places.get(word, word)) for word in words), "--port", str(port)])
    try:
        until(lambda: is_well("broker", port), process)
        yield port
    finally:
        process.terminate()
        assert process.wait(30) == 0


def is_well(service: str, port: int) -> bool:
    """Ask as the container's health check does."""
    health = SERVICES[service]["healthcheck"]["test"]
    assert health[:3] == ["CMD", "python", "-c"]
    code, changed = re.subn(r"6379|8765", str(port), health[3])
    assert changed == 1
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False).returncode == 0


def until(is_so: Callable[[], bool], *living: subprocess.Popen[bytes]) -> None:
    def is_well() -> bool:
        ended = [each.args for each in living if each.poll() is not None]
        assert not ended, f"{ended} ended by itself"
        return is_so()

    wait_until(is_well, "it is well", STARTED_S, 0.2)


def environment_of(access: Path, service: str, port: int) -> dict[str, str]:
    """What a container's or unit's file of variables adds."""
    text = (access / Path(SERVICES[service]["env_file"]).name).read_text("utf-8")
    name, _, url = text.strip().partition("=")
    return {name: url.replace("HOST:6379", f"127.0.0.1:{port}")}


@pytest.mark.parametrize("place", ["unit", "container"])
def test_the_broker_keeps_all_it_is_told_and_knows_our_users_alone(access: Path, tmp_path: Path, place: str) -> None:
    users = access / "users.acl"
    assert users.stat().st_mode & 0o077 == 0
    with broker(access, tmp_path / "data", words_of(place)) as port:
        url = environment_of(access, "agent", port)["ROLLFAB_URL"]
        with redis.Redis.from_url(url) as agent, redis.Redis(port=port) as stranger:
            assert agent.ping()
            told = agent.info()
            assert told["aof_enabled"] == 1
            assert told["maxmemory_policy"] == "noeviction"
            with pytest.raises(redis.exceptions.AuthenticationError):
                stranger.ping()
    assert (tmp_path / "data" / "appendonlydir").is_dir()
    assert not is_well("broker", port)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_role_works_as_its_container_starts_it_and_ends_when_asked(access: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        port, api_port = stack.enter_context(broker(access, tmp_path / "data", words_of("container"))), free_port()
        places = {"/run/secrets/api.keys": str(access / "api.keys"), "8765": str(api_port), "0.0.0.0": "127.0.0.1"}
        processes = {}
        for role in ROLES:
            command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in SERVICES[role]["command"]]
            words = [sys.executable, "-m", "rollfab", *(places.get(word, word) for word in command)]
            own = {"PYTHONPATH": PYTHONPATH, **environment_of(access, role, port)}
            processes[role] = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, **own})
            stack.callback(processes[role].kill)
        operator = (access / "rollfab-operator.env").read_text("utf-8").strip().partition("=")[2]
        url = operator.replace("HOST:6379", f"127.0.0.1:{port}")

        def are_well() -> bool:
            seen = {worker["role"] for worker in with_ports(url, snapshot)["workers"] if worker["state"] == "ready"}
            return {"controller", "agent", "reward", "dedicated"} <= seen and is_well("api", api_port)

        def tell_their_memory() -> bool:
            held = [worker["resident_bytes"] for worker in with_ports(url, snapshot)["workers"]]
            return all(each is not None and each > 1 << 20 for each in held)

        until(are_well, *processes.values())
        if sys.platform == "linux":
            until(tell_their_memory, *processes.values())

        for process in processes.values():
            process.send_signal(signal.SIGTERM)
        assert {role: process.wait(60) for role, process in processes.items()} == dict.fromkeys(ROLES, 0)
