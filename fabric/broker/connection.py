"""The way to a broker: one client per process role, opened, checked, and patient with restarts.

- A broker is used only after `check_broker` found it fit: new enough, never evicting, writable, loaded. In a Redis
  Cluster, every primary is checked.
- A lost connection is retried within a budget of seconds, not of attempts, so a restart of a few seconds goes
  unnoticed. *Every* command is retried, also one whose reply was lost: the scripts of this room are written to be
  repeated. A caller that must not repeat opens its own client with `patience_s=0`.
- Behind Sentinel the budget is at least what the sentinels need to replace a primary, so that goes unnoticed too.
- In a directory where everybody may put a socket, we do not trust a socket that another user put there.
- Nothing here reads the environment, and no text holds a password.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import ssl
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import redis.asyncio
from redis import exceptions

from ..contract.errors import BrokerError, ConfigError
from .clients.cluster_client import ClusterClient
from .clients.patience import SAY_AFTER_S, PatientRetry
from .clients.pools import Pools
from .clients.translate import broker_name, translate
from .clients.typed import TypedClient
from .clients.url import Address, BrokerUrl, mask_url, read_url
from .embedded import starter_of
from .sentinel import LedClient
from .server_facts import BrokerFacts, broker_facts, problems

log = logging.getLogger(__name__)

CONNECTION_COUNT_MAX = 32
LOADING_POLL_S = 0.25
LONG_S = 1.0  # for opening: after this we look what listens there
# Longest silence where another server may take over: a lost machine says nothing, and patience must outlast that.
SILENCE_S = 6.0


async def open_broker(
    url: str,
    *,
    client_name: str,
    max_connections: int = CONNECTION_COUNT_MAX,
    socket_timeout_s: float = 15.0,
    patience_s: float = 10.0,
    open_patience_s: float = 2.0,
) -> redis.asyncio.Redis:
    """Connect, and prove it with one PING. Close the client with `await client.aclose()`.

    Args:
        url: as broker/clients/url.py says: one broker, any node of a Redis Cluster, or sentinels and the name of their
        service. client_name: shown by CLIENT LIST at the broker; no spaces.
        max_connections: bound of this client's pool (of a cluster: for each node), [1, …]; a caller waits up to
            20 s for a free one.
        socket_timeout_s: longest silence within one command; a blocking command must block for less. In a cluster
            and behind Sentinel at most SILENCE_S.
        patience_s: how long a command keeps trying while the broker is away. Behind Sentinel at least as long as a
            fail-over takes, unless it is 0.
        open_patience_s: the same for the PING here, shorter: a person may be waiting for the message.

    Raises:
        ConfigError: the URL is empty or malformed, or leads to a socket that another user put into a shared directory.
        BrokerError: not found, not reachable, refused us, or TLS failed; facts["reason"] says which.
    """
    assert client_name.isprintable()
    assert " " not in client_name
    parts = read_url(url)
    await asyncio.to_thread(_check_tls_files, url, parts)
    opening = asyncio.ensure_future(
        _open(url, parts, client_name, max_connections, socket_timeout_s, patience_s, open_patience_s)
    )
    try:
        await asyncio.wait((opening,), timeout=LONG_S)
        if not opening.done() and (better := await misfit(url, parts, "timeout")) is not None and not opening.done():
            raise better
        return await opening
    except BrokerError as error:
        reason = str(error.facts.get("reason"))
        if not opening.done() or reason not in MISLEADING or (better := await misfit(url, parts, reason)) is None:
            raise
        raise better from None
    finally:
        if not opening.done():
            opening.cancel()
            await asyncio.wait((opening,))


async def _open(
    url: str,
    parts: BrokerUrl,
    client_name: str,
    max_connections: int,
    socket_timeout_s: float,
    patience_s: float,
    open_patience_s: float,
) -> redis.asyncio.Redis:
    """Do the same as `open_broker`, which adds whether another scheme would do."""

    def pools(silence_s: float) -> Pools:
        timeout_s = min(socket_timeout_s, silence_s)
        return Pools(parts, client_name=client_name, max_connections=max_connections, socket_timeout_s=timeout_s)

    if parts.topology == "sentinel":
        return await LedClient.open(parts, pools(SILENCE_S), patience_s, open_patience_s)
    if parts.topology == "cluster":
        return await ClusterClient.open(parts.hosts, pools(SILENCE_S), patience_s, open_patience_s)
    client = TypedClient.from_pool(pools(socket_timeout_s).make(open_patience_s))
    nodes: Sequence[Address] = ()
    try:
        if not parts.hosts:
            check_socket(Path(unquote(urlsplit(parts.client_url).path)))
        with translate(client), contextlib.suppress(exceptions.BusyLoadingError):  # check_broker waits for that
            await client.ping()
            nodes = await _cluster_nodes(client, parts)
    except BrokerError as error:
        await client.aclose()
        raise _of_ended(error, url) from error.__cause__
    except BaseException:
        await client.aclose()
        raise
    if nodes:
        await client.aclose()
        return await ClusterClient.open(nodes, pools(SILENCE_S), patience_s, open_patience_s)
    client.set_retry(PatientRetry(patience_s))
    return client


def check_socket(path: Path) -> None:
    """Refuse a socket that anybody could have put where it is.

    Raises:
        ConfigError: it is neither ours nor root's, in a directory that every user may write to.
    """
    try:
        owner, shared = path.stat().st_uid, path.parent.stat().st_mode & stat.S_IWOTH
    except OSError:
        return  # the error of connecting says more
    if shared and owner not in (os.geteuid(), 0):
        raise ConfigError(
            f"the broker's socket {path} belongs to user {owner}, in a directory that every user may write to: it may "
            "be anybody's; have the broker listen in a directory of its own",
            path=str(path),
        )


def _of_ended(error: BrokerError, url: str) -> BrokerError:
    """Return the same error, or say what to start if the URL is of a private broker that ended with its owner."""
    starter = starter_of(url) if error.facts.get("reason") == "unreachable" else ""
    if not starter:
        return error
    text = f"the private broker {mask_url(url)} has ended with its `{starter}`: start `{starter}` again"
    return BrokerError(f"{text}, which goes on with its data, or set ROLLFAB_URL to another broker", **error.facts)


async def _cluster_nodes(client: redis.asyncio.Redis, parts: BrokerUrl) -> Sequence[Address]:
    """Return the address of the cluster node that we are connected to; empty if it is a single broker."""
    try:
        if not (await client.info("cluster")).get("cluster_enabled"):
            return ()
        return parts.hosts or [("127.0.0.1", int((await client.info("server"))["tcp_port"]))]
    except exceptions.ResponseError:
        return ()  # no right to ask: check_broker will say so


async def check_broker(client: redis.asyncio.Redis, *, loading_timeout_s: float = 60.0) -> BrokerFacts:
    """Ask a broker what it is, wait while it loads its data, and refuse one that cannot keep our promises.

    Returns:
        The facts; of a cluster those of one primary, with `is_aof_on` only where all of them have it on.

    Raises:
        BrokerError: it is too old, may evict, is a replica, or still loads after `loading_timeout_s`; one text
            for all that is wrong, facts["problems"] as a list. Or the question itself was refused.
    """
    until_s = asyncio.get_running_loop().time() + loading_timeout_s
    servers = client.primaries() if isinstance(client, ClusterClient) else [client]
    found = [await _facts_when_loaded(server, until_s) for server in servers]
    wrong = list(dict.fromkeys(problem for facts in found for problem in problems(facts)))
    if wrong:
        bad = [broker_name(server) for server, facts in zip(servers, found, strict=True) if problems(facts)]
        text = f"the broker {', '.join(bad)} cannot be used: it {'; and it '.join(wrong)}"
        raise BrokerError(text, broker=broker_name(client), reason="unfit", problems=wrong)
    is_aof_on = all(facts.is_aof_on for facts in found)
    if not is_aof_on:
        log.warning("broker.not_durable", extra={"broker": broker_name(client), "next_step": "set appendonly yes"})
    return dataclasses.replace(found[0], is_aof_on=is_aof_on)


async def _facts_when_loaded(client: redis.asyncio.Redis, until_s: float) -> BrokerFacts:
    """Read a server's facts once it has loaded its data, or at `until_s`."""
    begun_s, has_said = asyncio.get_running_loop().time(), False
    while True:
        with translate(client):
            facts = broker_facts(await client.info())
        now_s = asyncio.get_running_loop().time()
        if not facts.is_loading or now_s >= until_s:
            return facts
        if now_s - begun_s >= SAY_AFTER_S and not has_said:
            has_said = True
            log.warning("the broker %s loads its data: waiting for it %.0f s", broker_name(client), until_s - now_s)
        await asyncio.sleep(LOADING_POLL_S)


def _check_tls_files(url: str, parts: BrokerUrl) -> None:
    """Require that the certificates and the key that a URL names can be used. Raises ConfigError: it names the file."""
    settings = dict(parse_qsl(urlsplit(parts.client_url).query))
    names = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    authorities, own, key = (settings.get(name) for name in names)
    context, name, path = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "", ""
    try:
        for name in names:
            if path := settings.get(name, ""):
                Path(path).open("rb").close()
        if authorities:
            name, path = "ssl_ca_certs", authorities
            context.load_verify_locations(authorities)
        if own:
            name, path = ("ssl_keyfile", key) if key else ("ssl_certfile", own)
            context.load_cert_chain(own, key, settings.get("ssl_password", ""))
    except ssl.SSLError as error:  # before OSError, which it is
        what = "no certificate of an authority" if name == "ssl_ca_certs" else f"not the key of the certificate {own}"
        raise _unusable(url, f"its {name} {path} is {what} ({error.reason or error})") from error
    except OSError as error:
        raise _unusable(url, f"its {name} {path} cannot be read: {error.strerror}") from error


def _unusable(url: str, fault: str) -> ConfigError:
    return ConfigError(f"the broker URL {mask_url(url)} is not usable: {fault}", url=mask_url(url))


# ---------------------------------------------------------------- scheme
#
# Looks what listens where a URL leads, if opening it fails or takes long: does the URL's scheme or password fit it?
#
# Nothing secret is sent: a PING without a password, in plain or in TLS whose certificate nobody checks.


MISLEADING = ("auth", "failover", "lost", "protocol", "refused", "timeout", "tls")  # reasons that may hide another
ANSWER_S = 1.0
DISABLED = b"cluster support disabled"


async def misfit(url: str, parts: BrokerUrl, reason: str) -> BrokerError | None:
    """Say what is wrong with the URL, as an error; None if nothing shows. reason: of the error in opening it."""
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
    """Return the beginning of a server's answer; None if there is none, or none that a broker gives."""
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
