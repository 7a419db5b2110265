# SPDX-License-Identifier: Apache-2.0
"""The JSON that the API answers with: documented in `docs/api.md`, stable, secrets redacted.

Plain functions from records to dicts. Times are seconds since the epoch, sizes bytes.
"""

from __future__ import annotations

import re
import time

from ...processes.exits.exit_reason import ExitReason
from ...requests_db.records import Environment, Event, Json, Replica, Request, RequestError
from ...requests_db.states import ReplicaState, RequestState
from ...system.loop_lag import LagSnapshot
from ..dispatch.running import label_of
from .serving_view import serving_view, shard_exit_view

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|credential|private|auth|cookie|dsn|(?:^|_)(?:api)?keys?(?:_|$)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]*@")  # a password in an address


def redact(payload: Json) -> Json:
    """The payload with the values of its `env` hidden that look secret, by name or by content."""
    env = payload.get("env")
    if not isinstance(env, dict):
        return payload
    return {**payload, "env": {k: REDACTED if _is_secret(k, v) else v for k, v in env.items()}}


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def request_view(request: Request, pending_reason: str | None = None) -> Json:
    """One request. `pending_reason` says why a pending one does not run yet."""
    return {
        "id": request.id,
        "operation": request.operation,
        "label": label_of(request),
        "state": request.state,
        "schedule": request.schedule,
        "environment": request.environment,
        "priority": request.priority,
        "payload": redact(request.payload),
        "attempts": request.attempts,
        "max_attempts": request.max_attempts,
        "created_at": request.created_at,
        "started_at": request.started_at,
        "finished_at": request.finished_at,
        "cancel_requested_at": request.cancel_requested_at,
        "worker": request.worker,
        "timeout_seconds": request.timeout_seconds,
        "retry_oom": request.retry_oom,
        "memory_bytes": request.memory_bytes,
        "peak_bytes": request.peak_bytes,
        "result": request.result,
        "pending_reason": pending_reason if request.state is RequestState.PENDING else None,
        "error": error_view(request.error),
    }


def error_view(error: RequestError | None) -> Json | None:
    """Why something failed; None when nothing did."""
    if error is None:
        return None
    return {
        "kind": error.kind,
        "message": error.message,
        "hint": error.hint,
        "evidence": error.evidence,
        "log_tail": list(error.log_tail),
    }


def environment_view(
    environment: Environment, replicas: list[Replica], live: dict[str, Json]
) -> Json:
    """One environment with its replicas. `live` holds the shims' last status by replica id."""
    spec = environment.spec
    views = [replica_view(replica, live.get(replica.id)) for replica in replicas]
    known = [size for r in replicas if (size := _max_sessions(live.get(r.id)))]
    return {
        "name": environment.name,
        "state": environment.state,
        "address": environment.address,
        "sessions": sum(view["sessions"] for view in views),
        "max_sessions": sum(known) if known else spec.get("max_sessions"),
        "serving": serving_view(live.get(replica.id) for replica in replicas),
        "provider": spec.get("provider"),
        "source": spec.get("source"),
        "request_id": environment.request_id,
        "created_at": environment.created_at,
        "error": error_view(environment.error),
        "replicas": views,
    }


def replica_view(replica: Replica, live: Json | None) -> Json:
    """One replica, with its shim's last status."""
    return {
        "id": replica.id,
        "ordinal": replica.ordinal,
        "state": replica.state,
        "pid": replica.pid,
        "sessions": (live or {}).get("sessions", 0) if replica.state is ReplicaState.READY else 0,
        "restarts": replica.restarts,
        "exit": replica.exit,
        "message": _replica_message(replica),
        "shard_exit": shard_exit_view(live),
    }


def _max_sessions(live: Json | None) -> int | None:
    info = (live or {}).get("info") or {}  # None until the replica is ready
    size: int | None = info.get("max_sessions")
    return size


def _replica_message(replica: Replica) -> str | None:
    if replica.exit is None:
        return None
    how = ExitReason.from_json(replica.exit).sentence()
    if replica.state is ReplicaState.BACKING_OFF:
        return f"{how}; starting again"
    if replica.state is ReplicaState.READY:
        return f"its predecessor {how}"
    return how


def event_view(event: Event) -> Json:
    """One entry of the event log."""
    return {
        "seq": event.seq,
        "at": event.at,
        "kind": event.kind,
        "request_id": event.request_id,
        "environment": event.environment,
        "data": event.data,
    }


def daemon_view(identity: Json, counts: dict[str, int], sessions: int, lag: LagSnapshot) -> Json:
    """The daemon itself."""
    return {
        **identity,
        "uptime_seconds": time.time() - identity["started_at"],
        "requests": counts,
        "sessions": sessions,
        "loop": lag.to_json(),
    }
