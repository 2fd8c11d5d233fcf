"""A collector for tests: takes OTLP over HTTP as real ones do, decodes it, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SeenSpan:
    """A span as it arrived. role, process: of the resource that sent it. links: (trace, span)."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begun_ns: int
    ended_ns: int
    facts: dict[str, Any]
    links: list[tuple[str, str]]
    role: str
    process: str
    is_error: bool


class Receiver:
    """What has arrived so far."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []

    def take(self, body: bytes) -> None:
        """Decode one request."""
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            process = _plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_seen(span, process) for span in scope.spans]

    def of(self, name: str) -> list[SeenSpan]:
        """The spans whose names begin so."""
        return [span for span in self.spans if span.name.startswith(name)]


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    """A collector that ends with the block, and its address."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            receiver.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _seen(span: Any, process: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begun_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        facts=_plain(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        role=process["rollfab.role"],
        process=process["service.instance.id"],
        is_error=span.status.code == 2,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found
