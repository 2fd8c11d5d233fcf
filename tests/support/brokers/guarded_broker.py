"""A broker with our ACL file, for tests: each role has its own user there, and what is refused is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from rollfab.deploy.roles.acl import write_acl
from rollfab.fabric.queue.acl import user_name
from tests.support.brokers.redis_server import RedisServer, redis_server

ADMIN_PASSWORD = "a-password-of-the-operators"
ADMIN = f"user admin on >{ADMIN_PASSWORD} ~* &* +@all\n"
LIMITS = ("acllog-max-len 512", "maxmemory-policy noeviction")


@dataclass
class Guarded:
    """A broker with our ACL file, and its administrator's connection."""

    server: RedisServer
    passwords: dict[str, str]
    admin: redis.Redis

    def url(self, role: str) -> str:
        """What a role connects to."""
        name = user_name(role)
        return f"redis://{name}:{self.passwords[name]}@127.0.0.1:{self.server.port}/0"

    def client(self, role: str) -> redis.Redis:
        """A bare connection with a role's rights."""
        return redis.Redis.from_url(self.url(role))

    def denials(self) -> list[str]:
        """What was refused since the last call, as advice."""
        found = [
            f"{row['username']} was refused the {row['reason']} {row['object']}"
            f" ({row['context']}): add it to RIGHTS in fabric/queue/acl.py, if that role needs it"
            for row in self.admin.acl_log()
            if row["object"] != "client|list"  # rq would like to know its own address, and does without
        ]
        self.admin.acl_log_reset()
        return found


@contextmanager
def guarded_broker(directory: Path) -> Iterator[Guarded]:
    """A running one, for the length of a block."""
    path = directory / "users.acl"
    path.write_text(ADMIN)
    passwords = write_acl(path, directory / "users.passwords")
    with (
        redis_server(directory, f"aclfile {path}", "appendonly yes", "enable-debug-command yes", *LIMITS) as server,
        redis.Redis.from_url(f"redis://admin:{ADMIN_PASSWORD}@127.0.0.1:{server.port}") as admin,
    ):
        yield Guarded(server, passwords, admin)
