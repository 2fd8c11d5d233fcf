"""Settings of the api, and what makes them safe: who may read, who may control, and from where.

- Without keys there is no login, and then the api listens on loopback alone.
- A control key may also read; a read key may not control.
- Keys are held as hashes (keys.py), also when they were given plain.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import ClassVar

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.limits import HTTP_BODY_BYTES_MAX, MIB
from .keys import hash_key


@dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Where a server of this room listens, and what bounds its connections."""

    NAME: ClassVar[str]
    """What listens, as refusals name it."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """TCP port, [0, 65535]; 0 picks a free one."""
    tls_certificate: str | None = None
    """PEM file with the certificate and those above it; with it the server speaks https alone."""
    tls_key: str | None = None
    """PEM file with its private key, where the certificate's file does not hold it."""
    connection_count_max: int = 512
    """Connections open at once, [1, 100000]; above it those that have sent no whole request make room."""
    arriving_bytes_max: int = 256 * MIB
    """Bytes of bodies that are not whole yet, of all requests together, [8 MiB, 1 TiB]; what goes beyond is refused."""
    request_timeout_s: float = 30.0
    """Seconds in which a request must arrive whole, head and body, [0.1, 3600]."""
    silence_timeout_s: float = 10.0
    """Seconds in which nothing of a request that is not whole arrives, [0.1, 3600]; then it is refused."""
    write_timeout_s: float = 20.0
    """Seconds without reading after which a client is dropped, [0.1, 3600]."""

    @property
    def has_keys(self) -> bool:
        """True if a login is needed."""
        return True


@dataclass(frozen=True, kw_only=True)
class ApiConfig(ListenConfig):
    """Settings of one api process. A host other than loopback needs keys.

    Raises:
        ConfigError: a key can be guessed.
    """

    NAME = "api"

    port: int = 8420
    """TCP port, [0, 65535]; 0 picks a free one."""
    read_keys: tuple[str, ...] = field(default=(), repr=False)
    """Bearer keys that may read: given plain or as sha256:<hex>, held as the latter."""
    control_keys: tuple[str, ...] = field(default=(), repr=False)
    """Bearer keys that may read and control, likewise."""
    key_names: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Hashed keys and whose they are, for the record of who switched what."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that this machine has for itself, by which the api is reached without keys; never by a proxy."""
    cache_s: float = 0.25
    """Seconds that one reading of the broker is shared by all who ask, [0, 5]."""
    broker_timeout_s: float = 3.0
    """Seconds until a silent broker is reported as such, [0.1, 60]."""
    keep_alive_s: float = 15.0
    """Seconds of silence after which an event stream sends a comment, [0.1, 300]."""
    event_reader_count_max: int = 100
    """Event streams open at once; one more is refused."""

    def __post_init__(self) -> None:
        """Hash the keys that were given plain."""
        object.__setattr__(self, "read_keys", tuple(hash_key(key) for key in self.read_keys))
        object.__setattr__(self, "control_keys", tuple(hash_key(key) for key in self.control_keys))

    @property
    def has_keys(self) -> bool:
        """True if a login is needed."""
        return bool(self.read_keys or self.control_keys)


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    """Return the address at which a browser on this machine finds the page."""
    scheme = "https" if is_tls else "http"
    name = {"": "localhost", "0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"{scheme}://[{name}]:{port}/" if ":" in name else f"{scheme}://{name}:{port}/"


def check_listening(config: ListenConfig) -> None:
    """Refuse settings with which no server can listen.

    Raises:
        ConfigError: names the setting and what to do.
    """
    if not 0 <= config.port <= 65535:
        raise ConfigError(
            f"{config.NAME} port {config.port} does not exist: use 1 to 65535, or 0 for a free one", port=config.port
        )
    for name, least, most in (
        ("connection_count_max", 1, 100_000),
        ("arriving_bytes_max", HTTP_BODY_BYTES_MAX, 1 << 40),
        ("request_timeout_s", 0.1, 3600),
        ("silence_timeout_s", 0.1, 3600),
        ("write_timeout_s", 0.1, 3600),
    ):
        value = getattr(config, name)
        if not least <= value <= most:
            raise ConfigError(f"the {config.NAME}'s {name} is {value!r}, expected {least} to {most}", name=name)
    if config.tls_key and not config.tls_certificate:
        raise ConfigError(f"the {config.NAME} has a TLS key without a certificate: give both")


def check_tls(config: ListenConfig) -> None:
    """Refuse a certificate that cannot be used.

    Raises:
        ConfigError: as `tls_refused` says.
    """
    if config.tls_certificate:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_certificate, config.tls_key)
        except OSError as error:
            raise tls_refused(config, error) from error


def tls_refused(config: ListenConfig, error: OSError) -> ConfigError:
    """Say of a certificate that it cannot be used, and why; ssl.SSLError is an OSError."""
    return ConfigError(
        f"the {config.NAME}'s TLS certificate {config.tls_certificate} and its key "
        f"{config.tls_key or '(in the same file)'} cannot be used: {error.strerror or error}; they must be PEM "
        "files that belong together",
        certificate=config.tls_certificate,
    )


def check_config(config: ApiConfig) -> ApiConfig:
    """Refuse settings that are impossible or unsafe.

    Raises:
        ConfigError: names the setting and what to do.
    """
    check_listening(config)
    if not config.has_keys and not is_loopback(config.host):
        raise ConfigError(
            f"the api would listen on {config.host or 'every address'} for anyone to read and control: "
            "give it keys (`rollfab api keys new NAME` makes one), or the host 127.0.0.1",
            host=config.host,
        )
    return config


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach `host`.

    Names other than localhost are not looked up: they may change.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
