"""Runs the api as a server: binds, serves until told to stop, prints nothing.

- Signals are the caller's: the server ends when `stop` is set.
- A port that is taken is a ConfigError, found before anything else is started.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import APIRouter, FastAPI

from ..fabric.contract.errors import ConfigError
from ..fabric.host.helpers import Helpers
from .access.config import ApiConfig, ListenConfig, check_listening, is_loopback, tls_refused, url_of
from .access.connections import bounded_protocol
from .app import make_app
from .reading.status import Ports

log = logging.getLogger(__name__)

GRACE_S = 2  # for requests under way; event streams are ended first
BACKLOG = 128


async def serve(
    ports: Ports,
    config: ApiConfig,
    stop: asyncio.Event,
    *,
    training: APIRouter | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until `stop`.

    Args:
        ports: an open connection; see `make_app`.
        config: where to listen, and who may come in.
        training: the routes for trainers, where it serves any.
        stop: set it to end the server.
        on_ready: told the page's address once the server answers; with port 0 the one that was found free.

    Raises:
        ConfigError: the settings are not safe, the certificate cannot be used, or the address is taken or not ours.
    """
    app = make_app(ports, config, training=training)
    await run(app, config, stop, on_ready=on_ready, on_stop=app.state.context.tail.close)


async def run(
    app: FastAPI,
    config: ListenConfig,
    stop: asyncio.Event,
    *,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Serve an application until `stop`. on_stop: ends answers that would never end by themselves.

    Raises:
        ConfigError: the certificate cannot be used, or the address is taken or not ours.
    """
    with open_socket(config) as listening:
        url = url_of(config.host, listening.getsockname()[1], is_tls=config.tls_certificate is not None)
        settings = uvicorn.Config(
            app,
            http=bounded_protocol(config),
            ws="none",
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who sends such a header chooses the address that is counted or recorded
            timeout_graceful_shutdown=GRACE_S,
            lifespan="on",
        )
        _load_tls(settings, config)
        server = _Server(settings, on_started=lambda: on_ready(url) if on_ready else None)
        async with Helpers(_stop_when(stop, server, on_stop)):
            await server.serve(sockets=[listening])
    log.info("api.stopped", extra={"url": url})


def open_socket(config: ListenConfig) -> socket.socket:
    """Bind the address, or say why it cannot be bound.

    Raises:
        ConfigError: names the address and the cause.
    """
    check_listening(config)
    try:
        found = socket.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"the {config.NAME} cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose "
            "another port, or 0 for a free one",
            host=config.host,
            port=config.port,
        ) from error
    listening.setblocking(False)
    return listening


def _load_tls(settings: uvicorn.Config, config: ListenConfig) -> None:
    """Read the certificate now, so that a wrong one is said clearly, and warn of keys that would travel plain."""
    try:
        settings.load()
    except OSError as error:
        raise tls_refused(config, error) from error
    if config.has_keys and not settings.is_ssl and not is_loopback(config.host):
        log.warning("api.keys_travel_plain", extra={"host": config.host, "next_step": "give --tls-cert and --tls-key"})


async def _stop_when(stop: asyncio.Event, server: uvicorn.Server, on_stop: Callable[[], None] | None) -> None:
    await stop.wait()
    if on_stop is not None:
        on_stop()
    server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals alone and says when it has started."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()
