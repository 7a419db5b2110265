# SPDX-License-Identifier: Apache-2.0
"""Traces of a real daemon's requests and rollouts, as a collector receives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import Machine
from .otlp_receiver import Receiver, SeenSpan
from .pages import name_of, pages_that_need, run_blocks

SERVER, CONSUMER = 2, 5  # span kinds of OTLP
MB = 2**20
OFF_MB = 80


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def traced(machine: Machine, receiver: Receiver) -> Iterator[Machine]:
    """A machine whose daemon sends its traces to the receiver."""
    with receiver.taking():
        machine.environ |= receiver.variables
        yield machine
        machine.run("down", "--all")
        machine.run("stop")


def is_within(inner: SeenSpan, outer: SeenSpan) -> bool:
    return outer.begun_at <= inner.begun_at and inner.ended_at <= outer.ended_at


def test_a_launch_is_one_trace_from_the_call_to_the_phases_of_its_worker(
    traced: Machine, receiver: Receiver
) -> None:
    request_id = traced.ok("launch", "echo", "--json").json["request_id"]
    [process] = receiver.wait_for("process launch")
    [call], [queue] = receiver.named("POST /v1/requests"), receiver.named("queue launch")
    [dispatch], [run] = receiver.wait_for("dispatch"), receiver.wait_for("run launch")
    assert len({span.trace_id for span in (call, queue, process, dispatch, run)}) == 1
    assert traced.request(request_id)["trace_id"] == call.trace_id
    assert (call.kind, call.parent_id, process.kind) == (SERVER, "", CONSUMER)
    assert {queue.parent_id, process.parent_id} == {call.span_id}
    assert {dispatch.parent_id, run.parent_id} == {process.span_id}
    assert (
        call.attributes
        | {
            "http.request.method": "POST",
            "http.route": "/v1/requests",
            "http.response.status_code": 202,
        }
        == call.attributes
    )
    assert queue.attributes["openenvd.queue.wait_reason"] == "nothing"
    assert process.attributes["openenvd.request.id"] == request_id
    assert process.attributes["openenvd.state"] == "SUCCEEDED"
    assert not process.failed
    assert psutil.pid_exists(run.attributes["process.pid"]) or run.attributes["process.pid"] > 1
    phases = [span for span in receiver.spans if span.parent_id == run.span_id]
    assert {"starting"} <= {span.name for span in phases}
    assert all(is_within(span, run) for span in phases)
    assert is_within(run, process)
    assert queue.ended_at <= process.begun_at + 0.001
    assert call.resource["service.name"] == "openenvd"


def test_nothing_of_it_is_there_when_it_is_off(machine: Machine) -> None:
    machine.ok("launch", "echo")
    info = machine.ok("info", "--json").json
    assert info["daemon"]["traces"] is None
    mapped = Path(f"/proc/{machine.daemon_pid}/maps").read_text()
    assert "google/_upb" not in mapped  # which the exporter needs
    used = psutil.Process(machine.daemon_pid).memory_full_info()
    assert used.pss < OFF_MB * MB


@pytest.mark.parametrize("page", pages_that_need("a collector"), ids=name_of)
def test_the_blocks_of_a_page_that_need_a_collector_run(
    traced: Machine, receiver: Receiver, page: Path
) -> None:
    own = traced.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert own in run_blocks(traced, page, "a collector", {"http://localhost:4318": own})
    receiver.wait_for("process launch")
