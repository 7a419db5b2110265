# SPDX-License-Identifier: Apache-2.0
"""The five arrangements of SkyPilot's `test_queue_dispatcher.py`, on the standard library.

Each has a queue in memory beside a table. An id is put into the queue when its row is written; a
dispatcher gets the id, reads the row and marks it RUNNING (one durable transaction each), and
submits it to an executor. With `run=True` the executor is a `ProcessPoolExecutor`, on which
SkyPilot's own is built, and each outcome is written when it comes. The tables are those of
`openenvd.requests_db`; these arrangements and ours write the same rows: request, events and tally.

They are faster than the original: the driver's bare SQL, `multiprocessing.Queue` instead of a queue
server behind proxies, an indexed `=` instead of a `LIKE` scan, and no logging. SQLite makes their
checkpoints in the commit that finds the log long; ours are made by a thread of their own.
"""

import json
import multiprocessing
import queue
import sqlite3
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

CLAIM = (
    "UPDATE requests SET state = 'RUNNING', attempts = attempts + 1, started_at = ?"
    " WHERE id = ? AND state = 'PENDING' RETURNING seq, payload"
)
FINISH = (
    "UPDATE requests SET state = ?, started_at = ?, finished_at = ?, result = ?"
    " WHERE id = ? AND state = 'RUNNING' RETURNING seq"
)
COUNT = {
    "RUNNING": "UPDATE tally SET pending = pending - 1, running = running + 1,",
    "SUCCEEDED": "UPDATE tally SET running = running - 1, succeeded = succeeded + 1,",
}
NUMBER = " last_event = last_event + 1 WHERE id = 1 RETURNING last_event"
EVENT = (
    "INSERT INTO events (seq, at, kind, request_id, request_seq, data)"
    " VALUES (?, ?, 'request.state', ?, ?, ?)"
)

_spawn = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Arrangement:
    """One of the five."""

    name: str
    process_queue: bool
    dispatchers: int
    dispatch_in_processes: bool


ARRANGEMENTS = (
    Arrangement("process queue + 1 process", True, 1, True),
    Arrangement("thread queue + 1 thread", False, 1, False),
    Arrangement("process queue + 1 thread", True, 1, False),
    Arrangement("process queue + 10 processes", True, 10, True),
    Arrangement("thread queue + 10 threads", False, 10, False),
)


class Running:
    """An arrangement at work on a database."""

    def __init__(
        self,
        arrangement: Arrangement,
        database: Path,
        *,
        run: bool,
        workers: int,
    ) -> None:
        self.arrangement = arrangement
        self._ids: Any = _spawn.Queue() if arrangement.process_queue else queue.Queue()
        processes = arrangement.dispatch_in_processes
        each = max(1, workers // arrangement.dispatchers) if processes else workers
        # Threads share one pool; each dispatching process has its own, as in the original.
        self._pool = _pool(each) if run and not processes else None
        make: Any = _spawn.Process if processes else threading.Thread
        arguments = (self._ids, database, run, each, self._pool)
        self._dispatchers = [
            make(target=_dispatch, args=arguments) for _ in range(arrangement.dispatchers)
        ]

    def enqueue(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._ids.put(request_id)

    def start(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.start()

    def finish(self) -> None:
        for _ in self._dispatchers:
            self._ids.put(None)
        for dispatcher in self._dispatchers:
            dispatcher.join()
        if self._pool is not None:
            self._pool.shutdown()


def connect(database: Path) -> sqlite3.Connection:
    """Connect as durably as ours: with a write-ahead log, and a commit for every statement."""
    connection = sqlite3.connect(
        database, timeout=60, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def _dispatch(ids: Any, database: Path, run: bool, workers: int, shared: Any) -> None:
    connection = connect(database)
    pool = shared or (_pool(workers) if run else None)
    outcomes = _Outcomes(database)
    under_way: list[Future[float]] = []
    while (request_id := ids.get()) is not None:
        _claim(connection, request_id)
        if pool is None:
            continue
        future = pool.submit(time.time)
        future.add_done_callback(partial(outcomes.write, request_id))
        under_way.append(future)
    for future in under_way:
        future.result()
    if pool is not None and pool is not shared:
        pool.shutdown()
    if pool is None or pool is not shared:
        connection.close()


def _claim(connection: sqlite3.Connection, request_id: str) -> Any:
    """Mark a row RUNNING, write its event, and return what to run."""
    now = time.time()
    connection.execute("BEGIN IMMEDIATE")
    [(seq, payload)] = connection.execute(CLAIM, (now, request_id)).fetchall()
    _note(connection, request_id, seq, "RUNNING", now)
    connection.execute("COMMIT")
    return json.loads(payload)


def _finish(connection: sqlite3.Connection, request_id: str, started_at: float) -> None:
    now = time.time()
    connection.execute("BEGIN IMMEDIATE")
    values = ("SUCCEEDED", started_at, now, str(started_at), request_id)
    [(seq,)] = connection.execute(FINISH, values).fetchall()
    _note(connection, request_id, seq, "SUCCEEDED", now)
    connection.execute("COMMIT")


def _note(
    connection: sqlite3.Connection, request_id: str, seq: int, state: str, now: float
) -> None:
    [(number,)] = connection.execute(COUNT[state] + NUMBER).fetchall()
    data = json.dumps({"state": state})
    connection.execute(EVENT, (number, now, request_id, seq, data))


class _Outcomes:
    """Writes each outcome on the thread that receives it."""

    def __init__(self, database: Path) -> None:
        self._connection = connect(database)
        self._lock = threading.Lock()

    def write(self, request_id: str, done: Future[float]) -> None:
        started_at = done.result()
        with self._lock:
            _finish(self._connection, request_id, started_at)


def _pool(workers: int) -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(workers, mp_context=_spawn)
    for future in [pool.submit(time.sleep, 0.01) for _ in range(workers)]:
        future.result()
    return pool
