# SPDX-License-Identifier: Apache-2.0
"""An OTLP/HTTP receiver: accepts spans as a collector does, and keeps their names."""

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


@dataclass
class Receiver:
    """The names of the spans that have arrived at `port`."""

    port: int = 0
    names: list[str] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    @property
    def variables(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def wait_for(self, name: str, within: float = 60.0) -> None:
        """Wait until a span of this name has arrived."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: name in self.names, within), self.names

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
                for of_scope in of_resource.scope_spans:
                    self.names += [span.name for span in of_scope.spans]
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
