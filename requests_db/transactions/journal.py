# SPDX-License-Identifier: Apache-2.0
"""The events of one transaction, and the tally that they change.

A transaction notes what it does, and writes it all at its end:

    journal = Journal()
    journal.moved(request, PENDING, RUNNING, now)     # checks the transition
    events = journal.write(connection)                # numbers, rows, tally

The tally's one row gives out the numbers: see `tables.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sqlalchemy import Connection

from ...schema.states import RequestState, check_transition
from ...system.text.json_lines import Json
from ..records import Event, Request
from ..sql import queries, statements
from ..sql.rows import to_json

REQUEST_STATE = "request.state"
REQUEST_PROGRESS = "request.progress"
ENVIRONMENT_STATE = "environment.state"
GENERATION_STATE = "generation.state"
REPLICA_STATE = "replica.state"

_STATE_TEXTS = {state: to_json({"state": state}) for state in RequestState}


@dataclass(slots=True)
class CurrentRequest:
    """The current state of a request before, and while, a batch is recorded."""

    id: str
    seq: int
    environment: str | None
    state: RequestState
    cancel_requested: bool


_Subject = Request | CurrentRequest
_Draft = tuple[float, str, _Subject | None, str | None, Json, str, Request | None]


class Journal:
    """The events that one transaction will write, and how the tally changes."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._moves: Counter[str] = Counter()

    def created(self, request: _Subject, at: float) -> None:
        """Record that a request was written."""
        self._moves[RequestState.PENDING] += 1
        self._state(request, RequestState.PENDING, at)

    def moved(
        self, request: _Subject, before: RequestState, after: RequestState, at: float
    ) -> None:
        """Record a change of state, with the request if it has the new state already.

        Raises `InvalidTransition`: the table of transitions does not allow it.
        """
        check_transition(request.id, before, after)
        self._moves[before] -= 1
        self._moves[after] += 1
        self._state(request, after, at)

    def removed(self, state: RequestState) -> None:
        """Record that a request was collected: no event, but it is no longer counted."""
        self._moves[state] -= 1

    def noted(self, kind: str, at: float, data: Json, about: _Subject | str) -> None:
        """Record an event that is no change of a request's state; a name is an environment's."""
        request, name = (None, about) if isinstance(about, str) else (about, about.environment)
        self._drafts.append((at, kind, request, name, data, to_json(data), None))

    def write(self, connection: Connection) -> tuple[Event, ...]:
        """Write the events and the tally; returns the events as they will be read."""
        if not self._drafts and not self._moves:
            return ()
        added = {f"add_{state.value.lower()}": self._moves[state] for state in RequestState}
        added["add_last_event"] = len(self._drafts)
        last: int = queries.scalar(connection, statements.ADD_TO_TALLY, added)
        if not self._drafts:
            return ()
        first = last - len(self._drafts) + 1
        rows, events = [], []
        for seq, draft in enumerate(self._drafts, first):
            at, kind, about, environment, data, text, request = draft
            id_, request_seq = (about.id, about.seq) if about else (None, None)
            subject = {"request_id": id_, "request_seq": request_seq, "environment": environment}
            rows.append({"seq": seq, "at": at, "kind": kind, "data": text} | subject)
            events.append(Event(seq, at, kind, id_, environment, data, request))
        queries.each(connection, statements.INSERT_EVENT, rows)
        return tuple(events)

    def _state(self, request: _Subject, state: RequestState, at: float) -> None:
        data = {"state": state.value}
        text = _STATE_TEXTS[state]
        whole = request if isinstance(request, Request) and request.state is state else None
        self._drafts.append((at, REQUEST_STATE, request, request.environment, data, text, whole))


def write_event(
    connection: Connection, kind: str, at: float, data: Json, environment: str
) -> Event:
    """Write the only event of a transaction, which is about an environment."""
    journal = Journal()
    journal.noted(kind, at, data, environment)
    return journal.write(connection)[0]
