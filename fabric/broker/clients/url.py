"""Broker URLs: the forms we accept, the parts of a URL, and how to show one without its secrets.

- One broker: redis://, rediss://, unix://. Any node of a Redis Cluster may be given like that: it is recognised.
- Several nodes of a Redis Cluster, so that one of them may be down: redis+cluster://host:port,host:port.
- A primary that Sentinel watches: redis+sentinel://host:port,host:port/service, the hosts being sentinels.
- A URL is checked in full before anything connects: the client library would ignore a database name it cannot
  read and pass unknown settings on to where they fail obscurely.
- No text made here holds a password, not even a piece of a malformed URL, and no exception's cause does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from ...contract.errors import ConfigError

Address = tuple[str, int]
Durability = Literal["memory", "disk", "replica"]

SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
FORM = (
    "write redis://[user:password@]host[:port][/database], rediss://… for TLS, unix:///path/to/broker.sock, "
    "redis+cluster://host:port[,host:port…] or redis+sentinel://host:port[,host:port…]/service"
)
UNREADABLE = (
    "it cannot be read (a special character in the password? percent-encode it; a port is a number of at most 65535)"
)
SETTINGS = frozenset(
    {
        "db",
        "durability",
        "max_connections",
        "password",
        "reward_queue",
        "socket_connect_timeout",
        "socket_timeout",
        "username",
    }
)
SEVERAL = "it names several hosts: nodes of a cluster are given as redis+cluster://host:port,host:port"
CERT_REQS = ("required", "optional", "none")
SETTINGS_TLS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
    }
)
SETTINGS_SENTINEL = frozenset({"sentinel_username", "sentinel_password"})
OURS = SETTINGS_SENTINEL | {"durability", "reward_queue"}  # settings that the client library must not see
PORTS = {"sentinel": 26379}


@dataclass(frozen=True, kw_only=True)
class BrokerUrl:
    """The parts of a URL."""

    topology: Literal["any", "cluster", "sentinel"]
    """any: one broker, or a node of a cluster, which is found out on connecting."""
    client_url: str = field(repr=False)
    """For the client library: the first host, with credentials, database and its own settings."""
    hosts: tuple[Address, ...]
    """The nodes, or the sentinels; empty for a unix socket."""
    service: str = ""
    """The sentinels' name for the primary."""
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    durability: Durability = "memory"
    """How safe a push must be before it counts (queue/scripts.py)."""
    reward_queue: str | None = field(default=None, repr=False)
    """The broker of the reward queue, where it differs: rq cannot use a Redis Cluster."""


def resolve_url(url: str | None) -> str | None:
    """Return a usable broker URL, or None where none was given (then a private broker is wanted).

    Reads nothing but its argument: callers pass in what their user or environment said.

    Raises:
        ConfigError: malformed, of another scheme, or with a setting we do not know.
    """
    if url is None:
        return None
    if not isinstance(url, str):
        raise ConfigError(f"the broker's URL is {type(url).__name__}, expected a text: {FORM}", setting="url")
    if not (url := url.strip()):
        return None
    parts = _split(url)
    fault = _unreadable(url) if parts is None else _fault(parts)
    if fault:
        raise ConfigError(f"the broker URL {mask_url(url)} is not usable: {fault}; {FORM}", url=mask_url(url))
    return url


def read_url(url: str | None) -> BrokerUrl:
    """Take a URL apart.

    Raises:
        ConfigError: as `resolve_url`, and where none was given.
    """
    checked = resolve_url(url)
    parts = None if checked is None else _split(checked)
    if parts is None:
        raise ConfigError(f"the broker URL is empty: {FORM}")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    scheme, _, topology = parts.scheme.partition("+")
    user, at, _ = parts.netloc.rpartition("@")
    hosts = _hosts(parts)
    path, service = parts.path, ""
    if topology == "sentinel":
        service, _, path = path.strip("/").partition("/")
    theirs = urlencode({name: value for name, value in settings.items() if name not in OURS})
    place = f"{shown(hosts[0])}/{path.strip('/')}" if hosts else path
    return BrokerUrl(
        topology=topology or "any",  # type: ignore[arg-type]  # the scheme was checked
        client_url=f"{scheme}://{user}{at}{place}" + (f"?{theirs}" if theirs else ""),
        hosts=hosts,
        service=unquote(service),
        sentinel_username=settings.get("sentinel_username"),
        sentinel_password=settings.get("sentinel_password"),
        durability=settings.get("durability", "memory"),  # type: ignore[arg-type]  # checked as well
        reward_queue=settings.get("reward_queue"),
    )


def user_of(url: str) -> str:
    """Return the name of the broker's user in a URL; "" where it names none.

    Raises:
        ConfigError: as `read_url`.
    """
    parts = urlsplit(read_url(url).client_url)
    name, colon, _ = parts.netloc.rpartition("@")[0].partition(":")
    return dict(parse_qsl(parts.query)).get("username") or (unquote(name) if colon else "")


def is_local(url: str) -> bool:
    """Tell whether the broker would be on this machine: a unix socket, or a loopback address alone."""
    hosts = read_url(url).hosts
    return all(host in ("localhost", "::1") or host.startswith("127.") for host, _ in hosts)


def mask_url(url: str) -> str:
    """Show where a URL leads, with *** for passwords and settings; only its scheme if it is malformed."""
    scheme, found, _ = url.partition("://")
    parts = _split(url)
    if parts is None or parts.fragment or not found:
        return f"{scheme}://***" if found and scheme in SCHEMES else "***"
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    who = f"{name}:***@" if colon else f"***{at}" if at else ""  # a lone name is often a misplaced password
    return f"{parts.scheme}://{who}{host}{parts.path}" + ("?***" if parts.query else "")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = _hosts(parts)  # read for its ValueError
    except ValueError:
        return None
    return None if "@" in parts.path + parts.query and not parts.netloc.count("@") else parts


def _unreadable(url: str) -> str:
    """Say why a URL cannot be taken apart: of several hosts without +cluster, all but the first look like a port."""
    scheme, _, rest = url.partition("://")
    return SEVERAL if "+" not in scheme and "," in rest.rpartition("@")[2].partition("/")[0] else UNREADABLE


def _hosts(parts: SplitResult) -> tuple[Address, ...]:
    """The hosts of a URL; several only where its scheme allows for them. Raises ValueError."""
    if parts.scheme == "unix":
        return ()
    names = parts.netloc.rpartition("@")[2]
    _, _, topology = parts.scheme.partition("+")
    found = [urlsplit(f"//{name}") for name in (names.split(",") if topology else [names])]
    return tuple((one.hostname or "", one.port or PORTS.get(topology, 6379)) for one in found)


def shown(address: Address) -> str:
    """Write an address as in a URL."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _fault(parts: SplitResult) -> str:
    """Say what is wrong with a URL that can be read; empty if nothing is."""
    if parts.scheme not in SCHEMES:
        return "its scheme must be redis, rediss or unix, or one of the first two with +cluster or +sentinel"
    if parts.fragment:
        return "it holds a '#' (percent-encode it as %23 in a password)"
    if parts.scheme == "unix" and not parts.path.startswith("/"):
        return "it names no socket path"
    hosts = parts.netloc.rpartition("@")[2]
    if parts.scheme != "unix" and not all(host for host, _ in _hosts(parts)):
        return "a host is missing beside one of its commas" if "," in hosts else "it names no host"
    if "+" not in parts.scheme and "," in hosts:
        return SEVERAL
    if hosts.endswith(":") and parts.path.startswith("//"):
        return "it names a scheme twice: hosts after the first have a comma before them, and no scheme"
    if parts.scheme.endswith("+sentinel") and not parts.path.strip("/"):
        return "it names no service: the name of the primary at its sentinels follows the hosts, as in …:26379/service"
    return _fault_of_settings(parts)


def _fault_of_settings(parts: SplitResult) -> str:
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    scheme, _, topology = parts.scheme.partition("+")
    known = SETTINGS | (SETTINGS_TLS if scheme == "rediss" else frozenset())
    unknown = settings.keys() - known - (SETTINGS_SENTINEL if topology == "sentinel" else frozenset())
    if unknown:
        return f"it holds an unknown setting {sorted(unknown)[0]!r}"
    if settings.get("durability", "memory") not in get_args(Durability):
        return f"its durability must be one of {', '.join(get_args(Durability))}"
    if settings.get("ssl_cert_reqs", CERT_REQS[0]) not in CERT_REQS:
        return f"its ssl_cert_reqs must be one of {', '.join(CERT_REQS)}"
    queue = _split(settings["reward_queue"]) if "reward_queue" in settings else parts
    if queue is None or (queue is not parts and (_fault(queue) or queue.scheme.endswith("+cluster"))):
        return "its reward_queue must be the URL of a broker that is no cluster, percent-encoded"
    path = parts.path.strip("/")
    in_path = {"unix": "", "sentinel": path.partition("/")[2]}.get(topology or scheme, path)
    database = settings.get("db", in_path)
    if database and not (database.isascii() and database.isdigit()):
        return "its database must be a number"
    return ""
