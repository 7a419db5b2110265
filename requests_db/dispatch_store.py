# SPDX-License-Identifier: Apache-2.0
"""`DispatchStore`: the queue as the dispatcher's thread sees it.

Every method is one transaction (`collect`: several), blocks until it is done, and returns the
events it has written, for the caller to publish. One thread at a time; which one may change.

Every method may raise `DatabaseError`. Nothing of a transaction that raised has been done, and the
same call may simply be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TypeVar

from .connections.write_connection import WriteConnection
from .records import Event, MemoryEstimate, Outcome, Request, Retry
from .results import Claim, Recovery
from .sql.queries import Query
from .states import Schedule
from .transactions import dispatching, recovery, retention
from .transactions.dispatching import ProgressRow, StartedRow

R = TypeVar("R")


class DispatchStore:
    """Claims, records, recovers and collects."""

    def __init__(self, path: Path | str, *, syncs: bool = False) -> None:
        """Connects to the database in the file `path` when first used.

        With `syncs`, what is written survives a power cut too.
        """
        self._connection = WriteConnection(path, syncs=syncs)

    def close(self) -> None:
        """Close the connection; the next call would open another."""
        self._connection.close()

    def claim(self, schedule: Schedule, limit: int, now: float) -> Claim:
        """Take up to `limit` pending requests, by their place in the queue.

        They are RUNNING and their attempt is counted when this returns; no other claim, in this
        process or another, gets the same one.
        """
        with self._connection.transaction() as connection:
            return dispatching.claim(connection, schedule, limit, now)

    def claim_chosen(self, requests: Sequence[Request], now: float) -> Claim:
        """Take these requests, as far as they are still pending: `claim` for a caller's choice."""
        with self._connection.transaction() as connection:
            return dispatching.claim_chosen(connection, [r.seq for r in requests], now)

    def record(
        self,
        *,
        started: Sequence[StartedRow] = (),
        progress: Sequence[ProgressRow] = (),
        outcomes: Sequence[Outcome] = (),
        retries: Sequence[Retry] = (),
        learned: Sequence[MemoryEstimate] = (),
    ) -> list[Event]:
        """Write everything that was reported, in one transaction.

        What no longer applies (a second outcome, one of an unknown request) is dropped.

        Args:
            started: which worker took which request: (id, worker, pid, pid_started_at, at).
            progress: what operations reported while they ran: (id, data, at).
            outcomes: how requests ended.
            retries: requests that go back to the queue.
            learned: memory estimates, in the place of those known before.

        Raises:
            InvalidTransition: an outcome's state is not final.
        """
        with self._connection.transaction() as connection:
            events = dispatching.record(connection, started, progress, outcomes, retries)
            dispatching.learn(connection, learned)
        return list(events)

    def release(self, ids: Sequence[str], now: float) -> list[Event]:
        """Give back requests that were claimed and never submitted; the attempt does not count."""
        with self._connection.transaction() as connection:
            return list(dispatching.release(connection, ids, now))

    def recover(self, now: float, *, idempotent: Set[str]) -> Recovery:
        """Settle what a lost daemon left running. `idempotent` names operations to run again."""
        with self._connection.transaction() as connection:
            return recovery.recover(connection, now, idempotent)

    def note_time(self, elapsed_seconds: float, keep_seconds: float) -> int:
        """Add to the time that daemons have run; the last event that is older than to be kept."""
        with self._connection.transaction() as connection:
            return retention.note_time(connection, elapsed_seconds, keep_seconds)

    def collect(self, old_event: int, keep_requests: int) -> list[str]:
        """Remove ended requests beyond the newest `keep_requests`, or without a newer event.

        Their events go too. The launch of a live environment stays. Returns the removed ids, so
        that the caller can remove their logs.
        """
        removed: list[str] = []
        while True:
            with self._connection.transaction() as connection:
                batch = retention.collect(connection, old_event, keep_requests)
                if not batch:
                    retention.collect_old(connection, old_event)
                    return removed
            removed += batch

    def collect_environments(self, old_event: int) -> list[str]:
        """Remove ended environments that had no event after `old_event`; their names."""
        with self._connection.transaction() as connection:
            return retention.collect_environments(connection, old_event)

    def read(self, query: Query[R]) -> R:
        """The query's answer."""
        with self._connection.transaction() as connection:
            return query.run(connection)
