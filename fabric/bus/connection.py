"""The way to a broker: one client per process role, opened, checked, and patient with restarts.

- A broker is used only after `check_broker` found it fit: new enough, never evicting, writable, loaded.
- A lost connection is retried within a budget of seconds, not of attempts, so a restart of a few seconds goes
  unnoticed. *Every* command is retried, also one whose reply was lost: the scripts of this room are written to be
  repeated. A caller that must not repeat opens its own client with `patience_s=0`.
- Connections are bounded; a caller waits for a free one.
- Bytes in, bytes out (decode_responses is off), in the RESP2 shapes.
- Nothing here reads the environment, and no text holds a password.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

from ..errors import BrokerError, ConfigError
from .prompt import prompt
from .translate import broker_name, translate
from .url import mask_url, resolve_url

__all__ = [
    "open_broker",
    "check_broker",
    "BrokerFacts",
    "broker_facts",
    "problems",
    "translate",
    "broker_name",
    "resolve_url",
    "mask_url",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION_MIN = {"redis": (7, 0, 0), "valkey": (8, 0, 0)}
LOADING_POLL_S = 0.25
NEVER_PASSING = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.MaxConnectionsError)


@dataclass(frozen=True, kw_only=True)
class BrokerFacts:
    """What a broker says about itself."""

    server_kind: Literal["redis", "valkey"]
    version: tuple[int, int, int]
    maxmemory_bytes: int
    """0: no limit."""
    maxmemory_policy: str
    """Empty if the broker does not say."""
    is_aof_on: bool
    is_loading: bool
    is_replica: bool
    is_cluster: bool

    @property
    def version_text(self) -> str:
        """For people: "Valkey 9.1.2"."""
        return f"{self.server_kind.capitalize()} {'.'.join(map(str, self.version))}"


async def open_broker(
    url: str,
    *,
    client_name: str,
    max_connections: int = 32,
    socket_timeout_s: float = 15.0,
    patience_s: float = 10.0,
    open_patience_s: float = 2.0,
) -> redis.asyncio.Redis:
    """Connect, and prove it with one PING. Close the client with `await client.aclose()`.

    Args:
        url: redis://, rediss:// or unix://, with user, password and database as needed.
        client_name: shown by CLIENT LIST at the broker; no spaces.
        max_connections: bound of this client's pool, [1, …]; a caller waits up to 20 s for a free one.
        socket_timeout_s: longest silence within one command; a blocking command must block for less.
        patience_s: how long a command keeps trying while the broker is away.
        open_patience_s: the same for the PING here, shorter: a person may be waiting for the message.

    Raises:
        ConfigError: the URL is empty or malformed.
        BrokerError: not found, not reachable, refused us, or TLS failed; facts["reason"] says which.
    """
    assert client_name.isprintable()
    assert " " not in client_name
    checked = resolve_url(url)
    if checked is None:
        raise ConfigError("the broker URL is empty: give a redis://, rediss:// or unix:// URL")
    # Firewalls forget idle connections. TCP keepalive, not PING (health_check_interval): a loading broker refuses PING.
    keepalive = {} if checked.startswith("unix") else {"socket_keepalive": True}
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        checked,
        client_name=client_name,
        max_connections=max_connections,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=min(5.0, socket_timeout_s),
        protocol=2,  # RESP3 would add a handshake per connection and change no reply we read
        retry=PatientRetry(open_patience_s),
        **keepalive,
    )
    pool.connection_class = prompt(pool.connection_class)
    client = redis.asyncio.Redis.from_pool(pool)
    try:
        with translate(client), contextlib.suppress(exceptions.BusyLoadingError):  # check_broker waits for that
            await client.ping()
    except BaseException:
        await client.aclose()
        raise
    client.set_retry(PatientRetry(patience_s))
    return client


async def check_broker(client: redis.asyncio.Redis, *, loading_timeout_s: float = 60.0) -> BrokerFacts:
    """Ask a broker what it is, wait while it loads its data, and refuse one that cannot keep our promises.

    Raises:
        BrokerError: it is too old, may evict, is a replica, or still loads after `loading_timeout_s`; one text
            for all that is wrong, facts["problems"] as a list. Or the question itself was refused.
    """
    clock = asyncio.get_running_loop().time
    until_s = clock() + loading_timeout_s
    while True:
        with translate(client):
            facts = broker_facts(await client.info())
        if not facts.is_loading or clock() >= until_s:
            break
        await asyncio.sleep(LOADING_POLL_S)
    if wrong := problems(facts):
        name = broker_name(client)
        text = f"the broker {name} cannot be used: it {'; and it '.join(wrong)}"
        raise BrokerError(text, broker=name, reason="unfit", problems=wrong)
    if not facts.is_aof_on:
        log.warning("broker.not_durable", extra={"broker": broker_name(client), "next_step": "set appendonly yes"})
    return facts


def broker_facts(info: Mapping[str, Any]) -> BrokerFacts:
    """Read the reply of INFO, as the client library parses it."""
    kind: Literal["redis", "valkey"] = "valkey" if "valkey_version" in info else "redis"
    return BrokerFacts(
        server_kind=kind,
        version=_version(str(info.get(f"{kind}_version", ""))),
        maxmemory_bytes=int(info.get("maxmemory", 0)),
        maxmemory_policy=str(info.get("maxmemory_policy", "")),
        is_aof_on=bool(info.get("aof_enabled")),
        is_loading=bool(info.get("loading")),
        is_replica=info.get("role") == "slave",
        is_cluster=bool(info.get("cluster_enabled")),
    )


def problems(facts: BrokerFacts) -> list[str]:
    """Why this broker cannot be used, each with the next step; empty for a fit one."""
    found = []
    if facts.version < VERSION_MIN[facts.server_kind]:
        found.append(f"is {facts.version_text}, too old: use Redis >= 7.0 or Valkey >= 8")
    if facts.maxmemory_policy != "noeviction":
        found.append(
            f"may throw away data when memory is short (maxmemory-policy is {facts.maxmemory_policy or 'unknown'}): "
            "set maxmemory-policy noeviction there"
        )
    if facts.is_replica:
        found.append("is a read-only replica: give the URL of the primary")
    if facts.is_loading:
        found.append("is still loading its data from disk: wait, then try again")
    return found


class PatientRetry(Retry):
    """Retries for some seconds in all, however deep the client library nests its retries.

    Its own `Retry` counts attempts and nests them (commands over connects), so that ten attempts can mean a
    hundred; and it would try a wrong password as often as a lost connection.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__(ExponentialWithJitterBackoff(base=0.02, cap=0.5), retries=-1)
        self._patience_s = patience_s

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Call `do` until it succeeds, fails for good, or patience ends; `fail` is told of every failure."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._patience_s
        failure_count = 0
        while True:
            try:
                return await do()
            except self._supported_errors as error:
                if is_retryable and not is_retryable(error):
                    raise
                failure_count += 1
                await (fail(error, failure_count) if with_failure_count else fail(error))  # type: ignore[call-arg]
                left_s = until_s - clock()
                if left_s <= 0 or not _may_pass(error):
                    raise
                await asyncio.sleep(min(left_s, self._backoff.compute(failure_count)))


def _may_pass(error: BaseException) -> bool:
    """Whether trying the same again can help."""
    if isinstance(error, NEVER_PASSING):
        return False
    return not isinstance(error.__cause__ or error.__context__, ssl.SSLError)


def _version(text: str) -> tuple[int, int, int]:
    numbers = [int(part) if part.isdigit() else 0 for part in text.split(".")[:3]]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch
