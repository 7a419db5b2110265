# SPDX-License-Identifier: Apache-2.0
"""The dispatch rate, as SkyPilot's `test_queue_dispatcher.py` measures it, beside peers.

    --executor noop       dispatch alone: a full queue, and an executor that does nothing
    --executor workers    through real workers, each outcome recorded

Ours: requests in SQLite, one dispatcher thread, `BurstableExecutor`; every claim also writes the
request's event. The same run measures the five arrangements of the seed (`seed_arrangements.py`)
and the limit: bare claims in batches. "Idle" is one request at a time: from before it is written
until its operation runs.

Aims on four cores: dispatch alone over 12,000 a second and three times the best of the five;
through workers over 3,000 a second; enqueue to start under 5 ms at p99 when idle. Measured
elsewhere: SkyPilot 0.9 810/s (502/s on its author's laptop), 0.14.1 5,647/s.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_tests.peers.seed_arrangements import ARRANGEMENTS, Arrangement, Running, connect
from load_tests.shared.operations import worker_path
from load_tests.shared.report import Report, parse_arguments, percentile
from openenvd.executor.executor import BurstableExecutor
from openenvd.executor.messages import SHORT, Task
from openenvd.executor.policy.memory import FreeMemory
from openenvd.executor.policy.plan import BURST_SHORT_PER_CPU, Plan
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection, open_database
from openenvd.requests_db.records import Event, NewRequest, Request, Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import submitting
from openenvd.rollouts.bench.results import Target, cpu_seconds
from openenvd.schema.settings import Paths, Settings
from openenvd.schema.states import Schedule
from openenvd.server.dispatch.dispatcher import Dispatcher
from openenvd.server.dispatch.running import DispatchContext

OURS = {"ours": False, "ours, --durability power": True}  # whether commits are flushed to the disk
WORKERS = max(1, len(os.sched_getaffinity(0)))
OPERATION = "check"
PATIENCE_SECONDS = 120.0
LIMIT_ROWS = 5_000
CLAIM_BATCH = 64


def main() -> None:
    """Measure all arrangements by turns, so that a change of the machine's speed affects all."""
    options = parse_arguments(
        "Dispatch rate.",
        repetitions=5,
        executor={"choices": ["noop", "workers"], "default": "noop"},
        requests={"type": int, "default": 10_000},
    )
    worker_path()
    run = options.executor == "workers"
    report = Report(f"Queue dispatcher, --executor {options.executor}")
    for _ in range(options.repetitions):
        limit = _bare_batches()
        found = {
            name: _ours(options.requests, run=run, syncs=syncs) for name, syncs in OURS.items()
        }
        rivals = {each.name: _theirs(each, options.requests, run=run) for each in ARRANGEMENTS}
        found |= rivals
        for name, one in found.items():
            report.append(name, "req/s", one.rate)
        for name, one in found.items():
            report.append(f"CPU, {name}", "us", one.cpu_us)
        best = max(rival.rate for rival in rivals.values())
        ratio = found["ours"].rate / best
        report.append("ours / the best of the five in its round", "x", ratio)
        for name, one in found.items():
            for share in (0.50, 0.99) if one.idle_ms else ():
                what = f"idle, enqueue to start p{share * 100:.0f}, {name}"
                report.append(what, "ms", percentile(one.idle_ms, share))
        report.append(f"limit: bare claims, batches of {CLAIM_BATCH}", "/s", limit)
    report.note(f"{options.requests} requests a round; CPU is that of all processes, per request.")
    aim = "3,000" if run else "12,000, and 3x the best of the five"
    report.note(f"Aim: {aim}. Idle, enqueue to start p99: 5 ms.")
    report.finish(options.json)


@dataclass
class Round:
    """The measurements of one arrangement in one round."""

    rate: float
    cpu_us: float  # of all processes, per request
    idle_ms: list[float] = field(default_factory=list)


# Ours.


class NoopExecutor:
    """Accepts every request and does nothing, like the original's `MockExecutor`."""

    def __init__(self, expected: int) -> None:
        self._left = expected
        self.done = threading.Event()

    def room(self, schedule: str) -> int:
        return self._left if schedule == SHORT else 0

    def free_memory(self, schedule: str) -> FreeMemory:
        return FreeMemory(schedule, 2**62, 2**62)

    def submit(self, task: Task) -> None:
        self._left -= 1
        if self._left == 0:
            self.done.set()

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_more: None


class Outcomes:
    """Receives the dispatcher's events, and waits for the last outcome."""

    def __init__(self) -> None:
        self._left = 0
        self.done = threading.Event()

    def expect(self, count: int) -> None:
        self.done.clear()
        self._left = count

    def __call__(self, events: Sequence[Event]) -> None:
        ended = sum(event.data.get("state") == "SUCCEEDED" for event in events)
        self._left -= ended
        if ended and self._left == 0:
            self.done.set()


def _ours(count: int, *, run: bool, syncs: bool) -> Round:
    measure = _ours_running if run else _ours_noop
    with _database(count) as (path, _ids):
        return measure(path, count, syncs=syncs)


def _ours_noop(path: Path, count: int, *, syncs: bool) -> Round:
    executor: Any = NoopExecutor(count)
    store = WriteConnection(path, syncs=syncs)
    dispatcher = _dispatcher(store, executor, path, Outcomes())
    with _stopwatch(count) as measured:
        dispatcher.start()
        assert executor.done.wait(PATIENCE_SECONDS)
    dispatcher.stop()
    assert _count(path, "RUNNING") == count
    store.close()
    return measured()


def _ours_running(path: Path, count: int, *, syncs: bool) -> Round:
    outcomes = Outcomes()
    store = WriteConnection(path, syncs=syncs)
    dispatcher: Dispatcher
    executor = BurstableExecutor(
        Plan(1, WORKERS, 0, BURST_SHORT_PER_CPU * WORKERS, 2**32, 0),
        preload=["load_tests.shared.operations"],
        home=str(path.parent),
        on_event=lambda event: dispatcher.deliver(event),
    )
    dispatcher = _dispatcher(store, executor, path, outcomes)
    executor.start()
    _warm_up(executor, path)
    outcomes.expect(count)
    with _stopwatch(count) as measured:
        dispatcher.start()
        assert outcomes.done.wait(PATIENCE_SECONDS)
    assert _count(path, "SUCCEEDED") == count
    found = measured()
    api = AsyncStore(path, syncs=syncs)
    found.idle_ms = asyncio.run(_one_at_a_time(api, dispatcher, outcomes, max(100, count // 20)))
    dispatcher.stop()
    executor.stop()
    store.close()
    return found


async def _one_at_a_time(
    store: AsyncStore, dispatcher: Dispatcher, outcomes: Outcomes, count: int
) -> list[float]:
    waits = []
    for _ in range(count):
        outcomes.expect(1)
        asked = time.time()
        submitted = await store.write(submitting.submit, _new_request(), now=asked)
        assert isinstance(submitted, Submitted)
        dispatcher.submitted(Schedule.SHORT)
        await asyncio.to_thread(outcomes.done.wait, PATIENCE_SECONDS)
        request = await store.read(queries.get(submitted.request.id))
        assert isinstance(request, Request)
        waits.append((request.result - asked) * 1000)
    await store.close()
    return waits


def _dispatcher(
    store: WriteConnection, executor: Any, path: Path, outcomes: Outcomes
) -> Dispatcher:
    paths = Paths(path.parent)
    paths.request_logs.mkdir(parents=True, exist_ok=True)
    return Dispatcher(
        DispatchContext(
            store,
            executor,
            publish=outcomes,
            operations={OPERATION: "load_tests.shared.operations:moment"},
            paths=paths,
            settings=Settings(keep_requests=1_000_000),
        )
    )


def _warm_up(executor: BurstableExecutor, path: Path) -> None:
    """Wait until one worker has run a request; load starts the others (the peers start all)."""
    log_path = str(path.with_name("warm-up.log"))
    executor.submit(Task("warm-up", "load_tests.shared.operations:moment", {}, SHORT, log_path))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(worker.tasks_run for worker in executor.status().workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# The peers.


def _theirs(arrangement: Arrangement, count: int, *, run: bool) -> Round:
    with _database(count) as (path, ids):
        running = Running(arrangement, path, run=run, workers=WORKERS)
        running.enqueue(ids)
        with _stopwatch(count) as measured:
            running.start()
            running.finish()
        assert _count(path, "SUCCEEDED" if run else "RUNNING") == count
        return measured()


# Both.


# Removed at the end: ext4 creates files more slowly for minutes after many were deleted.
_everything = tempfile.TemporaryDirectory(prefix="openenvd-load-")


@contextmanager
def _database(count: int) -> Iterator[tuple[Path, list[str]]]:
    """Create a new database with `count` pending requests; returns their ids, too."""
    path = Path(tempfile.mkdtemp(dir=_everything.name)) / "requests.db"
    open_database(path)
    writer = WriteConnection(path)
    ids = []
    with writer.transaction() as connection:
        for _ in range(count):
            done = submitting.submit(connection, _new_request(), now=time.time())
            assert isinstance(done, Submitted)
            ids.append(done.request.id)
    writer.close()
    yield path, ids


def _new_request() -> NewRequest:
    return NewRequest(OPERATION, Schedule.SHORT, {})


def _count(path: Path, state: str) -> int:
    connection = connect(path)
    (found,) = connection.execute("SELECT count(*) FROM requests WHERE state = ?", (state,))
    connection.close()
    count: int = found[0]
    return count


@contextmanager
def _stopwatch(count: int) -> Iterator[Callable[[], Round]]:
    """Time the block; the yielded function returns the measurements after the block."""
    ends: list[tuple[float, float]] = []
    family = Target("", "", (os.getpid(),))  # and its descendants, including ended ones
    began, cpu = time.perf_counter(), cpu_seconds(family)
    yield lambda: Round(count / ends[0][0], ends[0][1] / count * 1e6)
    ends.append((time.perf_counter() - began, cpu_seconds(family) - cpu))


def _bare_batches() -> float:
    """Claim in batches by `UPDATE … RETURNING` on our table, with no other Python."""
    statement = (
        "UPDATE requests SET state = 'RUNNING', attempts = attempts + 1, started_at = 1.0"
        " WHERE seq IN (SELECT seq FROM requests WHERE state = 'PENDING' AND schedule = 'SHORT'"
        f" ORDER BY priority DESC, seq LIMIT {CLAIM_BATCH}) AND state = 'PENDING' RETURNING *"
    )
    with _database(LIMIT_ROWS) as (path, _):
        connection: sqlite3.Connection = connect(path)
        began = time.perf_counter()
        while connection.execute(statement).fetchall():
            pass
        rate = LIMIT_ROWS / (time.perf_counter() - began)
        connection.close()
        return rate


if __name__ == "__main__":
    main()
