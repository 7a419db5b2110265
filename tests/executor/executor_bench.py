# SPDX-License-Identifier: Apache-2.0
"""An executor under test, with a recorder of its events."""

import itertools
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openenvd.executor import messages
from openenvd.executor.executor import BurstableExecutor
from openenvd.executor.policy.plan import Plan

OPERATIONS = "operations_for_tests"
PATIENCE_SECONDS = 30
FINAL = (messages.Succeeded, messages.Raised, messages.Died, messages.Cancelled)


def make_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "guaranteed_long": 2,
        "guaranteed_short": 2,
        "burst_long": 2,
        "burst_short": 2,
        "budget_bytes": 2**30,
        "reserve_bytes": 0,
    }
    return Plan(**(values | changes))


class Recorder:
    """Hears every event; waits for those a test is about."""

    def __init__(self) -> None:
        self.events: list[messages.ExecutorEvent] = []
        self.heard = threading.Condition()
        self.outcomes = 0

    def __call__(self, event: messages.ExecutorEvent) -> None:
        with self.heard:
            self.events.append(event)
            self.outcomes += isinstance(event, FINAL)
            self.heard.notify_all()

    def wait_for(self, fact: Callable[[], Any]) -> Any:
        with self.heard:
            assert self.heard.wait_for(fact, PATIENCE_SECONDS), self.events[-20:]
            return fact()

    def of(self, kind: Any, task_id: str) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and e.task_id == task_id]

    def outcome(self, task_id: str) -> Any:
        return self.wait_for(lambda: self.of(FINAL, task_id))[0]

    def progress(self, task_id: str) -> Any:
        return self.wait_for(lambda: self.of(messages.Progressed, task_id))[0].data

    def started(self, task_id: str) -> messages.Started:
        event: messages.Started = self.wait_for(lambda: self.of(messages.Started, task_id))[0]
        return event


class Bench:
    def __init__(self, home: Path, plan: Plan, **options: Any) -> None:
        self.home = home
        self.recorder = Recorder()
        self.numbers = itertools.count()
        self.executor = BurstableExecutor(
            plan, preload=[OPERATIONS], home=str(home), on_event=self.recorder, **options
        )

    def submit(self, operation: str, payload: dict[str, Any] | None = None, **fields: Any) -> str:
        fields = {"schedule": messages.SHORT, **fields}
        task_id = f"task-{next(self.numbers)}"
        task = messages.Task(
            task_id,
            f"{OPERATIONS}:{operation}",
            payload or {},
            log_path=str(self.home / f"{task_id}.log"),
            **fields,
        )
        with self.recorder.heard:  # what is told meanwhile came later
            if (started := self.executor.submit(task)) is not None:
                self.recorder(started)
        return task_id

    def run(self, operation: str, payload: dict[str, Any] | None = None, **fields: Any) -> Any:
        return self.recorder.outcome(self.submit(operation, payload, **fields))

    def log(self, task_id: str) -> str:
        return (self.home / f"{task_id}.log").read_text()


def wait_gone(pid: int) -> None:
    """Until the process is dead: reaped, or a zombie that its parent has yet to reap."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(PATIENCE_SECONDS * 1000), f"process {pid} lives on"
    finally:
        os.close(descriptor)
