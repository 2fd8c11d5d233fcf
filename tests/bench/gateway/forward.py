"""A process that passes POST requests on to a server, and answers with what it answers: the least that a hop costs.

It reads nothing of what passes, keeps connections to the server, and is killed when its context ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web


@contextmanager
def forwarding(url: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Pass what comes to 127.0.0.1:`port` on to `url`."""
    with subprocess.Popen([sys.executable, "-m", __spec__.name, url, str(port)]) as process:
        try:
            yield process
        finally:
            process.kill()


def main() -> None:
    """Forward until killed: the server's URL, the port."""
    url, port = sys.argv[1:]
    web.run_app(_app(url), host="127.0.0.1", port=int(port), print=None, access_log=None)


def _app(url: str) -> web.Application:
    async def opened(app: web.Application) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        app[CLIENT] = aiohttp.ClientSession(connector=connector)

    async def forward(request: web.Request) -> web.Response:
        kind = {"content-type": request.content_type}
        async with request.app[CLIENT].post(url + request.path, data=await request.read(), headers=kind) as response:
            body = await response.read()
            return web.Response(status=response.status, body=body, content_type=response.content_type)

    app = web.Application(client_max_size=2**24)
    app.on_startup.append(opened)
    app.router.add_post("/{path:.*}", forward)
    return app


CLIENT = web.AppKey("client", aiohttp.ClientSession)
IDLE_S = 2.0  # of a connection that is kept: vLLM closes it after 5, also in the moment of a request

if __name__ == "__main__":
    main()
