"""Any Redis or Valkey server program, with any configuration, for tests of how we meet one.

The private broker of the product is fit by construction; this helper makes the unfit ones: with a password, an
evicting memory policy, slow to load, out of memory, or of another version (give its `binary`).
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from rollfab.fabric.broker.server_process import server_binary


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses now, from a range that the system gives to nobody by itself."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """One server on a port of 127.0.0.1 and on a unix socket, both without a password unless configured."""

    def __init__(self, directory: Path, *config: str, binary: Path | None = None, is_sentinel: bool = False) -> None:
        self.port = free_port()
        self.path = directory / "test.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.unix_url = f"unix://{self.path}"
        own = (f"port {self.port}", "bind 127.0.0.1", f"unixsocket {self.path}", f"dir {directory}")
        lines = (*own, *config) if is_sentinel else (*own, 'save ""', *config)
        self._arguments = ["--sentinel"] if is_sentinel else []
        self._config = directory / "test.conf"
        self._config.write_text("\n".join(lines) + "\n")
        self._log = directory / "test.log"
        self._binary = binary or server_binary()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The server's process; only of a started server."""
        assert self._process is not None
        return self._process.pid

    def configure(self, *config: str) -> None:
        """Add lines to the configuration of the next start."""
        self._config.write_text(self._config.read_text() + "\n".join(config) + "\n")

    def start(self) -> None:
        """Start, or start again on the same port and data; returns once it answers (also "loading", "denied")."""
        with self._log.open("wb") as output:
            command = [str(self._binary), str(self._config), *self._arguments]
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        until_s = time.monotonic() + 8
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the test server did not start:\n{self._log.read_text()}")
            time.sleep(0.005)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as door:
                door.sendall(b"PING\r\n")
                return bool(door.recv(16))
        except OSError:
            return False


def ask(server: RedisServer, *words: str | int) -> Any:
    """The raw answer of one server to one command."""
    client = redis.Redis(port=server.port, protocol=2, socket_timeout=5.0)
    client.response_callbacks.clear()
    try:
        return client.execute_command(*words)
    finally:
        client.close()


@contextmanager
def redis_server(directory: Path, *config: str, binary: Path | None = None) -> Iterator[RedisServer]:
    """A running server with these lines of configuration, killed at the end.

    Args:
        directory: exists; short enough for a unix socket in it.
        config: lines as in redis.conf, after ours; a later line wins.
        binary: another server program than the bundled one.
    """
    server = RedisServer(directory, *config, binary=binary)
    server.start()
    try:
        yield server
    finally:
        server.kill()
