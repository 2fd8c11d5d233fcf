"""The broker's ACL file: what no role may do, and that the table it is made of is whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from rollfab.deploy.roles.acl import write_acl
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.queue import acl, keys
from rollfab.fabric.queue.acl import RIGHTS, commands_of, user_name
from rollfab.fabric.queue.keys import JobKeys, ShardKeys, WeightKeys
from rollfab.fabric.queue.scripts import script_names
from tests.support.brokers.guarded_broker import ADMIN, Guarded

pytestmark = [pytest.mark.redis, pytest.mark.timeout(30)]

LUA = Path(__file__).resolve().parents[3] / "fabric" / "queue" / "lua"


# ---- the table


def test_every_script_belongs_to_a_role() -> None:
    given = {script for rights in RIGHTS.values() for script in rights.scripts.split()}
    scripts = set(script_names())
    assert not scripts - given, f"say in RIGHTS (fabric/queue/acl.py) which roles call {sorted(scripts - given)}"
    assert not given - scripts, f"take these off RIGHTS, there are no such scripts: {sorted(given - scripts)}"


def test_every_command_of_every_script_is_seen() -> None:
    """A call that the pattern does not read would be a right that nobody has."""
    for path in sorted(LUA.rglob("*.lua")):
        if path.name == "typed.lua":  # it sends what scripts call, and what commands_of adds
            continue
        for line in path.read_text().splitlines():
            code = line.split("--")[0]
            calls = len(re.findall(r"redis\.p?call|call_in_parts\(", code))
            seen = len(acl.CALL.findall(code))
            is_defined_here = "function call_in_parts" in code or "redis.call(command," in code
            assert calls == seen or is_defined_here, f"{path.name}: write the command's name where it is called: {line}"


def _all_keys() -> set[str]:
    """A key of every kind that keys.py knows."""
    shard, weights = ShardKeys("r", 0), WeightKeys("r")
    found = {value for name, value in vars(keys).items() if isinstance(value, str) and value.startswith("rf:")}
    found |= {keys.lease_bell("w"), shard.group("g"), shard.rollouts("g"), shard.inbox("a")}
    found |= {weights.head, weights.manifests, weights.announcements, weights.chunk(1, "delta.1", 0)}
    found |= {weights.holders, weights.holding, weights.addresses, weights.clock, weights.offer}
    found.add(weights.answers("r"))
    for value in vars(shard).values():
        for each in vars_of(value) if isinstance(value, JobKeys) else (value,):
            found |= set(each) if isinstance(each, tuple) else {each}
    return found - {shard.base}


def vars_of(value: JobKeys) -> tuple[Any, ...]:
    return tuple(getattr(value, name) for name in JobKeys.__dataclass_fields__)


def test_every_kind_of_key_is_written_by_some_role_besides_the_operator(broker: Guarded) -> None:
    writers = {key: [] for key in _all_keys()}
    for key in writers:
        for role in RIGHTS:
            if role != "operator" and _may(broker, role, "SET" if "set" in commands_of(role) else "HSET", key):
                writers[key].append(role)
    missing = sorted(key for key, roles in writers.items() if not roles)
    assert not missing, f"no role may write {missing}: add them to RIGHTS in fabric/queue/acl.py"


def _may(broker: Guarded, role: str, *command: str) -> bool:
    words = [*command, "x", "y"] if command[0].upper() == "HSET" else [*command, "x"]
    answer = broker.admin.execute_command("ACL", "DRYRUN", user_name(role), *words)
    return answer in (b"OK", True)


def test_no_role_may_administer_the_broker_or_empty_it(broker: Guarded) -> None:
    forbidden = (
        "FLUSHALL",
        "FLUSHDB",
        "CONFIG GET dir",
        "CONFIG SET dir /",
        "KEYS *",
        "DEBUG SLEEP 0",
        "SCRIPT FLUSH",
        "SCRIPT KILL",
        "SHUTDOWN",
        "MONITOR",
        "ACL LIST",
        "ACL SETUSER x",
        "CLIENT KILL TYPE normal",
        "CLIENT LIST",
        "REPLICAOF h 1",
        "BGREWRITEAOF",
        "FUNCTION LOAD x",
        "MODULE LIST",
        "SLOWLOG GET",
        "SWAPDB 0 1",
        "MIGRATE h 1 k 0 1",
        "RENAME rf:{rf}:runs x",
        "RESTORE rf:{rf}:runs 0 x",
        "DUMP rf:{rf}:runs",
    )
    for role in RIGHTS:
        with broker.client(role) as client:
            for line in forbidden:
                with pytest.raises(NoPermissionError):
                    client.execute_command(*line.split())


def test_a_reading_api_can_write_nothing(broker: Guarded) -> None:
    assert {key for key in _all_keys() if _may(broker, "api-read", "SET", key)} == set()
    writing = broker.admin.execute_command("ACL", "CAT", "write")
    assert {name.decode() for name in writing} & set(commands_of("api-read")) == set()


def test_without_a_user_nobody_comes_in(broker: Guarded) -> None:
    with redis.Redis(port=broker.server.port) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    wrong = redis.Redis(port=broker.server.port, username=user_name("agent"), password="wrong")
    with wrong, pytest.raises(redis.AuthenticationError):
        wrong.ping()


# ---- the files


def test_the_files_are_for_their_owner_alone_and_the_acl_holds_no_password(tmp_path: Path) -> None:
    made = write_acl(tmp_path / "users.acl", tmp_path / "users.passwords")

    assert set(made) == {user_name(role) for role in RIGHTS}
    assert len(set(made.values())) == len(RIGHTS)
    assert all(len(password) >= 43 for password in made.values())
    text = (tmp_path / "users.acl").read_text()
    assert not any(password in text for password in made.values())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_writing_again_keeps_passwords_and_users_that_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "users.acl"
    path.write_text(f"{ADMIN}user default on nopass ~cache:* +get\nuser rollfab-gone on nopass +@all ~*\n")
    first = write_acl(path, tmp_path / "users.passwords")

    again = write_acl(path, tmp_path / "users.passwords")

    assert again == first
    lines = path.read_text().splitlines()
    assert ADMIN.strip() in lines
    assert "user default on nopass ~cache:* +get" in lines
    assert not any("rollfab-gone" in line for line in lines)
    assert len(lines) == 2 + len(RIGHTS)


def test_a_file_of_something_else_is_not_taken_for_passwords(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("buy milk and bread\n")
    with pytest.raises(ConfigError, match=r"notes, line 1 is not `user password`"):
        write_acl(tmp_path / "users.acl", tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "buy milk and bread\n"
    with pytest.raises(ConfigError, match="cannot be read or written"):
        write_acl(tmp_path / "no" / "users.acl", tmp_path / "passwords")
