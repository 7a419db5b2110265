# SPDX-License-Identifier: Apache-2.0
"""Traces of a real daemon's requests and rollouts, as a collector receives them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import Machine, eventually
from .otlp_receiver import Receiver, SeenSpan
from .pages import name_of, pages_that_need, run_blocks

SERVER, CONSUMER = 2, 5  # span kinds of OTLP
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MB = 2**20
OFF_MB = 80
STOP_SECONDS = 20.0  # of a busy machine; the SDK by itself waits thirty for its collector
AWAY = "Failed to export spans"  # as the SDK says it
GREEDY = """
async def slow(observation):
    import asyncio
    await asyncio.sleep(0.05)
    return {"message": "hello"}
"""


@pytest.fixture
def receiver() -> Receiver:
    """One that takes spans while a test lets it."""
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


def test_a_request_continues_the_trace_of_the_command_that_sends_it(
    traced: Machine, receiver: Receiver
) -> None:
    traced.environ["TRACEPARENT"] = f"00-{TRACE}-{SPAN}-01"
    traced.ok("launch", "echo")
    del traced.environ["TRACEPARENT"]
    [call] = receiver.wait_for("POST /v1/requests")
    assert (call.trace_id, call.parent_id) == (TRACE, SPAN)
    [run] = receiver.wait_for("run launch")
    assert run.trace_id == TRACE
    traced.ok("down", "echo")  # the daemon, which that command started, has not kept it
    assert receiver.wait_for("run down")[0].trace_id != TRACE


def test_episodes_of_a_rollout_are_traces_with_their_steps(
    traced: Machine, receiver: Receiver, tmp_path: Path
) -> None:
    traced.ok("launch", "echo")
    out = str(tmp_path / "out")
    given = ("--policy", "random", "--episodes", "3", "--max-steps", "4", "--out", out)
    traced.ok("rollout", "echo", *given)
    [process], episodes = receiver.wait_for("process rollout"), receiver.wait_for("episode", 3)
    assert len({span.trace_id for span in (process, *episodes)}) == 4
    assert {span.links for span in episodes} == {(process.span_id,)}
    for episode in episodes:
        parts = [span for span in receiver.spans if span.parent_id == episode.span_id]
        names = [span.name for span in sorted(parts, key=lambda span: span.begun_at)]
        steps = names.count("step")
        assert names == ["reset", *["policy", "step"] * steps]
        assert 1 <= steps <= 4
        assert {span.trace_id for span in parts} == {episode.trace_id}
        assert all(is_within(span, episode) for span in parts)
        rewards = [s.attributes.get("openenvd.step.reward", 0.0) for s in parts if s.name == "step"]
        assert episode.attributes["openenvd.episode.reward"] == pytest.approx(sum(rewards))


def test_a_request_keeps_its_trace_when_the_daemon_is_killed(
    traced: Machine, receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    traced.ok("launch", "echo")
    out = str(tmp_path / "out")
    given = ("--policy", "greedy:slow", "--episodes", "20", "--max-steps", "5", "--out", out)
    rolled = traced.ok("rollout", "echo", *given, "--async", "--json", cwd=tmp_path).json
    request_id = rolled["request_id"]
    eventually(lambda: traced.request(request_id)["worker"])
    trace_id = traced.request(request_id)["trace_id"]
    traced.kill_daemon()
    traced.ok("wait", request_id)
    lost, whole = receiver.wait_for("process rollout", 2)
    assert {lost.trace_id, whole.trace_id} == {trace_id}
    assert lost.failed
    assert lost.attributes["error.type"] == "worker_lost"
    assert not whole.failed
    assert lost.ended_at <= whole.begun_at
    assert [queue.trace_id for queue in receiver.named("queue rollout")] == [trace_id] * 2


def test_a_collector_that_is_away_holds_nothing_up(machine: Machine, receiver: Receiver) -> None:
    log = machine.home / "daemon.log"
    with receiver.taking():
        machine.environ |= receiver.variables | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        machine.ok("launch", "echo")
        receiver.wait_for("run launch")
    machine.ok("down", "echo")
    eventually(lambda: AWAY in log.read_text())
    assert "Transient" not in log.read_text()  # of the SDK at each try
    with receiver.taking():
        machine.ok("launch", "echo")
        receiver.wait_for("run launch", 2)
    machine.ok("down", "--all")
    began = time.monotonic()
    machine.ok("stop")
    assert time.monotonic() - began < STOP_SECONDS


def test_a_daemon_says_once_what_is_missing(machine: Machine) -> None:
    machine.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    machine.environ |= {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    said = machine.ok("up").out
    assert "traces   not sent" in said
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in said
    machine.ok("launch", "echo")
    assert (machine.home / "daemon.log").read_text().count("no traces are sent") == 1


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
