# SPDX-License-Identifier: Apache-2.0
"""Removes what is old: ended requests with their events, environments that ended long ago.

No wall clock says how long ago something happened, since it may step by a day or by years. It is
how long daemons have run since. `note_time` adds to these seconds and, now and then, marks which
event was the last: what had no event since a mark that is old enough is old.

What may be much is done in steps, each a short transaction: generators give other writers their
turn between two. No step looks at everything there is. Requests are looked at from the oldest on,
and those after the first that is neither beyond the number to keep nor old are newer still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection

from ...schema.states import RequestState
from ..connections import WriteConnection
from ..sql import queries, statements
from . import observing
from .journal import Journal

BATCH = 100  # requests, or others, of one step: tens of milliseconds at most on a slow disk
EVENTS_BATCH = 2000  # events that are only read
MAX_ESTIMATES = 1000  # operations and sources; the latest are read again by the next daemon
_MARKS = 100  # for the time that things are kept: it is kept to the hundredth part


class Aged(NamedTuple):
    """A request, as its age is judged."""

    id: str
    seq: int
    state: str
    first_event: int | None
    last_event: int | None
    is_kept: bool  # the launch of an environment that may run, or of its history


@dataclass
class Progress:
    """The place up to which requests have been examined, the oldest first."""

    old_event: int
    excess: int  # how many of the oldest ended requests are more than are to be kept
    seq: int = 0  # of the last that was looked at
    ended: int = 0  # how many of these have ended
    is_over: bool = False

    def choose(self, rows: Sequence[Aged]) -> list[Aged]:
        """Return which of the next requests are removed."""
        chosen = []
        for row in rows:
            is_beyond = self.ended < self.excess
            if not is_beyond and (row.first_event or 0) > self.old_event:
                self.is_over = True
                break
            self.seq = row.seq
            if RequestState(row.state).is_final:
                self.ended += 1
                is_old = (row.last_event or 0) <= self.old_event
                if (is_beyond or is_old) and not row.is_kept:
                    chosen.append(row)
        self.is_over |= not rows
        return chosen


def note_time(connection: Connection, elapsed_seconds: float, keep_seconds: float) -> int:
    """Add to the time that daemons have run; returns the last event that is older than to be kept.

    `elapsed_seconds` is for how long the daemon has run since it noted that before.
    """
    added = queries.row(connection, statements.ADD_RUN_SECONDS, {"elapsed": elapsed_seconds})
    run_seconds, last_event = added
    newest = queries.scalar(connection, statements.NEWEST_MARK, {})
    if newest is None or run_seconds - newest > keep_seconds / _MARKS:
        mark = {"run_seconds": run_seconds, "last_event": last_event}
        queries.each(connection, statements.INSERT_MARK, [mark])
    until = {"until": run_seconds - keep_seconds}
    queries.each(connection, statements.DELETE_MARKS, [until])
    passed = queries.row(connection, statements.OLD_EVENT, until)
    return 0 if passed is None else int(passed[0])


def collect(store: WriteConnection, old_event: int, keep_requests: int) -> Iterator[list[str]]:
    """Remove ended requests with their events; never a launch of an environment that may run.

    Those go that have no event after `old_event`, or are more than the newest `keep_requests`; then
    old events of environments and replicas, and memory estimates beyond the latest. Yields the ids
    of the requests that a step has removed.
    """
    progress = store.write(_begin, old_event, keep_requests)
    while not progress.is_over:
        yield store.write(_collect_requests, progress)
    while store.write(_collect_events, old_event):
        yield []
    keep = {"up_to": MAX_ESTIMATES}
    store.write(lambda connection: connection.execute(statements.DELETE_OLD_ESTIMATES, keep))


def _begin(connection: Connection, old_event: int, keep_requests: int) -> Progress:
    counts = dict(zip(RequestState, queries.row(connection, statements.TALLY, {}), strict=True))
    ended = sum(count for state, count in counts.items() if state.is_final)
    return Progress(old_event, ended - keep_requests)


def _collect_requests(connection: Connection, progress: Progress) -> list[str]:
    parameters = {"after_seq": progress.seq, "up_to": BATCH}
    rows = progress.choose([
        Aged(*row) for row in queries.rows(connection, statements.AGED_REQUESTS, parameters)
    ])  # fmt: skip
    if not rows:
        return []
    seqs = [row.seq for row in rows]
    journal = Journal()
    for row in rows:
        journal.removed(RequestState(row.state))
    connection.execute(statements.DELETE_EVENTS_OF, {"seqs": seqs})
    connection.execute(statements.DELETE_REQUESTS, {"seqs": seqs})
    journal.write(connection)
    return [row.id for row in rows]


def _collect_events(connection: Connection, old_event: int) -> int:
    """Remove some old events that belong to no request; how many."""
    parameters = {"old": old_event, "up_to": EVENTS_BATCH}
    return connection.execute(statements.DELETE_OLD_EVENTS, parameters).rowcount


class Ages:
    """The last events of requests and environments, read in steps. Nothing is indexed for it."""

    def __init__(self, store: WriteConnection) -> None:
        self._store = store
        self._environments: dict[str, int] = {}  # of the events that belong to no request
        self._read_to = 0

    def read(self) -> Iterator[None]:
        """Read the events of environments and replicas that were not read yet."""
        while rows := self._store.read(queries.events_of_none(self._read_to, EVENTS_BATCH)):
            self._environments |= rows
            self._read_to = max(rows.values())
            yield

    def collect_environments(self, old_event: int) -> Iterator[list[str]]:
        """Remove ended environments that had no event after `old_event`; yields their names."""
        ended = self._store.read(queries.ENDED_ENVIRONMENTS)
        old = [name for name in ended if self._environments.get(name, 0) <= old_event]
        for start in range(0, len(old), BATCH):
            yield self._store.write(_collect_some, old[start : start + BATCH], old_event)

    def of_logs(self, request_ids: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yield the last events of some requests, or of the environments that they launched."""
        launches = self._store.read(queries.LAUNCHES)
        for start in range(0, len(request_ids), BATCH):
            ids = request_ids[start : start + BATCH]
            found = self._store.write(_last_events, ids)
            for request_id in ids:
                if (name := launches.get(request_id)) is not None:
                    of_environment = self._environments.get(name, 0)
                    found[request_id] = max(found.get(request_id, 0), of_environment)
            yield found


def _collect_some(connection: Connection, names: Sequence[str], old_event: int) -> list[str]:
    parameters = {"names": names, "old": old_event}
    forgotten = list(connection.execute(statements.FORGOTTEN_ENVIRONMENTS, parameters).scalars())
    for name in forgotten:
        connection.execute(statements.DELETE_REPLICAS_OF, {"of_environment": name})
        connection.execute(statements.DELETE_ENVIRONMENT, {"of_name": name})
        observing.forget(connection, name)
    return forgotten


def _last_events(connection: Connection, request_ids: Sequence[str]) -> dict[str, int]:
    rows = connection.execute(statements.LAST_EVENTS_OF, {"ids": request_ids}).all()
    return {request_id: seq for request_id, seq in rows if seq is not None}
