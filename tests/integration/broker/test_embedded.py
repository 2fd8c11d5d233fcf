"""The private broker: a real server, real deaths of it and of its owner."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rollfab
from rollfab.fabric.broker import server_process
from rollfab.fabric.broker.connection import check_broker, open_broker
from rollfab.fabric.broker.embedded import EmbeddedBroker, starter_of
from rollfab.fabric.contract.errors import BrokerError, ConfigError
from tests.support.brokers.redis_server import redis_server
from tests.support.until import wait_until

GONE_S = 6.0  # a server's own look at its owner, and its end
SOURCE = Path(__file__).parents[3] / "src"


def is_gone(pid: int) -> bool:
    """No such process, or one that has ended and waits for a parent who never asks."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat_line = Path(f"/proc/{pid}/stat")
    return stat_line.exists() and stat_line.read_text().rpartition(")")[2].split()[0] in "ZX"


async def write(url: str, key: str, value: bytes) -> None:
    client = await open_broker(url, client_name="test")
    await client.set(key, value)
    await client.aclose()


async def read(url: str, key: str) -> bytes | None:
    client = await open_broker(url, client_name="test")
    value = await client.get(key)
    await client.aclose()
    assert value is None or isinstance(value, bytes)
    return value


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "d"


# ---------------------------------------------------------------- a private broker


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_private_broker_is_fit_for_use_on_either_transport(transport: str) -> None:
    with EmbeddedBroker.start(transport=transport) as broker:  # type: ignore[arg-type]
        client = await open_broker(broker.url, client_name="test")
        facts = await check_broker(client)
        await client.aclose()
        assert broker.url.startswith("unix:///" if transport == "unix" else "redis://:")
        assert (facts.server_kind, facts.maxmemory_policy) == ("valkey", "noeviction")
        assert facts.is_aof_on
        assert broker.is_running
    assert not broker.is_running


def test_a_temporary_broker_leaves_nothing_behind() -> None:
    with EmbeddedBroker.start() as broker:
        assert broker.data_directory.is_dir()
        assert stat.S_IMODE(broker.data_directory.stat().st_mode) == 0o700
    assert not broker.data_directory.exists()
    assert is_gone(broker.pid)
    broker.stop()  # a second time does nothing


def test_who_forgets_the_url_is_told_that_this_fabric_is_its_own(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ROLLFAB_URL", raising=False)
    with rollfab.connect() as fabric:
        (said,) = caplog.messages
        assert fabric.url in said and "ROLLFAB_URL is not set" in said and "ends with it" in said
    caplog.clear()
    with rollfab.connect(data_directory=home) as meant, rollfab.connect(meant.url):
        assert caplog.messages == []


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_a_kept_directory_brings_data_and_url_back(home: Path, transport: str) -> None:
    with EmbeddedBroker.start(home, transport=transport) as first:  # type: ignore[arg-type]
        await write(first.url, "key", b"\x00value")
    with EmbeddedBroker.start(home, transport=transport) as second:  # type: ignore[arg-type]
        assert second.url == first.url
        assert await read(second.url, "key") == b"\x00value"


@pytest.mark.fault
async def test_data_older_than_a_second_survives_the_kill_of_the_server(home: Path) -> None:
    first = EmbeddedBroker.start(home)
    await write(first.url, "key", b"value")
    await asyncio.sleep(1.1)  # appendfsync everysec; the page cache would do, a kill is not a power cut
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not first.is_running, limit_s=GONE_S)

    with EmbeddedBroker.start(home) as second:
        assert await read(second.url, "key") == b"value"
    first.stop()


async def test_a_path_too_long_for_a_socket_becomes_a_port_with_a_password(home: Path) -> None:
    deep = home / ("x" * 100)
    with EmbeddedBroker.start(deep) as broker:
        assert broker.url.startswith("redis://:")
        await write(broker.url, "key", b"value")
        stranger = broker.url.replace(broker.url.split("@")[0].removeprefix("redis://") + "@", "")
        with pytest.raises(BrokerError) as caught:
            await open_broker(stranger, client_name="test")
    assert caught.value.facts["reason"] == "auth"
    assert stat.S_IMODE((deep / "broker.conf").stat().st_mode) == 0o600


def test_odd_characters(home: Path) -> None:
    odd = home / 'a "b"\' c\\d\n é %20 [1]*?'
    with EmbeddedBroker.start(odd) as broker:
        assert broker.url.startswith("unix://")
        assert asyncio.run(read(broker.url, "nothing")) is None
        assert (odd / "appendonlydir").is_dir()  # so its settings hold


@pytest.mark.timeout(60)
def test_two_brokers_never_share_a_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollfab.fabric.broker.embedded.LOCK_WAIT_S", 1e9)  # an owner that lives is not waited for
    with EmbeddedBroker.start(home) as broker:
        with pytest.raises(BrokerError) as caught:
            EmbeddedBroker.start(home)
        assert str(broker.pid) in str(caught.value)
        assert f"ROLLFAB_URL={broker.url}" in str(caught.value)
        assert str(os.getpid()) in str(caught.value)
        assert broker.is_running


def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        EmbeddedBroker.start(tmp_path / "file" / "d")


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(home: Path) -> None:
    with EmbeddedBroker.start(home):
        pass
    manifest = next((home / "appendonlydir").glob("*.manifest"))
    manifest.write_text("nonsense\n")
    with pytest.raises(BrokerError) as caught:
        EmbeddedBroker.start(home)
    assert str(home) in str(caught.value)
    assert "AOF manifest" in str(caught.value)


def test_a_port_that_is_taken_is_said_and_a_stranger_is_not_mistaken_for_our_server(home: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as stranger, pytest.raises(BrokerError, match="Address already in use"):
        EmbeddedBroker.start(home, transport="tcp", port=stranger.port)


def test_a_start_that_fails_for_want_of_room_says_so_and_loses_no_password(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a directory with data, whose broker is stopped
    with EmbeddedBroker.start(home, transport="tcp") as broker:
        url = broker.url

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # When it is started while the disk is full, twice
    with monkeypatch.context() as patch:
        patch.setattr(server_process, "write_private", full)
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"directory {home} cannot be written: No space left on device; make"):
                EmbeddedBroker.start(home, transport="tcp")
    # Then it is reached as before once there is room
    with EmbeddedBroker.start(home, transport="tcp") as broker:
        assert broker.url == url


def test_a_lost_port_is_replaced_by_another(home: Path) -> None:
    # Given a directory whose last server had a port that somebody else holds now
    with EmbeddedBroker.start(home, transport="tcp") as first:
        port = int(first.url.rpartition(":")[2].partition("/")[0])
    # When it starts again
    with socket.create_server(("127.0.0.1", port)), EmbeddedBroker.start(home, transport="tcp") as second:
        # Then it comes up elsewhere
        assert second.url != first.url


def test_the_lock_file_is_readable_by_people(home: Path) -> None:
    with EmbeddedBroker.start(home) as broker:
        written = json.loads((home / "broker.lock").read_text())
    assert written == {"owner_pid": os.getpid(), "server_pid": broker.pid, "url": broker.url}


# ---------------------------------------------------------------- it is nobody else's


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_nothing_that_a_private_broker_writes_is_open_to_others(home: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for _ in range(2):
            with EmbeddedBroker.start(home, transport="tcp"):
                pass
    finally:
        os.umask(before)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (home, *home.rglob("*"))}
    assert {"broker.conf", "broker.lock", "broker.log", "broker.log.1", "appendonlydir"} <= set(found)
    assert {name: f"{mode:o}" for name, mode in found.items() if mode & 0o077} == {}


@pytest.mark.parametrize(
    ("name", "mode"), [(".", 0o777), (".", 0o770), ("broker.lock", 0o644), ("broker.conf", 0o604)], ids=str
)
def test_a_directory_that_others_have_a_hand_in_is_not_used(home: Path, name: str, mode: int) -> None:
    with EmbeddedBroker.start(home, starter="me") as broker:
        assert starter_of(broker.url, home) == "me"
        (home / name).chmod(mode)
        assert starter_of(broker.url, home) == ""
    with pytest.raises(ConfigError, match="is open to other users") as caught:
        EmbeddedBroker.start(home)
    assert str((home / name).resolve()) in str(caught.value)


def test_a_directory_of_another_user_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedBroker.start(home):
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(ConfigError, match=f"belongs to user {owner}, not to {owner + 1}"):
            EmbeddedBroker.start(home)


async def test_a_socket_that_another_user_put_into_a_shared_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path) as stranger:
        os.chmod(tmp_path, 0o1777)
        await (await open_broker(stranger.unix_url, client_name="test")).aclose()  # our own, wherever it is
        if os.geteuid() == 0:
            os.chown(stranger.path, 4321, -1)  # root's own would be trusted
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
        with pytest.raises(ConfigError, match="in a directory that every user may write to"):
            await open_broker(stranger.unix_url, client_name="test")
        os.chmod(tmp_path, 0o755)
        await (await open_broker(stranger.unix_url, client_name="test")).aclose()


# ---------------------------------------------------------------- it ends with its owner

OWNER = """
    import os, sys, threading, time
    from pathlib import Path
    from rollfab.fabric.broker.embedded import EmbeddedBroker

    found = []
    home = Path(sys.argv[1]) if sys.argv[1] else None
    helper = threading.Thread(target=lambda: found.append(EmbeddedBroker.start(home)))
    helper.start()
    helper.join()  # the thread that started the server is gone, its process is not
    time.sleep(0.2)
    assert found[0].is_running
    if sys.argv[2] == "fork" and os.fork() == 0:
        found[0].stop()  # not the child's to stop
        time.sleep(30)
    print(found[0].pid, found[0].url, found[0].data_directory, flush=True)
    if sys.argv[2] == "leave":
        sys.exit()
    time.sleep(30)
"""


@pytest.fixture
def own() -> Iterator[Callable[[str, str], tuple[subprocess.Popen[str], int, str, Path]]]:
    """Start a process that owns a private broker."""
    owners: list[subprocess.Popen[str]] = []

    def start(home: str, end: str) -> tuple[subprocess.Popen[str], int, str, Path]:
        command = [sys.executable, "-c", textwrap.dedent(OWNER), home, end]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        owners.append(owner)
        assert owner.stdout is not None
        pid, url, directory = owner.stdout.readline().split(maxsplit=2)
        return owner, int(pid), url, Path(directory.strip())

    yield start
    for owner in owners:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()


Own = Callable[[str, str], tuple[subprocess.Popen[str], int, str, Path]]


@pytest.mark.fault
@pytest.mark.parametrize("end", ["kill", "fork", "leave"])
async def test_a_server_ends_when_its_owner_is_killed_or_leaves_without_a_word(own: Own, end: str) -> None:
    # Given an owner in another process, whose server serves us
    owner, pid, url, directory = own("", end)
    if end != "leave":
        await write(url, "key", b"value")
        # When it is killed; with "fork", a child that it forked lives on
        os.kill(owner.pid, signal.SIGKILL)
    owner.wait()

    # Then the server ends, and the temporary directory goes with it
    wait_until(lambda: is_gone(pid), limit_s=GONE_S)
    wait_until(lambda: not directory.exists(), limit_s=GONE_S)


@pytest.mark.fault
async def test_a_killed_owners_directory_can_be_used_again_at_once(own: Own, home: Path) -> None:
    owner, pid, url, _ = own(str(home), "kill")
    await write(url, "key", b"value")
    os.kill(owner.pid, signal.SIGKILL)

    with EmbeddedBroker.start(home) as broker:  # waits for the old server to let go
        assert is_gone(pid)
        assert await read(broker.url, "key") == b"value"


@pytest.mark.fault
def test_ctrl_c_in_the_terminal_is_for_the_owner_not_for_the_server(own: Own) -> None:
    owner, pid, _, _ = own("", "fork")
    assert os.getpgid(pid) != os.getpgid(owner.pid)
