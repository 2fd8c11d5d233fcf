"""TLS to the broker and to the api, with real certificates and real handshakes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from rollfab.api.access.config import ApiConfig
from rollfab.api.server import serve
from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.errors import BrokerError, ConfigError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.versions.reader import fetch_weights
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rewards.jobs import enqueue, open_queue
from tests.standin.fabric import StandInFabric
from tests.support.brokers.certificates import Certificate, make_certificate
from tests.support.brokers.redis_server import RedisServer, redis_server
from tests.support.brokers.tcp_relay import Relay

pytestmark = [pytest.mark.redis, pytest.mark.timeout(30)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    lines = ("appendonly yes", "maxmemory-policy noeviction", "requirepass secret-of-the-broker")
    with redis_server(tmp_path_factory.mktemp("broker"), *lines) as server:
        yield server


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def certificate(directory: Path) -> Certificate:
    return make_certificate(directory, "localhost")


def url(port: int, authority: Path | None, scheme: str = "rediss") -> str:
    settings = f"?ssl_ca_certs={authority}" if authority else ""
    return f"{scheme}://:secret-of-the-broker@localhost:{port}/0{settings}"


async def refused(target: str) -> BrokerError:
    with pytest.raises(BrokerError) as caught:
        await open_broker(target, client_name="test", open_patience_s=0.0, socket_timeout_s=2.0)
    assert "secret" not in str(caught.value)
    return caught.value


# ---- the broker


async def test_work_and_weights_pass_through_tls(server: RedisServer, certificate: Certificate) -> None:
    async with Relay(server.port, tls=certificate.context()) as relay:
        where = url(relay.port, certificate.authority)
        async with await RedisFabric.open(where, client_name="test") as fabric:
            await fabric.board.create_run(RunConfig(run_id="r1", model="tiny", environment="e"))
            weights = {"w": np.arange(1 << 18, dtype=np.float32)}
            await Publisher(fabric.weights, "r1").publish(weights, 0)
            assert ((await fetch_weights(fabric.weights, "r1"))["w"] == weights["w"]).all()


async def test_reward_jobs_pass_through_tls(server: RedisServer, certificate: Certificate) -> None:
    async with Relay(server.port, tls=certificate.context()) as relay:
        queue = open_queue(url(relay.port, certificate.authority))
        await asyncio.to_thread(enqueue, queue, "score", "r1", [])
        assert await asyncio.to_thread(lambda: queue.count) == 1
        await asyncio.to_thread(queue.connection.close)


async def test_a_certificate_of_an_unknown_authority_is_not_trusted(
    server: RedisServer, certificate: Certificate, directory: Path
) -> None:
    other = make_certificate(directory, "localhost", authority="another-ca")
    async with Relay(server.port, tls=other.context()) as relay:
        for authority in (None, certificate.authority):
            error = await refused(url(relay.port, authority))
            assert error.facts["reason"] == "tls"
            assert "add ?ssl_ca_certs=/path/to/ca.pem to the URL" in str(error)


async def test_a_certificate_for_another_name_is_not_trusted(
    server: RedisServer, certificate: Certificate, directory: Path
) -> None:
    other = make_certificate(directory, "elsewhere.example")
    async with Relay(server.port, tls=other.context()) as relay:
        error = await refused(url(relay.port, other.authority))
    assert error.facts["reason"] == "tls"
    assert "use the host name the certificate was made for" in str(error)


async def test_speaking_plain_to_a_tls_port_says_which_scheme_it_takes(
    server: RedisServer, certificate: Certificate
) -> None:
    async with Relay(server.port, tls=certificate.context()) as relay:
        error = await refused(url(relay.port, None, scheme="redis"))
    assert error.facts["reason"] == "tls"
    assert "speaks TLS on this port: write rediss:// instead of redis://" in str(error)


async def test_speaking_tls_to_a_plain_port_says_which_scheme_it_takes(server: RedisServer) -> None:
    error = await refused(url(server.port, None))
    assert error.facts["reason"] == "tls"
    assert "does not speak TLS on this port: write redis:// instead of rediss://" in str(error)


async def test_a_file_of_authorities_that_is_not_there_is_named_as_such(server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "none.pem"
    with pytest.raises(ConfigError, match=f"its ssl_ca_certs {path} cannot be read: No such file"):
        await open_broker(url(server.port, path), client_name="test", open_patience_s=0.0)


async def test_files_of_tls_that_do_not_belong_together_are_named(
    server: RedisServer, certificate: Certificate, directory: Path
) -> None:
    other = make_certificate(directory, "localhost", authority="a-third-ca")
    wrong = {
        f"ssl_certfile={certificate.pem}&ssl_keyfile={other.key}": "ssl_keyfile .* is not the key of the certificate",
        f"ssl_ca_certs={other.key}": "ssl_ca_certs .* is no certificate of an authority",
        f"ssl_certfile={certificate.pem}&ssl_keyfile={directory}": "ssl_keyfile .* cannot be read: Is a directory",
        "ssl_cert_reqs=nonne": "its ssl_cert_reqs must be one of required, optional, none",
    }
    for settings, text in wrong.items():
        with pytest.raises(ConfigError, match=text):
            await open_broker(f"rediss://localhost:{server.port}/0?{settings}", client_name="test")


async def test_a_broker_that_wants_a_certificate_of_ours_is_told_of_and_takes_one(
    server: RedisServer, certificate: Certificate
) -> None:
    context = certificate.context()
    context.load_verify_locations(certificate.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    async with Relay(server.port, tls=context) as relay:
        where = url(relay.port, certificate.authority)
        assert "If it wants a certificate of ours" in str(await refused(where))
        ours = f"{where}&ssl_certfile={certificate.pem}&ssl_keyfile={certificate.key}"
        async with await RedisFabric.open(ours, client_name="test") as fabric:
            assert isinstance(await fabric.board.runs(), dict)


# ---- the api


async def test_the_api_speaks_tls(certificate: Certificate) -> None:
    config = ApiConfig(
        host="localhost",
        port=0,
        control_keys=("a-key-that-may-do-everything",),
        tls_certificate=str(certificate.pem),
        tls_key=str(certificate.key),
    )
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(StandInFabric(), config, stop, on_ready=ready.set_result))
    try:
        page = await asyncio.wait_for(ready, 10)
        assert page.startswith("https://localhost:")
        trusting = ssl.create_default_context(cafile=certificate.authority)
        async with httpx.AsyncClient(verify=trusting, base_url=page) as http:
            headers = {"authorization": "Bearer a-key-that-may-do-everything"}
            assert (await http.get("v1/status", headers=headers)).status_code == 200
        async with httpx.AsyncClient(base_url=page) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("healthz")
        async with httpx.AsyncClient(base_url=page.replace("https", "http")) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("healthz")
    finally:
        stop.set()
        await serving


@pytest.mark.parametrize("case", ["missing", "foreign key", "not PEM"])
async def test_a_certificate_that_cannot_be_used_is_said_before_anything_listens(
    certificate: Certificate, directory: Path, tmp_path: Path, case: str
) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate\n")
    other = make_certificate(directory, "elsewhere.example")
    pem, key = {
        "missing": (tmp_path / "none.pem", certificate.key),
        "foreign key": (certificate.pem, other.key),
        "not PEM": (text, certificate.key),
    }[case]
    config = ApiConfig(port=0, tls_certificate=str(pem), tls_key=str(key))
    with pytest.raises(ConfigError, match=r"the api's TLS certificate .* cannot be used"):
        await serve(StandInFabric(), config, asyncio.Event())


def test_a_tls_key_without_a_certificate_is_refused() -> None:
    from rollfab.api.access.config import check_config

    with pytest.raises(ConfigError, match="give both"):
        check_config(ApiConfig(tls_key="x.pem"))


async def test_keys_that_would_travel_plain_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = ApiConfig(host="0.0.0.0", port=0, read_keys=("a-key-that-may-read-only",))
    serving = asyncio.create_task(serve(StandInFabric(), config, stop, on_ready=ready.set_result))
    await asyncio.wait_for(ready, 10)
    stop.set()
    await serving
    assert "api.keys_travel_plain" in caplog.messages
