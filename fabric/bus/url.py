"""Broker URLs: what we accept, and how to show one without its secrets.

- A URL is checked in full before anything connects: the client library would ignore a database name it cannot
  read and pass unknown settings on to where they fail obscurely.
- No text made here holds a password, not even a piece of a malformed URL, and no exception's cause does.
"""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, urlsplit

from ..errors import ConfigError

__all__ = ["mask_url", "resolve_url"]

SCHEMES = ("redis", "rediss", "unix")
FORM = "write redis://[user:password@]host[:port][/database], rediss://… for TLS, or unix:///path/to/broker.sock"
UNREADABLE = "it cannot be read (a special character in the password? percent-encode it)"
SETTINGS = frozenset({"db", "username", "password", "socket_timeout", "socket_connect_timeout", "max_connections"})
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


def resolve_url(url: str | None) -> str | None:
    """Return a usable broker URL, or None where none was given (then a private broker is wanted).

    Reads nothing but its argument: callers pass in what their user or environment said.

    Raises:
        ConfigError: malformed, of another scheme, or with a setting we do not know.
    """
    if url is None or not url.strip():
        return None
    url = url.strip()
    parts = _split(url)
    fault = UNREADABLE if parts is None else _fault(parts)
    if fault:
        raise ConfigError(f"the broker URL {mask_url(url)} is not usable: {fault}; {FORM}", url=mask_url(url))
    return url


def mask_url(url: str) -> str:
    """Show where a URL leads, with *** for passwords and settings; only its scheme if it is malformed."""
    scheme, found, _ = url.partition("://")
    parts = _split(url)
    if parts is None or parts.fragment or not found:
        return f"{scheme}://***" if found and scheme in SCHEMES else "***"
    user, at, _ = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    who = f"{name}:***@" if colon else f"***{at}" if at else ""  # a lone name is often a misplaced password
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{who}{host}{parts.path}" + ("?***" if parts.query else "")


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # read for its ValueError
    except ValueError:
        return None
    return None if "@" in parts.path + parts.query and not parts.netloc.count("@") else parts


def _fault(parts: SplitResult) -> str:
    """What is wrong with a URL that can be read, or an empty string."""
    if parts.scheme not in SCHEMES:
        return "its scheme must be redis, rediss or unix"
    if parts.fragment:
        return "it holds a '#' (percent-encode it as %23 in a password)"
    if parts.scheme == "unix" and not parts.path.startswith("/"):
        return "it names no socket path"
    if parts.scheme != "unix" and not parts.hostname:
        return "it names no host"
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = settings.keys() - SETTINGS - (SETTINGS_TLS if parts.scheme == "rediss" else frozenset())
    if unknown:
        return f"it holds an unknown setting {sorted(unknown)[0]!r}"
    database = settings.get("db", "" if parts.scheme == "unix" else parts.path.strip("/"))
    if database and not (database.isascii() and database.isdigit()):
        return "its database must be a number"
    return ""
