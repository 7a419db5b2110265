# SPDX-License-Identifier: Apache-2.0
"""`DispatchStore`: the queue as the dispatcher's thread sees it.

Every method is one transaction (`collect`: several), blocks until it is done, and returns the
events it has written, for the caller to push. One thread at a time; which one may change.

Raises, everywhere: `DatabaseError`. Nothing of a transaction that raised has been done, and the
same call may simply be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

from .connections.link import Link
from .records import Event, Expectation, Outcome, Request, Retry
from .results import Claim, OutcomeResult, Recovery
from .sql import queries
from .states import Schedule
from .transactions import dispatching, recovery, retention
from .transactions.dispatching import ProgressRow, StartedRow


class DispatchStore:
    """Claims, records, recovers and collects."""

    def __init__(self, where: Path | str) -> None:
        """`where` is the database's file, or its address. Connects when first used."""
        self._link = Link(where, writes=True)

    def close(self) -> None:
        """Let go of the file."""
        self._link.close()

    def claim(self, schedule: Schedule, limit: int, now: float) -> Claim:
        """Take up to `limit` pending requests, by their place in the queue.

        They are RUNNING and their attempt is counted when this returns; no other claim, in this
        process or another, gets the same one.
        """
        with self._link.transaction() as connection:
            return dispatching.claim(connection, schedule, limit, now)

    def first_pending(self, schedule: Schedule, limit: int) -> list[Request]:
        """The head of the queue, left where it is."""
        with self._link.transaction() as connection:
            return queries.first_pending(connection, schedule, limit)

    def claim_chosen(self, requests: Sequence[Request], now: float) -> Claim:
        """Take these, as far as they are still pending: `claim` for whoever chooses himself."""
        with self._link.transaction() as connection:
            return dispatching.claim_chosen(connection, [r.seq for r in requests], now)

    def record(
        self,
        *,
        started: Sequence[StartedRow] = (),
        progress: Sequence[ProgressRow] = (),
        outcomes: Sequence[Outcome] = (),
        retries: Sequence[Retry] = (),
        learned: Sequence[Expectation] = (),
    ) -> list[Event]:
        """Write everything that was reported, in one transaction.

        What no longer applies (a second outcome, one of an unknown request) is dropped.
        """
        with self._link.transaction() as connection:
            events, _ = dispatching.record(connection, started, progress, outcomes, retries)
            dispatching.learn(connection, learned)
        return list(events)

    def record_started(self, started: Sequence[StartedRow]) -> None:
        """Which worker took which request: (id, worker, pid, pid_started_at, at)."""
        self.record(started=started)

    def record_progress(self, progress: Sequence[ProgressRow]) -> list[Event]:
        """What operations said on their way: (id, data, at)."""
        return self.record(progress=progress)

    def record_outcomes(self, outcomes: Sequence[Outcome]) -> list[OutcomeResult]:
        """How requests ended; what became of each outcome, in the same order.

        Raises:
            InvalidTransition: for an outcome whose state is not final.
        """
        with self._link.transaction() as connection:
            _, results = dispatching.record(connection, (), (), outcomes)
        return results

    def release(self, ids: Sequence[str], now: float) -> list[Event]:
        """Give back what was claimed and never submitted; its attempt does not count."""
        with self._link.transaction() as connection:
            return list(dispatching.release(connection, ids, now))

    def running(self) -> list[Request]:
        """What stands as running: before `recover`, the work of a lost daemon."""
        with self._link.transaction() as connection:
            return queries.running(connection)

    def recover(self, now: float, *, idempotent: Set[str]) -> Recovery:
        """Settle what a lost daemon left running. `idempotent` names operations to run again."""
        with self._link.transaction() as connection:
            return recovery.recover(connection, now, idempotent)

    def pending_count(self, schedule: Schedule) -> int:
        """How many requests of this schedule wait."""
        with self._link.transaction() as connection:
            return queries.pending_count(connection, schedule)

    def expectations(self, limit: int) -> list[Expectation]:
        """What peaks have taught, the latest first."""
        with self._link.transaction() as connection:
            return queries.expectations(connection, limit)

    def collect(self, now: float, keep_requests: int, keep_seconds: float) -> list[str]:
        """Remove ended requests beyond the newest `keep_requests`, or older than `keep_seconds`.

        Their events go too. The launch of a live environment stays. Returns the removed ids, so
        that the caller can remove their logs.
        """
        removed: list[str] = []
        while batch := self._collect_batch(now, keep_requests, keep_seconds):
            removed += batch
        with self._link.transaction() as connection:
            retention.collect_old_events(connection, now, keep_seconds)
            retention.collect_old_expectations(connection, now, keep_seconds)
        return removed

    def collect_environments(self, now: float, keep_seconds: float) -> list[str]:
        """Remove environments that ended longer than `keep_seconds` ago; their names."""
        with self._link.transaction() as connection:
            return retention.collect_environments(connection, now, keep_seconds)

    def _collect_batch(self, now: float, keep_requests: int, keep_seconds: float) -> list[str]:
        with self._link.transaction() as connection:
            return retention.collect(connection, now, keep_requests, keep_seconds)
