# SPDX-License-Identifier: Apache-2.0
"""In which order events are delivered, and which event a failed task or an exit becomes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from openenvd.executor.messages import (
    LONG,
    Cancelled,
    Died,
    ExecutorEvent,
    Progressed,
    Raised,
    Started,
    Task,
)
from openenvd.executor.policy.memory import Usage
from openenvd.executor.spawning.source import Exited
from openenvd.executor.supervisor.pool import PooledWorker, Run, StopReason
from openenvd.executor.supervisor.tasks import EventBuffer, exit_event, failure_event
from openenvd.system.process.diagnose import Evidence
from openenvd.system.process.exit_reason import Detector, ExitKind

MB = 2**20


def test_events_are_delivered_once_in_their_order() -> None:
    delivered: list[ExecutorEvent] = []
    events = EventBuffer(delivered.append)
    events.add(started := Started("a", "long-1", 1, 1.0, 1.0))
    events.add(progressed := Progressed("a", {}, 2.0))
    events.deliver()
    events.deliver()
    assert delivered == [started, progressed]


def test_a_listener_that_fails_misses_that_event_alone(caplog: pytest.LogCaptureFixture) -> None:
    delivered: list[ExecutorEvent] = []

    def listen(event: ExecutorEvent) -> None:
        delivered.append(event)
        if len(delivered) == 1:
            raise ValueError("this one is too much")

    events = EventBuffer(listen)
    outcomes = [Cancelled("a", 1.0), Cancelled("b", 1.0)]
    for event in outcomes:
        events.add(event)
    events.deliver()
    assert delivered == outcomes
    assert "failed on Cancelled" in caplog.text
    assert caplog.records[0].__dict__["request_id"] == "a"


@pytest.fixture
def worker() -> Iterator[PooledWorker]:
    """A worker on no books, whose task has just been assigned."""
    ours, workers = socket.socketpair()
    with ours, workers:
        worker = PooledWorker("long-1", LONG, 1, True, 7, 1.0, ours, None, 1)
        task = Task("a", "module:operation", {}, LONG, log_path="/nonexistent/log")
        worker.run = Run(task, b"", worker)
        yield worker


def exit_of(worker: PooledWorker, evidence: Evidence) -> Any:
    assert worker.run is not None
    return exit_event(worker, worker.run, evidence)


MOVED: dict[str, Any] = {"oom_kills_before": 0, "oom_kills_after": 1}


@pytest.mark.parametrize(
    ("known", "stop_reason", "kind"),
    [
        ({}, None, ExitKind.SIGNALED),
        (MOVED, None, ExitKind.OOM_KILLED),
        (MOVED, StopReason.TIMED_OUT, ExitKind.TIMED_OUT),
        (MOVED, StopReason.SHUT_DOWN, ExitKind.STOPPED),
    ],
)
def test_an_exit_under_a_task_is_what_we_asked_for_or_is_diagnosed(
    worker: PooledWorker, known: dict[str, Any], stop_reason: StopReason | None, kind: ExitKind
) -> None:
    assert worker.run is not None
    worker.run.stop_reason = stop_reason
    worker.exited = Exited(7, 9, None, was_alone=True)
    assert exit_of(worker, Evidence(7, 9, **known)).exit.kind is kind


def test_an_exit_under_a_cancelled_task_is_its_cancellation(worker: PooledWorker) -> None:
    assert worker.run is not None
    worker.run.stop_reason = StopReason.CANCELLED
    assert isinstance(exit_of(worker, Evidence(7, 9)), Cancelled)


def test_a_watchdog_kill_reports_the_peak_and_the_limit(worker: PooledWorker) -> None:
    worker.exited = Exited(7, 9, peak_bytes=MB)
    worker.limit_violation = Usage("long-1", 80 * MB, 64 * MB, "over its limit")
    reason = exit_of(worker, Evidence(7, 9)).exit
    assert reason.detector is Detector.WATCHDOG
    assert (reason.peak_bytes, reason.limit_bytes) == (80 * MB, 64 * MB)


def test_the_larger_peak_counts(worker: PooledWorker) -> None:
    worker.exited = Exited(7, 9, peak_bytes=3 * MB)
    died = exit_of(worker, Evidence(7, 9, peak_bytes=2 * MB))
    assert died.peak_bytes == died.exit.peak_bytes == 3 * MB


ERROR = {"type": "ValueError", "message": "no"}


@pytest.mark.parametrize(
    ("frame", "known", "event"),
    [
        ({"kind": "raised", "error": ERROR}, {}, Raised),
        ({"kind": "raised", "error": ERROR}, MOVED, Died),  # a grandchild was killed for memory
        ({"kind": "raised", "error": ERROR | {"type": "MemoryError"}}, {}, Died),
        ({"kind": "cancelled"}, {}, Died),  # by somebody else's SIGTERM
    ],
)
def test_a_failure_is_an_error_of_the_operation_unless_memory_or_a_signal_caused_it(
    worker: PooledWorker, frame: dict[str, Any], known: dict[str, Any], event: type
) -> None:
    assert worker.run is not None
    evidence = replace(Evidence(7, None), **known)
    assert isinstance(failure_event(worker, worker.run, {"peak_bytes": 1} | frame, evidence), event)
