# SPDX-License-Identifier: Apache-2.0
"""In which order events are delivered, and which event a failed task or an exit becomes."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from openenvd.executor.messages import LONG, Cancelled, ExecutorEvent, Progressed, Started, Task
from openenvd.executor.spawning.source import Exited
from openenvd.executor.supervisor.pool import Pool, PooledWorker, Run, StopReason
from openenvd.executor.supervisor.tasks import EventBuffer, exit_event
from openenvd.system.process.diagnose import Evidence
from openenvd.system.process.exit_reason import ExitKind
from openenvd.system.process.oom_evidence import OomCounters

from .executor_bench import make_plan

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
        worker = PooledWorker("long-1", Pool(LONG, make_plan()), 1, True, 7, 1.0, ours, None, 1)
        task = Task("a", "module:operation", {}, LONG, log_path="/nonexistent/log")
        worker.run = Run(task, b"", worker)
        yield worker


def exit_of(worker: PooledWorker, evidence: Evidence) -> Any:
    assert worker.run is not None
    return exit_event(worker, worker.run, evidence)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (None, ExitKind.OOM_KILLED),
        (StopReason.TIMED_OUT, ExitKind.TIMED_OUT),
        (StopReason.SHUT_DOWN, ExitKind.STOPPED),
    ],
)
def test_an_exit_that_we_asked_for_is_that_whatever_the_memory_says(
    worker: PooledWorker, asked: StopReason | None, kind: ExitKind
) -> None:
    assert worker.run is not None
    worker.run.stop_reason = asked
    worker.exited = Exited(7, 9, None, was_alone=True)
    evidence = Evidence(7, 9, before=OomCounters(0), after=OomCounters(1))
    assert exit_of(worker, evidence).exit.kind is kind


def test_the_larger_peak_counts(worker: PooledWorker) -> None:
    worker.exited = Exited(7, 9, peak_bytes=3 * MB)
    died = exit_of(worker, Evidence(7, 9, peak_bytes=2 * MB))
    assert died.peak_bytes == died.exit.peak_bytes == 3 * MB
