# SPDX-License-Identifier: Apache-2.0
"""Between rows and records: the order of columns, and JSON."""

from __future__ import annotations

import json
from typing import Any

import orjson

from ..records import (
    Environment,
    Event,
    Expectation,
    NewRequest,
    PeakSample,
    Replica,
    Request,
    RequestError,
)
from ..states import EnvironmentState, ErrorKind, ReplicaState, RequestState, Schedule
from .tables import environments, events, replicas, requests

# A step of priority is worth so long a wait: whoever waits longer than that is ahead of whoever
# came later and one step more urgent, so nobody waits for ever.
PRIORITY_STEP_SECONDS = 60.0

Row = Any  # a tuple in the order of the columns below
Values = dict[str, Any]

_r = requests.c
REQUEST_COLUMNS = (
    _r.seq,
    _r.id,
    _r.operation,
    _r.schedule,
    _r.payload,
    _r.state,
    _r.created_at,
    _r.environment,
    _r.priority,
    _r.idempotency_key,
    _r.attempts,
    _r.max_attempts,
    _r.timeout_seconds,
    _r.started_at,
    _r.finished_at,
    _r.cancel_requested_at,
    _r.worker,
    _r.worker_pid,
    _r.worker_started_at,
    _r.peak_bytes,
    _r.result,
    _r.error,
    _r.retry_oom,
    _r.memory_bytes,
)
ENVIRONMENT_COLUMNS = tuple(environments.c)
REPLICA_COLUMNS = tuple(replicas.c)
_v = events.c
EVENT_COLUMNS = (_v.seq, _v.at, _v.kind, _v.request_id, _v.environment, _v.data)

_STATES = {state.value: state for state in RequestState}
_SCHEDULES = {schedule.value: schedule for schedule in Schedule}


def to_json(value: Any) -> str:
    """`value` as JSON text."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer beyond 64 bits, half a surrogate pair: rare, and valid JSON
        return json.dumps(value)


def from_json(text: str) -> Any:
    """What `to_json` wrote."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def error_to_json(error: RequestError | None) -> str | None:
    """An error as its column holds it."""
    if error is None:
        return None
    return to_json(
        {
            "kind": error.kind,
            "message": error.message,
            "hint": error.hint,
            "evidence": error.evidence,
            "log_tail": list(error.log_tail),
        }
    )


def error_from_json(text: str | None) -> RequestError | None:
    """What `error_to_json` wrote."""
    if text is None:
        return None
    data = from_json(text)
    return RequestError(
        ErrorKind(data["kind"]),
        data["message"],
        data["hint"],
        data["evidence"],
        tuple(data["log_tail"]),
    )


def request_of(row: Row) -> Request:
    """The request in a row of `REQUEST_COLUMNS`."""
    seq, id_, operation, schedule, payload, state, created_at, environment, priority, key = row[:10]
    attempts, max_attempts, timeout, started_at, finished_at, cancel_requested_at = row[10:16]
    worker, worker_pid, worker_started_at, peak_bytes, result, error = row[16:22]
    retry_oom, memory_bytes = row[22:]
    return Request(
        id_,
        operation,
        _SCHEDULES[schedule],
        from_json(payload),
        _STATES[state],
        created_at,
        environment,
        priority,
        key,
        attempts,
        max_attempts,
        timeout,
        started_at,
        finished_at,
        cancel_requested_at,
        worker,
        worker_pid,
        worker_started_at,
        peak_bytes,
        None if result is None else from_json(result),
        None if error is None else error_from_json(error),
        seq,
        bool(retry_oom),
        memory_bytes,
    )


def new_request(request_id: str, new: NewRequest, now: float) -> Request:
    """`new` as it will stand in the table, but for its `seq`."""
    return Request(
        id=request_id,
        operation=new.operation,
        schedule=new.schedule,
        payload=new.payload,
        state=RequestState.PENDING,
        created_at=now,
        environment=new.environment,
        priority=new.priority,
        idempotency_key=new.idempotency_key,
        max_attempts=new.max_attempts,
        timeout_seconds=new.timeout_seconds,
        retry_oom=new.retry_oom,
    )


def insert_values(request: Request) -> Values:
    """What a new request's INSERT is given."""
    return {
        "id": request.id,
        "operation": request.operation,
        "schedule": request.schedule.value,
        "payload": to_json(request.payload),
        "state": request.state.value,
        "created_at": request.created_at,
        "environment": request.environment,
        "priority": request.priority,
        "idempotency_key": request.idempotency_key,
        "attempts": request.attempts,
        "max_attempts": request.max_attempts,
        "timeout_seconds": request.timeout_seconds,
        "rank": rank_of(request.created_at, request.priority),
        "retry_oom": int(request.retry_oom),
    }


def rank_of(created_at: float, priority: int) -> float:
    """The place in the queue, smallest first."""
    return created_at - PRIORITY_STEP_SECONDS * priority


def environment_of(row: Row) -> Environment:
    """The environment in a row of `ENVIRONMENT_COLUMNS`."""
    name, spec, state, created_at, updated_at, request_id, address, error = row
    return Environment(
        name,
        from_json(spec),
        EnvironmentState(state),
        created_at,
        updated_at,
        request_id,
        address,
        error_from_json(error),
    )


def environment_values(environment: Environment) -> Values:
    """Every column of an environment."""
    return {
        "name": environment.name,
        "spec": to_json(environment.spec),
        "state": environment.state.value,
        "created_at": environment.created_at,
        "updated_at": environment.updated_at,
        "request_id": environment.request_id,
        "address": environment.address,
        "error": error_to_json(environment.error),
    }


def replica_of(row: Row) -> Replica:
    """The replica in a row of `REPLICA_COLUMNS`."""
    id_, environment, ordinal, provider, state, run_dir, started_at, pid, restarts, exit_ = row
    return Replica(
        id_,
        environment,
        ordinal,
        provider,
        ReplicaState(state),
        run_dir,
        started_at,
        pid,
        restarts,
        None if exit_ is None else from_json(exit_),
    )


def replica_values(replica: Replica) -> Values:
    """Every column of a replica."""
    return {
        "id": replica.id,
        "environment": replica.environment,
        "ordinal": replica.ordinal,
        "provider": replica.provider,
        "state": replica.state.value,
        "run_dir": replica.run_dir,
        "started_at": replica.started_at,
        "pid": replica.pid,
        "restarts": replica.restarts,
        "exit": None if replica.exit is None else to_json(replica.exit),
    }


def event_of(row: Row) -> Event:
    """The event in a row of `EVENT_COLUMNS`."""
    seq, at, kind, request_id, environment, data = row
    return Event(seq, at, kind, request_id, environment, from_json(data))


def expectation_of(row: Row) -> Expectation:
    """What a row of `expectations` holds."""
    operation, source, samples, updated_at = row
    return Expectation(
        operation, source, tuple(PeakSample(*sample) for sample in from_json(samples)), updated_at
    )


def expectation_values(expectation: Expectation) -> Values:
    """Every column of an expectation."""
    samples = [[s.at, s.peak_bytes, s.killed] for s in expectation.samples]
    return {
        "operation": expectation.operation,
        "source": expectation.source,
        "samples": to_json(samples),
        "updated_at": expectation.updated_at,
    }
