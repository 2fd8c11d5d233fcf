"""Where a vLLM server in development mode may be: that mode lets whoever reaches it write weights, without a key.

- Reached over loopback or a unix socket only.
- And listening there only, as far as this machine's own table of sockets says: vLLM's own default is every address.
  What the table does not show (a tunnel's far end, another network namespace, no Linux) is its operator's to know.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

from .....fabric.contract.errors import EngineError
from .client import UNIX

TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
LISTENS = "0A"
PORTS = {"http": 80, "https": 443}


def check_place(url: str) -> None:
    """Require that only this machine reaches it.

    Raises:
        EngineError: others may; says what to start it with.
    """
    if url.startswith(UNIX):
        return
    parts = urlsplit(url)
    where = "" if is_loopback(parts.hostname or "") else f"is reached at {parts.hostname}"
    for address in () if where else listeners(parts.port or PORTS[parts.scheme]):
        where = where or ("" if is_loopback(str(address)) else f"listens at {address}")
    if where:
        raise EngineError(
            f"vLLM server {url} is in development mode (VLLM_SERVER_DEV_MODE=1) and {where}: whoever reaches it there"
            f" can write its weights without a key. Start it with --host 127.0.0.1, or --uds PATH and --server"
            f" {UNIX}/PATH, with its worker on the same machine",
            url=url,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine is meant by it."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def listeners(port: int) -> Iterator[IPv4Address | IPv6Address]:
    """The addresses at which anybody of this machine listens on a port; none where that cannot be read."""
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, place, _, state, *_ = line.split()
            address, _, own_port = place.partition(":")
            if state == LISTENS and int(own_port, 16) == port:
                yield _address(address)


def _address(text: str) -> IPv4Address | IPv6Address:
    """Of the kernel's hex, words in the order of the machine."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    data = b"".join(words)
    return IPv4Address(data) if len(data) == 4 else IPv6Address(data)
