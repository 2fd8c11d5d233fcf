"""A worker that is taken over, with the worker's user and variables: it learns what its work needs and nothing else."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.queue.acl import RIGHTS, commands_of, user_name
from rollfab.fabric.queue.keys import table_of
from tests.integration.foreign.test_canaries import LOOK, PYTHON, canary
from tests.support.brokers.guarded_broker import Guarded, guarded_broker
from tests.support.brokers.key_table import names_and_kinds
from tests.support.processes.fabric_processes import PYTHONPATH, ROOT
from tests.support.worlds.curious_worlds import CANARY

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

# What a worker reads by its work, as docs/security.md tells it; of every other table it reads nothing.
READABLE = {
    *("runs", "workers", "heartbeats", "lends", "sharing", "assignments", "clock", "lease_bell:x"),
    *(f"r1.0:{name}" for name in ("run", "clock", "counters", "leases", "lease_slots", "begun", "open")),
    *(f"r1.0:{name}" for name in ("inbox:x", "timings", "told:x")),
    *(f"r1.0:turn:{name}" for name in ("ready:x", "suspects", "job", "record", "deadline", "held", "bell", "log")),
    *(f"r1.0:turn:{name}" for name in ("agent", "result", "image", "homed", "homed_at", "hardware", "bell:x")),
    *(f"r1.w:{name}" for name in ("head", "manifests", "chunk:x:x.x:x", "sending", "announcements", "holders")),
    *(f"r1.w:{name}" for name in ("addresses", "holding", "clock", "offer", "answers:x", "damage", "tending")),
}
FOREIGN = {"rq:job:x": "hash", "rq:queue:x": "list", "session:1": "string", "rf:x": "string"}
FORMS = "K|K f|K 0 -1|K -inf +inf|K - +|K + -|STREAMS K 0|COUNT 9 STREAMS K 0|K 0.01|STREAM K FULL|K O|O K|0|*"
OWN = "rf:{r1.0}:turn:other"  # O: what a worker may write
LEAVE = {"auth", "hello", "quit", "reset", "eval", "evalsha"}  # ends the connection; the last two are tried with all
IN_SCRIPT = "return redis.pcall(unpack(ARGV))"


class Vault:
    """A broker of which every table holds a secret of its own."""

    def __init__(self, broker: Guarded) -> None:
        self.broker = broker
        self.kinds = {**dict(names_and_kinds()), **FOREIGN}
        self.secrets = {key: canary() for key in self.kinds}
        self.worker = broker.client("worker")
        self.worker.response_callbacks.clear()

    def fill(self) -> None:
        """As before whatever was done to it."""
        with self.broker.admin.pipeline(transaction=False) as pipe:
            pipe.flushall()
            for key, kind in self.kinds.items():
                _put(pipe, key, kind, self.secrets[key])
            pipe.execute()

    def learned(self, command: str, keys: Iterable[str]) -> set[str]:
        """The tables whose secrets come back for a command in all its forms, alone and in a script."""
        self.fill()
        with self.worker.pipeline(transaction=False) as pipe:
            for key in keys:
                for form in FORMS.split("|"):
                    words = [*command.split("|"), *({"K": key, "O": OWN}.get(word, word) for word in form.split())]
                    pipe.execute_command(*words)
                    pipe.execute_command("EVAL", IN_SCRIPT, 1, key, *words)
                    pipe.execute_command("EVAL", IN_SCRIPT, 1, "rf:x", *words)
            said = repr(pipe.execute(raise_on_error=False)).encode()
        seen = {each.decode() for each in CANARY.findall(said)}
        return {table_of(key) for key, secret in self.secrets.items() if secret in seen}


def _put(pipe: Any, key: str, kind: str, secret: str) -> None:
    if kind == "hash":
        pipe.hset(key, "f", secret)
    elif kind == "zset":
        pipe.zadd(key, {secret: 1})
    elif kind == "stream":
        pipe.xadd(key, {"f": secret})
    elif kind == "list":
        pipe.rpush(key, *[secret] * 4)
    else:
        pipe.set(key, secret)


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vault]:
    with guarded_broker(tmp_path_factory.mktemp("vault")) as broker:
        vault = Vault(broker)
        yield vault
        vault.worker.close()


@pytest.mark.slow
def test_of_the_broker_a_worker_learns_what_its_work_needs_and_no_more(vault: Vault) -> None:
    # When its user sends every command that it has, in every form that fits a key, for every key there is
    found = {command: vault.learned(command, vault.kinds) for command in commands_of("worker")}
    # Then what comes back is what its work is about
    assert set().union(*found.values()) == READABLE, {name: sorted(seen - READABLE) for name, seen in found.items()}


@pytest.mark.slow
def test_commands_that_are_not_a_workers_tell_it_nothing(vault: Vault) -> None:
    # Given one key of each type that it may not read, and one that it may
    hidden = {kind: key for key, kind in vault.kinds.items() if table_of(key) not in READABLE}
    assert set(hidden) == {"hash", "zset", "stream", "list", "string"}
    known = {each.decode() for each in vault.broker.admin.command_list()}
    others = known - {name.split("|")[0] for name in commands_of("worker")} - LEAVE
    assert len(others) > 150
    # When it sends every command that it does not have, then nothing comes back
    keys = [*hidden.values(), next(key for key in vault.kinds if table_of(key) == "r1.0:turn:job")]
    assert {command: seen for command in sorted(others) if (seen := vault.learned(command, keys))} == {}
    # as it would if it had one of them, of what it may read
    vault.broker.admin.execute_command("ACL", "SETUSER", user_name("worker"), "+hvals")
    assert vault.learned("hvals", keys) == {"r1.0:turn:job"}


# ---- on the machine


@contextmanager
def open_directory() -> Iterator[Path]:
    """One that every user may look into, so that files are as closed as they themselves are."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.slow
def test_on_the_machine_a_worker_that_is_taken_over_learns_its_own_secrets_alone() -> None:
    with open_directory() as directory:
        # Given roles with users and variables of their own, and their files
        passwords = {user_name(role): canary() for role in RIGHTS}
        secrets = directory / "users.passwords"
        secrets.write_text("".join(f"{name} {password}\n" for name, password in passwords.items()))
        keys, shown = directory / "rollfab-api.keys", directory / "shown"
        for path, mode in ((keys, 0o600), (shown, 0o644)):
            path.write_text(canary())
            path.chmod(mode)
        own = canary()
        with guarded_broker(directory) as broker, Supervisor(directory / "logs") as supervisor:
            for role in ("controller", "agent", "reward"):
                variables = {"ROLLFAB_URL": broker.url(role), "HF_TOKEN": canary(), "PYTHONPATH": PYTHONPATH}
                supervisor.add(role, [role], environment=variables)
            broker.admin.set("secret", canary())
            _wait(broker.admin, 3)
            # When a worker of another user of the machine looks everywhere, as what was taken over does
            files = [secrets, directory / "users.acl", keys, shown, *(directory / "logs").iterdir()]
            task: dict[str, Any] = {"files": list(map(str, files)), "brokers": [broker.server.port]}
            task["brokers"].append(str(broker.server.path))
            is_root = os.geteuid() == 0
            if not is_root:  # a worker of our own user: its files are ours, and the roles hide what they hold
                task = {"only": [child.pid for child in supervisor.children.values()], "brokers": task["brokers"]}
            found = _look(task, {"ROLLFAB_URL": broker.url("worker"), "HF_TOKEN": own}, is_root=is_root)
        # Then it has found what is its own, and what is open to all
        assert found == sorted([passwords[user_name("worker")], own, *([shown.read_text()] if is_root else [])])


def _wait(admin: Redis, count: int) -> None:
    for _ in range(600):
        if admin.hlen("rf:{rf}:workers") >= count:  # type: ignore[operator]
            return
        admin.blpop(["never"], 0.1)
    raise AssertionError("the roles do not come up")


def _look(task: dict[str, Any], variables: dict[str, str], *, is_root: bool) -> list[str]:
    nobody = pwd.getpwnam("nobody")
    user: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if is_root else {}
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **variables}
    words = [PYTHON, "-c", LOOK, json.dumps(task)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, **user)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_every_table_is_in_the_vault() -> None:
    tables = {table_of(key) for key, _ in names_and_kinds()}
    assert tables > READABLE
    assert not any(re.search("[<>K]", table) for table in tables)
