"""Makes and checks identifiers, and says how their parts are joined.

- A group id is made by the client, so a push can be repeated safely.
- A trajectory id is `<group_id>.<index>`, a turn id `<trajectory_id>.<index>`: parents are read off the name.
- Names that people choose (runs, workers) are checked, because they become parts of keys.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from zlib import crc32

from .errors import ConfigError

NAME_LETTERS_MAX = 63
# No dot, brace or colon: those separate the parts of keys.
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{NAME_LETTERS_MAX - 1}}}\Z")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may be part of a key.

    Raises:
        ConfigError: names the kind of thing and the rule it breaks.
    """
    if not isinstance(name, str) or not NAME.match(name):
        raise ConfigError(
            f"{kind} {name!r:.100} is not a valid name: use 1 to {NAME_LETTERS_MAX} letters, digits, '-' or '_', "
            "starting with a letter or digit",
            kind=kind,
            name=name[:100] if isinstance(name, str) else name,
        )
    return name


def new_group_id() -> str:
    """Make a name that no other client will make: 80 random bits."""
    return secrets.token_hex(10)


def new_request_id() -> str:
    """Make a name for a request whose client gave it none: 80 random bits."""
    return secrets.token_hex(10)


def new_worker_id(kind: str) -> str:
    """Make a name that is readable and unique on one broker: kind, host, process, and 24 random bits."""
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:20].strip("-") or "host"
    return f"{kind}-{host}-{os.getpid()}-{secrets.token_hex(3)}"


def new_process_id() -> str:
    """Make 32 random bits that tell processes of one name apart."""
    return secrets.token_hex(4)


def new_trace_id() -> str:
    """Make a name for a trace, as OpenTelemetry has them: 128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def trajectory_id(group_id: str, index: int) -> str:
    """Name a group's `index`-th trajectory."""
    return f"{group_id}.{index}"


def turn_id(trajectory: str, turn_index: int) -> str:
    """Name a trajectory's `turn_index`-th turn."""
    return f"{trajectory}.{turn_index}"


def group_of(job_id: str) -> str:
    """Return the group that a trajectory or turn belongs to."""
    return job_id.split(".", 1)[0]


def trajectory_of(turn: str) -> str:
    """Return the trajectory that a turn belongs to."""
    return turn.rpartition(".")[0]


def shard_of(group_id: str, shard_count: int) -> int:
    """Return the shard that holds a group and everything in it; stable across processes and versions."""
    return crc32(group_id.encode()) % shard_count
