"""A primary, a replica and three sentinels on this machine, for tests of fail-over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.brokers.redis_server import RedisServer, ask
from tests.support.until import wait_until

SERVICE = "main"
SENTINEL = """\
sentinel monitor {service} 127.0.0.1 {port} 2
sentinel down-after-milliseconds {service} {down_after_ms}
sentinel failover-timeout {service} 3000
sentinel parallel-syncs {service} 1
"""


class SentinelService:
    """One primary, its replica, and three sentinels who agree by two.

    Args:
        directory: exists; short enough for unix sockets below it.
        config: further lines for primary and replica, as in redis.conf.
        down_after_ms: silence after which a sentinel holds the primary for down.
    """

    def __init__(self, directory: Path, *config: str, down_after_ms: int = 500) -> None:
        homes = [directory / name for name in ("primary", "replica", "s1", "s2", "s3")]
        for home in homes:
            home.mkdir()
        lines = ("repl-diskless-sync-delay 0", "appendonly yes", *config)
        self.primary = RedisServer(homes[0], *lines)
        self.replica = RedisServer(homes[1], *lines, f"replicaof 127.0.0.1 {self.primary.port}")
        self.sentinels = [
            RedisServer(
                home,
                f"sentinel myid {index:040x}",
                *SENTINEL.format(service=SERVICE, port=self.primary.port, down_after_ms=down_after_ms).splitlines(),
                is_sentinel=True,
            )
            for index, home in enumerate(homes[2:], start=1)
        ]

    @property
    def url(self) -> str:
        """Where clients find the primary."""
        return f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in self.sentinels)}/{SERVICE}"

    def start(self) -> None:
        """Start all five; returns once the replica has caught up and the sentinels know of all the others."""
        self.primary.start()
        self.replica.start()
        wait_until(lambda: b"master_link_status:up" in ask(self.replica, "INFO", "replication"), "the replica follows")
        for sentinel in self.sentinels:
            sentinel.start()
        wait_until(lambda: all(self._knows_all(each) for each in self.sentinels), "the sentinels know one another")

    def cut_replica_off(self) -> None:
        """From now on the replica gets nothing: its process is stopped, and what is sent to it is sent no more."""
        os.kill(self.replica.pid, signal.SIGSTOP)
        ask(self.primary, "CLIENT", "KILL", "TYPE", "replica")

    def fail_over(self) -> None:
        """Kill the primary, let the replica go on where it was, and wait until it is the primary."""
        self.primary.kill()
        os.kill(self.replica.pid, signal.SIGCONT)
        wait_until(lambda: b"role:master" in ask(self.replica, "INFO", "replication"), "the replica is the primary")

    def kill(self) -> None:
        """End all of them as a crash would."""
        for server in (self.primary, self.replica, *self.sentinels):
            server.kill()

    def _knows_all(self, sentinel: RedisServer) -> bool:
        found = ask(sentinel, "SENTINEL", "MASTER", SERVICE)
        facts = dict(zip(found[::2], found[1::2], strict=True))
        return (facts[b"num-slaves"], facts[b"num-other-sentinels"]) == (b"1", b"2")


@contextmanager
def sentinel_service(directory: Path, *config: str, down_after_ms: int = 500) -> Iterator[SentinelService]:
    """A running service, killed at the end."""
    service = SentinelService(directory, *config, down_after_ms=down_after_ms)
    try:
        service.start()
        yield service
    finally:
        service.kill()
