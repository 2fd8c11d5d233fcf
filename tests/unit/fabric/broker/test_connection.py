"""Broker URLs, what a broker's facts mean for us, and how its refusals read. No server here."""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
import ssl
import time
from urllib.parse import quote

import pytest
import redis.asyncio
from redis import exceptions
from redis._parsers.helpers import parse_info

from rollfab.fabric.broker.clients.patience import PatientRetry, pause_s
from rollfab.fabric.broker.clients.translate import broker_name, translate
from rollfab.fabric.broker.clients.url import mask_url, read_url, resolve_url
from rollfab.fabric.broker.server_facts import broker_facts, problems
from rollfab.fabric.contract.errors import BrokerError, BrokerFull, ConfigError, FabricError, QueueFull
from tests.sim.virtual_loop import on_virtual_time

VALKEY_9 = "redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2\r\n"
FIT = "role:master\r\nloading:0\r\naof_enabled:1\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\ncluster_enabled:0\r\n"


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://:pw@127.0.0.1:6379/3",
        "redis://user:p%23w@[::1]:6379/0",
        "rediss://cache.example.com:6380?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=no",
        "unix:///tmp/broker.sock",
        "unix:///tmp/broker.sock?db=2&password=pw",
        "redis+cluster://:pw@a:7000,b:7001,[::1]:7002",
        "rediss+cluster://a?ssl_ca_certs=/etc/ca.pem",
        "redis+sentinel://user:pw@a,b:26380/main/2?sentinel_password=x",
        "redis://host?durability=disk",
    ],
)
def test_a_good_url_is_returned_as_it_is(url: str) -> None:
    assert resolve_url(f" {url}\n") == url


@pytest.mark.parametrize("url", [None, "", "  "])
def test_no_url_means_a_private_broker(url: str | None) -> None:
    assert resolve_url(url) is None


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("localhost:6379", "scheme"),
        ("http://localhost:6379", "scheme"),
        ("redis+other://localhost", "scheme"),
        ("redis+sentinel://localhost", "no service"),
        ("redis+sentinel://localhost/", "no service"),
        ("redis+sentinel://a,b:port/main", "cannot be read"),
        ("redis+sentinel://a,,b/main", "a host is missing"),
        ("redis+cluster://a:1,b:2,", "a host is missing"),
        ("redis+cluster://a:1,redis://b:2", "a scheme twice"),
        ("redis+sentinel://a/main/zero", "database"),
        ("redis://a,b", "several hosts"),
        ("redis://a:1,b:2", "several hosts"),
        ("rediss://u:pw@a:1,b:2/0", "several hosts"),
        ("redis://a:1,redis://b:2", "several hosts"),
        ("redis://u:p,w/x@a", "cannot be read"),
        ("redis+cluster://a:1,b:99999", "cannot be read"),
        ("redis://host?sentinel_password=x", "unknown setting"),
        ("redis+cluster://host?reward_queue=redis%2Bcluster://other", "no cluster"),
        ("redis+cluster://host?reward_queue=http://other", "no cluster"),
        ("redis://host?durability=paper", "memory, disk, replica"),
        ("redis:///0", "no host"),
        ("redis://host:99999", "cannot be read"),
        ("redis://host:port", "cannot be read"),
        ("redis://[::1", "cannot be read"),
        ("redis://host/zero", "database"),
        ("redis://host/-1", "database"),
        ("redis://host?db=x", "database"),
        ("redis://host?retries=3", "unknown setting 'retries'"),
        ("redis://host?ssl_ca_certs=/ca.pem", "unknown setting"),
        ("redis://host#frag", "'#'"),
        ("unix://", "no socket path"),
        ("unix://relative.sock", "no socket path"),
    ],
)
def test_a_bad_url_says_why_and_how_to_write_one(url: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_url(url)
    assert cause in str(caught.value)
    assert "redis://[user:password@]host" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://alice:hunter2@host", "rediss://alice:***@host"),
        ("redis://hunter2@host", "redis://***@host"),
        ("unix:///tmp/b.sock?db=1&password=hunter2", "unix:///tmp/b.sock?***"),
        ("redis://:hunt@er2@host", "redis://:***@host"),
        ("redis://:hunter2", "redis://***"),
        ("redis://:hunt#er2@host", "redis://***"),
        ("redis://:hunt/er2@host", "redis://***"),
        ("redis://:hunt?er2@host", "redis://***"),
        (
            "redis+sentinel://u:hunter2@a:1,b:2/main?sentinel_password=hunter2",
            "redis+sentinel://u:***@a:1,b:2/main?***",
        ),
        ("redis+cluster://:hunter2@a:1,b:two", "redis+cluster://***"),
        ("hunter2", "***"),
        ("redis:hunter2@host", "***"),
    ],
)
def test_no_shown_url_holds_a_secret(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@pytest.mark.parametrize(
    "url", ["redis://:hunt#er2@host", "redis://:hunter2@host:hunter2", "redis://u:hunt/er2@host/x"]
)
def test_not_even_the_cause_of_a_malformed_url_holds_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_url(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunt" not in str(error)
        error = error.__cause__ or error.__context__


def test_a_url_is_taken_apart() -> None:
    led = read_url(
        "rediss+sentinel://u:p%2Cw@a,[::1]:1/main/2?sentinel_password=x&ssl_ca_certs=/ca.pem&durability=disk"
    )
    assert (led.topology, led.hosts, led.service) == ("sentinel", (("a", 26379), ("::1", 1)), "main")
    assert (led.sentinel_username, led.sentinel_password, led.durability) == (None, "x", "disk")
    assert led.client_url == "rediss://u:p%2Cw@a:26379/2?ssl_ca_certs=%2Fca.pem"

    cluster = read_url("redis+cluster://:pw@a:7000,b")
    assert (cluster.topology, cluster.hosts) == ("cluster", (("a", 7000), ("b", 6379)))
    assert cluster.client_url == "redis://:pw@a:7000/"

    queue = "redis://:p%40w@other:1/2"
    assert read_url(f"redis+cluster://u:p@a?reward_queue={quote(queue, safe='')}").reward_queue == queue

    assert read_url("redis://host/3?durability=replica").client_url == "redis://host:6379/3"
    assert read_url("unix:///tmp/b.sock?db=1&durability=disk").client_url == "unix:///tmp/b.sock?db=1"
    assert read_url("unix:///tmp/b.sock").hosts == ()


def test_a_fit_valkey_is_known_by_its_own_version_not_by_the_redis_version_it_imitates() -> None:
    facts = broker_facts(parse_info(VALKEY_9 + FIT))
    assert (facts.server_kind, facts.version, facts.version_text) == ("valkey", (9, 1, 2), "Valkey 9.1.2")
    assert facts.is_aof_on
    assert problems(facts) == []


@pytest.mark.parametrize(
    ("version", "is_fit"),
    [
        ("redis_version:7.0.0", True),
        ("redis_version:8.2.3", True),
        ("redis_version:7.0.15", True),
        ("redis_version:6.2.14", False),
        ("redis_version:255.255.255", True),  # built from a development branch
        ("redis_version:7.2.4\r\nvalkey_version:8.0.1", True),
        ("redis_version:7.2.4\r\nvalkey_version:7.2.8", False),
        ("redis_version:unknown", False),
    ],
)
def test_an_old_broker_is_refused(version: str, *, is_fit: bool) -> None:
    found = problems(broker_facts(parse_info(f"{version}\r\n{FIT}")))
    assert bool(found) is not is_fit
    assert is_fit or "use Redis >= 7.0 or Valkey >= 8" in found[0]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", ""])
def test_a_broker_that_may_evict_is_refused(policy: str) -> None:
    info = parse_info((VALKEY_9 + FIT).replace("noeviction", policy))
    found = problems(broker_facts(info))
    assert len(found) == 1
    assert (policy or "unknown") in found[0]
    assert "set maxmemory-policy noeviction" in found[0]


def test_everything_wrong_is_said_at_once() -> None:
    info = "redis_version:6.0.0\r\nrole:slave\r\nloading:1\r\nmaxmemory_policy:allkeys-lru\r\n"
    assert len(problems(broker_facts(parse_info(info)))) == 4


def client() -> redis.asyncio.Redis:
    return redis.asyncio.Redis(host="broker.example", port=7000, password="hunter2", db=3)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("raised", "kind", "reason", "word"),
    [
        (exceptions.OutOfMemoryError("command not allowed"), BrokerFull, "full", "raise maxmemory"),
        (exceptions.AuthenticationError("invalid password"), BrokerError, "auth", "password in the URL"),
        (exceptions.NoPermissionError("no 'info'"), BrokerError, "permission", "rollfab acl"),
        (exceptions.BusyLoadingError("loading"), BrokerError, "loading", "wait"),
        (exceptions.ReadOnlyError("replica"), BrokerError, "replica", "primary"),
        (exceptions.MovedError("3999 127.0.0.1:6381"), BrokerError, "cluster", "Cluster"),
        (exceptions.MaxConnectionsError("too many"), BrokerError, "busy", "max_connections"),
        (exceptions.ConnectionError("No connection available."), BrokerError, "busy", "max_connections"),
        (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), BrokerError, "disk", "free disk space"),
        (exceptions.ResponseError("DB index is out of range"), BrokerError, "database", "/0"),
        (exceptions.TimeoutError("Timeout reading"), BrokerError, "timeout", "firewall"),
        (exceptions.ConnectionError("Connection closed by server."), BrokerError, "lost", "is it running"),
        (exceptions.ResponseError("wrong number of arguments"), BrokerError, "refused", "wrong number"),
        (
            caused(exceptions.ConnectionError("Error -2"), socket.gaierror(-2, "Name or service not known")),
            BrokerError,
            "resolve",
            "does not resolve",
        ),
        (
            caused(exceptions.ConnectionError("x"), ssl.SSLCertVerificationError("self-signed certificate")),
            BrokerError,
            "tls",
            "ssl_ca_certs",
        ),
        (caused(exceptions.ConnectionError("x"), ssl.SSLError("WRONG_VERSION")), BrokerError, "tls", "use redis://"),
        (
            caused(exceptions.ConnectionError("x"), ConnectionRefusedError(111, "no")),
            BrokerError,
            "unreachable",
            "start",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_is_ours_with_name_cause_and_next_step(
    raised: Exception, kind: type[FabricError], reason: str, word: str
) -> None:
    with pytest.raises(FabricError) as caught, translate(client()):
        raise raised
    error = caught.value
    assert type(error) is kind
    assert error.__cause__ is raised
    assert error.facts["reason"] == reason
    assert error.message.startswith("the broker redis://broker.example:7000/3 ")
    assert word in error.message
    assert "hunter2" not in error.message
    assert pickle.loads(pickle.dumps(error)).facts == error.facts


@pytest.mark.parametrize("said", ["MISCONF Errors writing to the AOF file: No space left on device", 'it\'s "so"'])
def test_an_answer_within_a_pipeline_is_told_without_its_command(said: str) -> None:
    refused = exceptions.ResponseError(said)
    words = ("HSET", "rf:{r}:tasks", "BUSY ) of pipeline caused error: ('a task of hunter2',)")
    redis.asyncio.client.Pipeline.annotate_exception(None, refused, 1, words)  # type: ignore[arg-type]
    with pytest.raises(BrokerError) as caught, translate(client()):
        raise refused
    assert f"({said})" in caught.value.message.replace("\\'", "'")
    assert "hunter2" not in caught.value.message and "HSET" not in caught.value.message
    assert caught.value.facts["reason"] == ("disk" if "MISCONF" in said else "refused")


@pytest.mark.parametrize(
    "error", [QueueFull("full"), ValueError("x"), exceptions.DataError("a bug"), asyncio.CancelledError()]
)
def test_errors_that_are_not_the_brokers_pass_untouched(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, translate():
        raise error
    assert caught.value is error


def test_a_client_is_named_without_its_secrets() -> None:
    tls = redis.asyncio.Redis.from_url("rediss://u:hunter2@h:1/2")
    unix = redis.asyncio.Redis.from_url("unix:///tmp/b.sock?password=hunter2")
    assert broker_name(tls) == "rediss://h:1/2"
    assert broker_name(unix) == "unix:///tmp/b.sock"


async def test_patience_is_seconds_in_all_also_when_retries_nest() -> None:
    # Given an inner and an outer retry of the same patience, and a broker that stays away
    inner, outer = PatientRetry(0.2), PatientRetry(0.2)
    call_count = 0

    async def do() -> None:
        nonlocal call_count
        call_count += 1
        raise exceptions.ConnectionError("gone")

    async def fail(error: Exception) -> None:
        return None

    # When both run out
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(exceptions.ConnectionError):
        await outer.call_with_retry(lambda: inner.call_with_retry(do, fail), fail)

    # Then the time was not multiplied by the nesting
    assert call_count > 2
    assert asyncio.get_running_loop().time() - started_s < 0.6


async def test_a_loop_that_stood_still_does_not_take_the_broker_for_silent() -> None:
    # Given a wait of half a second, in the middle of which this process is stopped for longer than patience lasts
    loop = asyncio.get_running_loop()
    answers = iter((None, b"answer"))

    async def do() -> bytes:
        answer = next(answers)
        try:
            async with asyncio.timeout(0.5):
                return answer or await loop.create_future()
        except TimeoutError as error:
            raise exceptions.TimeoutError("Timeout reading") from error

    async def fail(error: Exception) -> None:
        return None

    loop.call_later(0.1, time.sleep, 1.5)
    # Then it asks again; a broker that is silent for all of this is told as ever
    assert await PatientRetry(0.3).call_with_retry(do, fail) == b"answer"
    answers = iter((None, b"answer"))
    with pytest.raises(exceptions.TimeoutError):
        await PatientRetry(0.3).call_with_retry(do, fail)


def test_who_waits_leaves_the_random_state_of_a_trainer_as_it_was() -> None:
    before = random.getstate()
    pauses_s = [pause_s(failure_count) for failure_count in (*range(1, 100), 10_000)]
    assert random.getstate() == before
    assert all(0.02 <= each_s <= 0.5 for each_s in pauses_s)
    assert len(set(pauses_s)) > 50


@pytest.mark.parametrize(
    "error",
    [exceptions.AuthenticationError("wrong"), caused(exceptions.ConnectionError("x"), ssl.SSLError("x"))],
)
async def test_what_cannot_pass_is_not_tried_twice(error: Exception) -> None:
    call_count = 0

    async def do() -> None:
        nonlocal call_count
        call_count += 1
        raise error

    async def fail(_: Exception) -> None:
        return None

    with pytest.raises(type(error)):
        await PatientRetry(5.0).call_with_retry(do, fail)
    assert call_count == 1


def test_who_waits_for_a_broker_is_told_so_once_after_5_s(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async def refuse() -> None:
            raise exceptions.ConnectionError("Error 111 connecting to localhost:1")

        async def again(error: Exception) -> None:
            return None

        retry = PatientRetry(10.0)
        for _ in range(2):  # two calls at once wait for the same broker
            calls = [retry.call_with_retry(refuse, again) for _ in range(2)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(each, exceptions.ConnectionError) for each in outcomes)

    with caplog.at_level("WARNING"):
        on_virtual_time(work())
    told = [row.getMessage() for row in caplog.records]
    assert len(told) == 2, "once for each time of waiting"
    assert told[0].startswith("the broker has not answered for 5 s (Error 111 connecting to localhost:1): trying for")
