"""The door: every request passes it before any route sees it.

- With keys: reading needs a read or control key, everything else a control key. Static files, the documentation and the
  two probes are open: they hold nothing.
- Without keys a browser on this machine is a way in for any web page it shows. So the name in the address bar must be
  ours (a foreign name led here by DNS is refused), and what changes anything must come from our own page. A proxy on
  this machine is a way in for everybody whom it serves: what one has passed on is refused.
- Every answer forbids framing, foreign scripts and sniffing.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ApiConfig, is_loopback
from .keys import place_among
from .problems import problem

READING = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset(
    {"/", "/workers", "/serving", "/dead", "/events"}  # views of the live page, which holds no data
    | {"/docs", "/openapi.json", "/healthz", "/readyz"}
)
OPEN_PREFIXES = ("/static/", "/runs/")
FORWARDED = frozenset(  # by which proxies say that they pass on, and for whom
    {
        "forwarded",
        "via",
        "x-real-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-original-host",
        "x-original-forwarded-for",
    }
    | {"client-ip", "true-client-ip", "cf-connecting-ip", "cf-ray", "fastly-client-ip", "x-envoy-external-address"}
)
FORWARDED_PREFIX = "x-forwarded"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class AccessCheck:
    """ASGI middleware that lets a request in or answers it itself."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._config = config
        self._names = {name.lower().strip("[]") for name in (config.host, *config.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets here, and one would bypass the checks below
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope), bool(scope["query_string"]))
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, name, message = refusal
        answer = problem(status, name, message)
        if status == 401:
            answer.headers["www-authenticate"] = 'Bearer realm="rollfab"'
        await answer(scope, receive, send_with_headers)

    def _refusal(self, method: str, path: str, headers: Headers, has_query: bool) -> tuple[int, str, str] | None:
        """Return the status, error and message for a request that may not pass; None: it may."""
        is_reading = method in READING
        if not self._config.has_keys:
            return self._stranger(headers) or _forwarded(headers) or (None if is_reading else _foreign_page(headers))
        is_about_a_run = path == "/readyz" and has_query  # its answer tells of runs
        if is_reading and not is_about_a_run and (path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)):
            return None
        return self._right(is_reading, headers.get("authorization", ""))

    def _stranger(self, headers: Headers) -> tuple[int, str, str] | None:
        name = _host_name(headers.get("host", ""))
        if name and (is_loopback(name) or name in self._names):
            return None
        return (
            403,
            "HostRefused",
            f"this api runs without keys and does not answer to the name {name or '(none)'!r}: use localhost, "
            "give the api keys, or add the name to its allowed_hosts",
        )

    def _right(self, is_reading: bool, authorization: str) -> tuple[int, str, str] | None:
        key = bearer(authorization)
        if key and place_among(key, self._config.control_keys) is not None:
            return None
        is_reader = bool(key) and place_among(key, self._config.read_keys) is not None
        if is_reader and is_reading:
            return None
        if is_reader:
            return 403, "Forbidden", "this key may read but not control: use a control key"
        said = "this key is not known here" if key else "a key is needed"
        return 401, "Unauthorized", f"{said}: send the header Authorization: Bearer <key>"


def who(config: ApiConfig, headers: Headers) -> str:
    """Say whose key a request was let in with, for the record: its name, or its place among those without one."""
    place = place_among(bearer(headers.get("authorization", "")), config.control_keys)
    if place is None:
        return "api"  # without keys: somebody on this machine
    return dict(config.key_names).get(config.control_keys[place], f"control key {place + 1}")


def bearer(authorization: str) -> str:
    """Return the key in a header; empty: none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _forwarded(headers: Headers) -> tuple[int, str, str] | None:
    found = next((name for name in headers if name in FORWARDED or name.startswith(FORWARDED_PREFIX)), None)
    if found is None:
        return None
    message = f"this api runs without keys and answers no request that a proxy passed on ({found}): give the api keys"
    return 403, "ForwardedRefused", message


def _foreign_page(headers: Headers) -> tuple[int, str, str] | None:
    """Refuse a request from a foreign page, as its browser tells; a program tells nothing, and is let in."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_foreign = site not in (None, "same-origin", "none")
    if origin is not None:
        is_foreign |= (
            not origin.startswith(("http://", "https://"))
            or origin.partition("://")[2].lower() != headers.get("host", "").lower()
        )
    if not is_foreign:
        return None
    message = f"a page of {origin or 'another site'} may not control this api: use the page at / here"
    return 403, "OriginRefused", message


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
