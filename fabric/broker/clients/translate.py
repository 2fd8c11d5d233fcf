"""The client library's exceptions, said in our own words.

- Every exception of redis-py that leaves the fabric goes through `translate`, and keeps its cause.
- The text names the broker (without secrets), the cause and the next step; facts["reason"] is a word for programs.
- Our own errors, cancellation, and programmer errors (redis.DataError) pass untouched.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import redis.asyncio
from redis import exceptions

from ...contract.errors import BrokerError, BrokerFull, FabricError
from .url import Address, shown

OWN_USER = (
    "give each role the URL of its own user, which its environment file holds; if it has that, write the ACL file "
    "again with `rollfab acl`, and load it there; grant a user of your own what is named, ACL SETUSER <user> +<command>"
)
# First match wins, so subclasses stand before their bases. {cause} is the text of the broker or the system.
REPLIES: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        exceptions.OutOfMemoryError,
        "full",
        "is at its memory limit and takes nothing new in: consume or delete finished work, or raise maxmemory there",
    ),
    (
        exceptions.AuthenticationError,
        "auth",
        "refused to let us in ({cause}): put the right user and password in the URL, redis://user:password@host",
    ),
    (
        exceptions.AuthenticationWrongNumberOfArgsError,
        "auth",
        "refused to let us in ({cause}): give a password alone in the URL, redis://:password@host",
    ),
    (
        exceptions.AuthorizationError,
        "permission",
        "refused us ({cause}): " + OWN_USER,
    ),
    (
        exceptions.NoPermissionError,
        "permission",
        "refused a command ({cause}): " + OWN_USER,
    ),
    (exceptions.BusyLoadingError, "loading", "is still loading its data from disk: wait, then try again"),
    (exceptions.ReadOnlyError, "replica", "is a read-only replica: give the URL of the primary"),
    (
        exceptions.AskError,
        "cluster",
        "is a Redis Cluster whose nodes send us back and forth ({cause}): wait for its resharding to end",
    ),
    (
        exceptions.TryAgainError,
        "cluster",
        "is a Redis Cluster that moves these keys just now ({cause}): wait for its resharding to end",
    ),
    (exceptions.ClusterDownError, "cluster", "is a Redis Cluster that is down ({cause}): see CLUSTER INFO there"),
    (exceptions.MaxConnectionsError, "busy", "has no free connection for this process: raise max_connections"),
)


class PrimaryUnknown(exceptions.ConnectionError):
    """The server that the sentinels name is no primary, or they name none; this may change in a moment."""


CAUSES: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        PrimaryUnknown,
        "failover",
        "has no primary just now ({cause}): look at the sentinels' logs, and at the service name in the URL",
    ),
    (
        socket.gaierror,
        "resolve",
        "cannot be found, its name does not resolve ({cause}): check the host in the URL and this machine's DNS",
    ),
    (
        ssl.SSLCertVerificationError,
        "tls",
        "showed a certificate that is not trusted ({cause}): add ?ssl_ca_certs=/path/to/ca.pem to the URL, "
        "or use the host name the certificate was made for",
    ),
    (
        ssl.SSLError,
        "tls",
        "could not agree with us on TLS ({cause}): use redis:// if it does not speak TLS on this port",
    ),
    (
        ConnectionRefusedError,
        "unreachable",
        "is not reachable, nothing listens there: start it, or correct the URL",
    ),
    (
        FileNotFoundError,
        "unreachable",
        "is not reachable, a file named in its URL does not exist: start it, or correct the path",
    ),
    (
        PermissionError,
        "unreachable",
        "is not reachable, this user may not open its socket or files: run as the broker's user, or use its TCP port",
    ),
)
TEXTS: tuple[tuple[str, str, str], ...] = (
    (
        "ACL failure in script",
        "permission",
        "refused a script ({cause}): " + OWN_USER,
    ),
    ("MISCONF", "disk", "cannot save its data ({cause}): free disk space there, then look in its log"),
    (
        "NOGROUP",
        "forgotten",
        "does not know this run any more ({cause}): it was deleted, or the broker has lost its data."
        " If it is wanted, create it again",
    ),
    (
        "Protocol error",
        "protocol",
        "speaks another protocol, so it is no Redis or Valkey ({cause}): correct the host and port in the URL",
    ),
    ("BUSY ", "busy", "is busy with a long script ({cause}): wait, or end it with SCRIPT KILL"),
    ("SELECT is not allowed", "database", "is a Redis Cluster, which has one database ({cause}): use /0"),
    ("DB index", "database", "does not have the database in the URL ({cause}): use /0"),
    ("max number of clients", "busy", "has too many clients ({cause}): raise maxclients there"),
    ("No connection available", "busy", "has no free connection for this process: raise max_connections"),
)
CONNECTING = re.compile(r"connecting to (\S+?)[.:]? ")  # in redis-py's words for a connection that fails
# What redis-py puts around an answer in a pipeline: its command, whose words are a key's and a caller's.
IN_PIPELINE = re.compile(r"^Command # \d+ \(.*\) of pipeline caused error: \((['\"])(?P<said>.*)\1,\)$", re.DOTALL)
NODE = "node"  # attribute of an answer that is an error
TIMEOUT = "did not answer in time ({cause}): is it overloaded, stopped, or behind a firewall?"
TIMEOUT_TLS = TIMEOUT + " Does it speak TLS on this port? If not, use redis://"
LOST_TLS = (
    "closed or lost the connection ({cause}): is it running, and does it speak TLS on this port? If it wants a "
    "certificate of ours, add ?ssl_certfile=/path/to/our.pem to the URL, and ssl_keyfile likewise"
)
LOST = "closed or lost the connection ({cause}): is it running, and is the scheme right (rediss:// for TLS)?"


class translate:
    """`with translate(client): await client.get(…)`: exceptions of redis-py become ours. Costs under a microsecond.

    Without a client the texts say "the broker" without saying which.
    """

    __slots__ = ("_client",)

    def __init__(self, client: redis.asyncio.Redis | None = None) -> None:
        self._client = client

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, exceptions.RedisError) and not isinstance(error, exceptions.DataError):
            raise translated(error, self._client) from _bare(error)


async def answers_of(pipeline: Any) -> list[Any]:
    """Return the answers to a pipeline's commands, errors in their places and without their tracebacks.

    A traceback would hold the frame that holds all answers until Python collects such circles: megabytes at every
    survey, where somebody put large rows and a key of another type.
    """
    answers: list[Any] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            answer.__traceback__ = None
    return answers


def note_node(answer: Any, address: Address) -> None:
    """Have the text of an error name the node of a cluster that answered so; what is no error is left as it is."""
    if isinstance(answer, Exception):
        vars(answer)[NODE] = shown(address)


def broker_name(client: redis.asyncio.Redis) -> str:
    """Return where a client leads, as a URL without user, password or settings."""
    pool: Any = client.connection_pool
    return getattr(pool, "broker_name", None) or name_of(pool.connection_kwargs, is_tls=_is_tls(client))


def name_of(options: Mapping[str, Any], *, is_tls: bool) -> str:
    """Name the server that connections with these options lead to."""
    database = options.get("db") or 0
    if "path" in options:
        return f"unix://{options['path']}" + (f"?db={database}" if database else "")
    where = shown((options.get("host", "localhost"), options.get("port", 6379)))
    return f"{'rediss' if is_tls else 'redis'}://{where}/{database}"


def translated(error: exceptions.RedisError, client: redis.asyncio.Redis | None = None) -> FabricError:
    """Say a library's error in our words, for who only writes it down."""
    name = "" if client is None else broker_name(client)
    node = vars(error).get(NODE)
    reason, text, cause = _explain(error, is_tls=client is not None and _is_tls(client))
    kind = BrokerFull if reason == "full" else BrokerError
    if node:
        return kind(f"the broker at {node} {text.format(cause=cause)}", broker=node, reason=reason)
    if not name and (found := CONNECTING.search(str(error))) is not None and "{cause}" not in text:
        return kind(f"the broker at {found[1]} {text}", broker=found[1], reason=reason)
    return kind(f"the broker{' ' if name else ''}{name} {text.format(cause=cause)}", broker=name, reason=reason)


def _explain(error: exceptions.RedisError, *, is_tls: bool) -> tuple[str, str, str]:
    """Return the reason, a text with a place for {cause}, and the cause."""
    said = IN_PIPELINE.sub(r"\g<said>", str(error).strip()) or type(error).__name__
    for kind, reason, text in REPLIES:
        if isinstance(error, kind):
            return reason, text, said
    for below in (error, *_causes(error)):
        for kind, reason, text in CAUSES:
            if isinstance(below, kind):
                return reason, text, str(below)
    for beginning, reason, text in TEXTS:
        if beginning in said:
            return reason, text, said
    if isinstance(error, exceptions.TimeoutError) or "Timeout reading" in said:  # as one of these wraps the other
        return "timeout", TIMEOUT_TLS if is_tls else TIMEOUT, said
    if isinstance(error, exceptions.ConnectionError):
        return "lost", LOST_TLS if is_tls else LOST, said
    return "refused", "refused a command ({cause})", said


def _bare(error: BaseException) -> BaseException:
    """Strip the error and its causes of the library's sixty lines of frames, which add nothing to the text."""
    for each in (error, *_causes(error)):
        each.__traceback__ = None
    return error


def _causes(error: BaseException) -> Iterator[BaseException]:
    below = error.__cause__ or error.__context__
    while below is not None:
        yield below
        below = below.__cause__ or below.__context__


def _is_tls(client: redis.asyncio.Redis) -> bool:
    return issubclass(client.connection_pool.connection_class, redis.asyncio.SSLConnection)
