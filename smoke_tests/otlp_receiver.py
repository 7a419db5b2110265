# SPDX-License-Identifier: Apache-2.0
"""An OTLP/HTTP receiver: takes what a collector takes, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class SeenSpan:
    """A span as it arrived. Times are seconds since the epoch; `links` are ids of spans."""

    def __init__(self, span: Any, resource: dict[str, Any]) -> None:
        self.name: str = span.name
        self.kind: int = span.kind
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.begun_at: float = span.start_time_unix_nano / 1e9
        self.ended_at: float = span.end_time_unix_nano / 1e9
        self.attributes = _plain(span.attributes)
        self.links = tuple(link.span_id.hex() for link in span.links)
        self.failed: bool = span.status.code == span.status.STATUS_CODE_ERROR
        self.resource = resource


@dataclass
class Receiver:
    """What has arrived; `port` is where more is taken, while it is."""

    port: int = 0
    spans: list[SeenSpan] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    @property
    def variables(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def named(self, name: str) -> list[SeenSpan]:
        """The spans of this name, in the order in which they began."""
        with self.arrived:
            found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.begun_at)

    def wait_for(self, name: str, count: int = 1, within: float = 60.0) -> list[SeenSpan]:
        """The spans of this name, once there are so many."""
        with self.arrived:
            there = self.arrived.wait_for(
                lambda: sum(span.name == name for span in self.spans) >= count, within
            )
            assert there, f"no {count} of {name} among {sorted(s.name for s in self.spans)}"
        return self.named(name)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Listen within the block, at the same port each time."""
        server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler_of(self))
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="receiver")
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        with self.arrived:
            for of_resource in message.resource_spans:
                resource = _plain(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self.spans += [SeenSpan(span, resource) for span in of_scope.spans]
            self.arrived.notify_all()


def _handler_of(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert (self.path, self.headers["Content-Type"]) == (
                "/v1/traces",
                "application/x-protobuf",
            )
            receiver.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
