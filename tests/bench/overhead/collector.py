"""A collector of traces, in a process of its own, that counts their bytes and throws them away."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class Collector:
    """The process, from `with` on. url: for OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def byte_count(self) -> int:
        """Bytes of traces that came so far."""
        with urllib.request.urlopen(self.url, timeout=10) as answer:
            return int(answer.read())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    byte_count = 0

    def do_POST(self) -> None:
        _Handler.byte_count += len(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(str(_Handler.byte_count).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
