"""What listens where a URL leads, where opening it fails or takes long: does the URL's scheme or password fit it?

Nothing secret is sent: a PING without a password, in plain or in TLS whose certificate nobody checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from ..contract.errors import BrokerError
from .clients.url import Address, BrokerUrl, mask_url

__all__ = ["MISLEADING", "misfit"]

MISLEADING = ("auth", "failover", "lost", "protocol", "refused", "timeout", "tls")  # reasons that may hide another
ANSWER_S = 1.0
DISABLED = b"cluster support disabled"


async def misfit(url: str, parts: BrokerUrl, reason: str) -> BrokerError | None:
    """What is wrong with the URL, as an error; None: nothing that is seen so. reason: of an error that there was."""
    if not parts.hosts:
        return None
    is_tls, kind = parts.client_url.startswith("rediss:"), "" if parts.topology == "any" else f"+{parts.topology}"
    written = f"redis{'s' * is_tls}{kind}://"
    if reason not in ("auth", "refused") and await _ask(parts.hosts[0], b"PING", is_tls=not is_tls) is not None:
        text = "does not speak TLS" if is_tls else "speaks TLS"
        return _error(url, f"{text} on this port: write redis{'s' * (not is_tls)}{kind}:// instead of {written}", "tls")
    if reason == "auth" and (await _ask(parts.hosts[0], b"PING", is_tls=is_tls) or b"").startswith(b"+PONG"):
        text = "refused this user and password, and lets everybody in without: leave them out of the URL, or mend them"
        return _error(url, text, "auth")
    if reason == "failover" and b"unknown command" in (
        await _ask(parts.hosts[0], b"SENTINEL MYID", is_tls=is_tls) or b""
    ):
        plain = f"redis{'s' * is_tls}://"
        return _error(
            url, f"is no sentinel but a broker itself: write {plain}host:port instead of {written}", "failover"
        )
    if parts.topology == "cluster" and DISABLED in (await _ask(parts.hosts[0], b"CLUSTER SLOTS", is_tls=is_tls) or b""):
        plain = f"redis{'s' * is_tls}://"
        return _error(url, f"is one broker by itself, no Redis Cluster: write {plain} instead of {written}", "cluster")
    return None


def _error(url: str, text: str, reason: str) -> BrokerError:
    return BrokerError(f"the broker {mask_url(url)} {text}", broker=mask_url(url), reason=reason)


async def _ask(address: Address, command: bytes, *, is_tls: bool) -> bytes | None:
    """The beginning of what a server answers; None: nothing, or nothing that a broker says."""
    context = None
    if is_tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            try:
                writer.write(command + b"\r\n")
                line = await reader.readuntil(b"\r\n")
                return line if line[:1] in b"+-*$:" else None
            finally:
                writer.transport.abort()
    return None
