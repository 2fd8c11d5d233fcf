"""Which address of this machine the other members of a group can reach.

- Members that share one machine and network speak by way of 127.0.0.1, which needs no interface to be up.
- Otherwise a member's address is the one its packets to the publisher leave from; nothing is sent to find it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
SOMEWHERE_ELSE = "192.0.2.1"  # an address for documents (RFC 5737): the route to it is the default one
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HOST = re.compile(r"[A-Za-z0-9._:%-]{0,255}")  # the names of hosts that a member may give
NETWORK = Path("/proc/self/ns/net")


def node() -> str:
    """Return a name that two processes share exactly when 127.0.0.1 means the same to both."""
    with contextlib.suppress(OSError):
        return f"{BOOT_ID.read_text().strip()}/{os.stat(NETWORK).st_ino}"
    return socket.gethostname()  # no Linux: containers that share a host's name must set `host`


def host_towards(peer: str) -> str:
    """Return the address that packets to `peer` (an address or a name) leave from; 127.0.0.1 if it has no route."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: no host can have such a name
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return LOOPBACK
