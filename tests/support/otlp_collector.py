"""A collector of traces: takes OTLP over HTTP on a thread of its own, and parses the protobuf."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as the collector read it."""

    name: str
    kind: int  # of the protobuf: 1 internal, 2 server, 3 client
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str
    service: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) * 1e-9


class OtlpCollector:
    """Attributes:
    spans: all spans that came.
    is_slow: whether it accepts requests and never answers.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.is_slow = False
        self.num_requests = 0
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[OtlpCollector]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.num_requests += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                while collector.is_slow:
                    time.sleep(0.05)
                if self.path != "/v1/traces" or self.headers["Content-Type"] != "application/x-protobuf":
                    self.send_error(404)
                    return
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            self.is_slow = False
            server.shutdown()
            thread.join()
            server.server_close()

    def take(self, body: bytes) -> None:
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        name=span.name,
                        kind=span.kind,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        begin_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        attributes=_attributes(span.attributes),
                        error=span.status.message if span.status.code == 2 else "",
                        service=service,
                    )
                    for span in of_scope.spans
                ]

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
