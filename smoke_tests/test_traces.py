# SPDX-License-Identifier: Apache-2.0
"""Traces of a real daemon's requests, as an OTLP/HTTP collector receives them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from .conftest import Machine
from .pages import name_of, pages_that_need, run_blocks

LAUNCH_SPANS = ("POST /v1/requests", "queue launch", "process launch", "dispatch", "run launch")


class Receiver(ThreadingHTTPServer):
    """A collector that keeps the names of the spans that it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.names: list[str] = []
        self.arrived = threading.Condition()

    def wait_for(self, name: str, within: float = 60.0) -> None:
        """Wait until a span of this name has arrived."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: name in self.names, within), self.names


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        told = (self.path, self.headers["Content-Type"])
        assert told == ("/v1/traces", "application/x-protobuf")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        message = ExportTraceServiceRequest.FromString(body)
        with self.server.arrived:
            for of_resource in message.resource_spans:
                for of_scope in of_resource.scope_spans:
                    self.server.names += [span.name for span in of_scope.spans]
            self.server.arrived.notify_all()
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def traced(machine: Machine, receiver: Receiver) -> Iterator[Machine]:
    """A machine whose daemon sends its traces to the receiver."""
    machine.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{receiver.server_port}"
    machine.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"
    yield machine
    machine.run("down", "--all")
    machine.run("stop")


@pytest.mark.parametrize("page", pages_that_need("a collector"), ids=name_of)
def test_the_blocks_of_a_page_that_need_a_collector_run(
    traced: Machine, receiver: Receiver, page: Path
) -> None:
    own = traced.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert own in run_blocks(traced, page, "a collector", {"http://localhost:4318": own})
    for name in (*LAUNCH_SPANS, "starting"):
        receiver.wait_for(name)
    assert all(each["trace_id"] for each in traced.ok("requests", "--json").json["requests"])
