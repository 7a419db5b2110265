# SPDX-License-Identifier: Apache-2.0
"""Every statement, built once. Portable SQL but for `OR REPLACE`; see also `connections.py`.

Each UPDATE of a state repeats its rule as a guard (`WHERE state = …`). States that a partial index
depends on are literals: see `tables.py`. SQLAlchemy leaves `FOR UPDATE` out for a database that
does not have it, such as SQLite, whose write transactions exclude each other anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    FromClause,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from ...schema.states import FINAL_STATES, EnvironmentState, GenerationState, RequestState
from ..records import RETRYING
from . import rows
from .tables import (
    environments,
    events,
    expectations,
    generations,
    marks,
    replicas,
    requests,
    tally,
)

_r, _e, _p, _v, _t = requests.c, environments.c, replicas.c, events.c, tally.c
_m, _g = marks.c, generations.c
_waiting = requests.alias("waiting")


def _literal(state: StrEnum) -> ColumnElement[str]:
    return literal_column(f"'{state.value}'")


def _literals(states: Iterable[StrEnum]) -> list[ColumnElement[str]]:
    return [_literal(state) for state in sorted(states)]


def _given(*columns: Column[Any]) -> dict[Column[Any], BindParameter[Any]]:
    """Each column takes a parameter named after it: `to_state`."""
    return {column: bindparam(f"to_{column.name}") for column in columns}


def _page(query: Select[Any], *order: ColumnElement[Any]) -> Select[Any]:
    """The first `up_to` rows of a query in this order."""
    return query.order_by(*order).limit(bindparam("up_to"))


_PENDING, _RUNNING = _literal(RequestState.PENDING), _literal(RequestState.RUNNING)
_is_live = _e.state.not_in(_literals(s for s in EnvironmentState if not s.is_live))

# The queue.

INSERT_REQUEST = insert(requests).returning(_r.seq)


def _head(row: FromClause, *columns: ColumnElement[Any]) -> Select[Any]:
    """The head of a schedule's queue, in its order."""
    is_waiting = (row.c.state == _PENDING, row.c.schedule == bindparam("of_schedule"))
    return _page(select(*columns).where(*is_waiting), row.c.rank, row.c.seq)


def _claimed(seqs: Any) -> ReturningUpdate[Any]:
    """The claim of the requests with these numbers that are still pending."""
    pending = update(requests).where(_r.state == _PENDING, _r.seq.in_(seqs))
    values = {"state": _RUNNING, "attempts": _r.attempts + 1, "started_at": bindparam("now")}
    return pending.values(values).returning(*rows.REQUESTS.columns)


CLAIM = _claimed(_head(_waiting, _waiting.c.seq).scalar_subquery())
# The first reads the head of the queue; the second claims the requests that were chosen from it.
FIRST_PENDING = _head(requests, *rows.REQUESTS.columns)
CLAIM_CHOSEN = _claimed(bindparam("seqs", expanding=True))
# The order of the queue; the claim's index answers it alone.
PLACES = _head(requests, _r.seq)

_RAN = (_r.worker, _r.worker_pid, _r.worker_started_at, _r.started_at)
_running = update(requests).where(_r.id == bindparam("of_id"), _r.state == _RUNNING)
STARTED = _running.values(_given(*_RAN))
# The worker, if it is known only now; a parameter that is NULL changes nothing.
FINISH = (
    _running.values(_given(_r.state, _r.finished_at, _r.result, _r.error, _r.peak_bytes))
    .values({c: func.coalesce(bindparam(f"to_{c.name}", type_=c.type), c) for c in _RAN})
    .returning(*rows.REQUESTS.columns)
)

# Before it began: the attempt does not count.
RELEASE = _running.values(state=_PENDING, attempts=_r.attempts - 1, started_at=None)

_back = _running.values({_r.state: _PENDING, **dict.fromkeys(_RAN)})
# After a lost daemon: the attempt does not count, the lost daemon does.
REQUEUE = _back.values(attempts=_r.attempts - 1, lost_daemons=_r.lost_daemons + 1)

# Killed for memory: the attempt counts, and the next one is given more.
RETRY = _back.values(memory_bytes=bindparam("to_memory_bytes"))

_cancelled = {_r.state: RequestState.CANCELLED.value, _r.finished_at: bindparam("now")}
_waits = update(requests).where(_r.id == bindparam("of_id"), _r.state == _PENDING)
CANCEL_PENDING = _waits.values({**_cancelled, _r.cancel_requested_at: bindparam("now")})

_not_asked = _running.where(_r.cancel_requested_at.is_(None))
ASK_TO_CANCEL = _not_asked.values(cancel_requested_at=bindparam("now"))

# Finding requests.

_requests = select(*rows.REQUESTS.columns)
REQUEST_BY_ID = _requests.where(_r.id == bindparam("of_id"))
REQUEST_BY_KEY = _requests.where(_r.idempotency_key == bindparam("key"))
REQUESTS_BY_PREFIX = _page(
    _requests.where(_r.id >= bindparam("lowest"), _r.id < bindparam("beyond")), _r.seq.desc()
)
# `finished_at IS NULL` lets both read the index of unfinished requests alone.
_unfinished = _requests.where(_r.finished_at.is_(None)).order_by(_r.seq)
RUNNING_REQUESTS = _unfinished.where(_r.state == _RUNNING)
CHANGES_OF = _unfinished.where(
    _r.environment == bindparam("of_environment"),
    _r.operation.in_(bindparam("operations", expanding=True)),
)
CURRENT = select(_r.id, _r.seq, _r.environment, _r.state, _r.cancel_requested_at).where(
    _r.id.in_(bindparam("ids", expanding=True))
)

# Memory estimates.

# A row that replaces another one gets a higher number than all others.
_row_number: ColumnElement[int] = literal_column("rowid")
LATEST_ESTIMATES = _page(select(*rows.ESTIMATES.columns), _row_number.desc())
REPLACE_ESTIMATE = insert(expectations).prefix_with("OR REPLACE")
_latest = _page(select(_row_number).select_from(expectations), _row_number.desc())
DELETE_OLD_ESTIMATES = delete(expectations).where(_row_number.not_in(_latest))


def newest_requests(states: Set[RequestState], given: Set[str]) -> Select[Any]:
    """Requests, newest first; in any of `states` (none: all).

    There is a condition for each parameter given, of `of_operation` and `of_environment`.

    A rare final state other than FAILED, and a rare operation alone, scan the table: 15 to 110 ms
    at 100,000 rows, where `keep_requests` leaves 10,000 by default. That is not worth an index that
    each insert would write.
    """
    query = _requests
    if states == {RequestState.FAILED}:
        query = query.where(_r.state == _literal(RequestState.FAILED))  # IN misses their index
    elif states:
        query = query.where(_r.state.in_(_literals(states)))
    if states and not states & FINAL_STATES:
        query = query.where(_r.finished_at.is_(None))  # for the index of unfinished requests
    if "of_operation" in given:
        query = query.where(_r.operation == bindparam("of_operation"))
    if "of_environment" in given:
        query = query.where(_r.environment == bindparam("of_environment"))
    return _page(query, _r.seq.desc())


# Events and the tally.

ADD_TO_TALLY = (
    update(tally)
    .where(_t.id == 1)
    .values({c: c + bindparam(f"add_{c.name}") for c in _t if c not in {_t.id, _t.run_seconds}})
    .returning(_t.last_event)
)
TALLY = select(*(_t[state.value.lower()] for state in RequestState))
PENDING_TALLY = select(_t.pending)
# Only read when that many wait in both schedules together; the claim's index answers it alone.
PENDING_OF = (
    select(func.count())
    .select_from(requests)
    .where(_r.state == _PENDING, _r.schedule == bindparam("of_schedule"))
)
LAST_EVENT = select(_t.last_event)
INSERT_EVENT = insert(events)

_events = select(*rows.EVENTS.columns)
EVENTS_AFTER = _page(_events.where(_v.seq > bindparam("after_seq")), _v.seq)
_request_seq = select(_r.seq).where(_r.id == bindparam("of_request")).scalar_subquery()
EVENTS_OF_AFTER = EVENTS_AFTER.where(_v.request_seq == _request_seq)
_events_of = _events.where(_v.request_seq == _request_seq)
NEWEST_EVENTS_OF = _page(_events_of, _v.seq.desc())
RETRIES_OF = _events_of.where(_v.data.contains(f'"{RETRYING}"')).order_by(_v.seq)

_events_of_request = select(_v.seq).where(_v.request_seq == _r.seq)
_first_event = _events_of_request.order_by(_v.seq).limit(1).scalar_subquery()
_last_event = _events_of_request.order_by(_v.seq.desc()).limit(1).scalar_subquery()
LAST_EVENTS_OF = select(_r.id, _last_event).where(_r.id.in_(bindparam("ids", expanding=True)))
# Events of environments and replicas: the index by request has those without one, in their order.
_of_none = select(_v.environment, _v.seq).where(_v.request_seq.is_(None))
EVENTS_OF_NONE = _page(_of_none.where(_v.seq > bindparam("after_seq")), _v.seq)

# Environments and replicas.

ENVIRONMENT_BY_NAME = select(*rows.ENVIRONMENTS.columns).where(_e.name == bindparam("of_name"))
ALL_ENVIRONMENTS = select(*rows.ENVIRONMENTS.columns).order_by(_e.name)
ENVIRONMENTS_NOT_STOPPED = ALL_ENVIRONMENTS.where(_e.state != EnvironmentState.STOPPED.value)
# Environments of which nothing but a failed launch is known.
_is_failed_launch = and_(
    _e.state == EnvironmentState.FAILED.value,
    _r.id == _e.request_id,
    _r.state == RequestState.FAILED.value,
)
_failed_launches = select(_r.seq).where(_is_failed_launch)
_newest = select(_page(_failed_launches, _r.seq.desc()).subquery().c.seq)
NEVER_LAUNCHED = _requests.where(_r.seq.in_(_newest)).order_by(_r.seq.desc())
NEVER_LAUNCHED_COUNT = select(func.count()).select_from(_failed_launches.subquery())
LAUNCHED_ENVIRONMENTS = ENVIRONMENTS_NOT_STOPPED.where(~exists().where(_is_failed_launch))
NAMES = select(_e.name).where(_is_live).order_by(_e.name)
REPLACE_ENVIRONMENT = insert(environments).prefix_with("OR REPLACE")
DELETE_ENVIRONMENT = delete(environments).where(_e.name == bindparam("of_name"))
_environment = update(environments).where(_e.name == bindparam("of_name"))
MOVE_ENVIRONMENT = _environment.where(_e.state == bindparam("from_state")).values(
    _given(_e.state, _e.updated_at, _e.address, _e.error)
)
ENDED_ENVIRONMENTS = select(_e.name).where(~_is_live).order_by(_e.name)
LAUNCHES = select(_e.request_id, _e.name).where(_e.request_id.is_not(None))
_is_old: BindParameter[int] = bindparam("old")
# The ended environments among `names` whose requests have no event after `old`.
FORGOTTEN_ENVIRONMENTS = ENDED_ENVIRONMENTS.where(
    _e.name.in_(bindparam("names", expanding=True)),
    ~exists().where(_r.environment == _e.name, _v.request_seq == _r.seq, _v.seq > _is_old),
)

# Newest first.
_generations = select(*rows.GENERATIONS.columns)
_of_environment = _g.environment == bindparam("of_environment")
GENERATIONS_OF = _generations.where(_of_environment).order_by(_g.number.desc())
# Generations whose launches are under way, or whose sessions end.
UNSETTLED_GENERATIONS = _generations.where(
    _g.state.in_(_literals([GenerationState.STARTING, GenerationState.DRAINING]))
)
INSERT_GENERATION = insert(generations)
_generation = (_of_environment, _g.number == bindparam("of_number"))
GENERATION = _generations.where(*_generation)
MOVE_GENERATION = (
    update(generations)
    .where(*_generation, _g.state == bindparam("from_state"))
    .values(_given(_g.state, _g.served_at, _g.ended_at, _g.error))
)
DELETE_GENERATIONS = delete(generations).where(
    _of_environment, _g.number <= bindparam("up_to_number")
)

REPLICA_BY_ID = select(*rows.REPLICAS.columns).where(_p.id == bindparam("of_id"))
ALL_REPLICAS = select(*rows.REPLICAS.columns).order_by(_p.environment, _p.ordinal, _p.id)
REPLICAS_OF = ALL_REPLICAS.where(_p.environment == bindparam("of_environment"))
REPLICA_STATES_OF = REPLICAS_OF.with_only_columns(_p.id, _p.state)
REPLACE_REPLICA = insert(replicas).prefix_with("OR REPLACE")
DELETE_REPLICA = delete(replicas).where(_p.id == bindparam("of_id"))
DELETE_REPLICAS_OF = delete(replicas).where(_p.environment == bindparam("of_environment"))
DELETE_REPLICAS_LIKE = DELETE_REPLICAS_OF.where(_p.id.like(bindparam("like")))

# Retention. A row is old if it had no event since the one that `OLD_EVENT` names.

ADD_RUN_SECONDS = (
    update(tally)
    .values(run_seconds=_t.run_seconds + bindparam("elapsed"))
    .returning(_t.run_seconds, _t.last_event)
)
RUN_SECONDS = select(_t.run_seconds)
NEWEST_MARK = select(func.max(_m.run_seconds))
INSERT_MARK = insert(marks)
_passed = select(func.max(_m.run_seconds)).where(_m.run_seconds <= bindparam("until"))
OLD_EVENT = select(_m.last_event).where(_m.run_seconds == _passed.scalar_subquery())
DELETE_MARKS = delete(marks).where(_m.run_seconds < _passed.scalar_subquery())
LATEST_ARRIVAL = select(func.max(_r.rank + rows.PRIORITY_STEP_SECONDS * _r.priority)).where(
    _r.finished_at.is_(None)
)

# Launches of live environments, and earlier ones, which `openenv retry` can launch again.
_launches_to_keep = (
    select(_g.request_id)
    .join(environments, _e.name == _g.environment)
    .where(_e.state != EnvironmentState.STOPPED.value)
)
_is_kept = case(  # the list is made only where a launch is among them
    (_r.operation == literal_column("'launch'"), _r.id.in_(_launches_to_keep)), else_=False
)
_aged = select(_r.id, _r.seq, _r.state, _first_event, _last_event, _is_kept)
AGED_REQUESTS = _page(_aged.where(_r.seq > bindparam("after_seq")), _r.seq)
DELETE_REQUESTS = delete(requests).where(_r.seq.in_(bindparam("seqs", expanding=True)))
DELETE_EVENTS_OF = delete(events).where(_v.request_seq.in_(bindparam("seqs", expanding=True)))
# Events that belong to no request: an environment's, a replica's.
_old_events = select(_v.seq).where(_v.request_seq.is_(None), _v.seq <= _is_old)
DELETE_OLD_EVENTS = delete(events).where(_v.seq.in_(_old_events.limit(bindparam("up_to"))))
