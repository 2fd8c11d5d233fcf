"""Says in plain words why a server could not be asked, whatever library asked it."""

from __future__ import annotations

import os
import socket
import ssl
from urllib.parse import urlsplit


def is_http_url(url: str) -> bool:
    """Tell whether this is the address of a server that speaks HTTP: a scheme, a host, and a port that can be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def network_cause(error: BaseException) -> str:
    """Return the cause of a call that got no answer: the system's words for it, without the library's around them."""
    chain = [error]
    while below := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(below)
    for each in reversed(chain):  # libraries wrap what the system said, and some add its arguments to the text
        if isinstance(each, ssl.SSLError):
            said = getattr(each, "verify_message", "") or (each.reason or "").replace("_", " ").lower()
            return f"TLS failed ({said or 'without a reason'})"
        if isinstance(each, socket.gaierror):
            return "its name does not resolve"
        if isinstance(each, TimeoutError):
            return "no answer in time"
        if isinstance(each, OSError) and each.errno:
            text = os.strerror(each.errno)
            return text[:1].lower() + text[1:]
    return "it closed the connection, or does not speak HTTP"
