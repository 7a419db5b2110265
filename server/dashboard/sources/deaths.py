# SPDX-License-Identifier: Apache-2.0
"""Deaths for memory as the page shows them: what died, the evidence, and what to do next. Pure.

`again` says what the button beside the command does: submit `request_id` once more, with `limits`
(`POST /v1/requests/{id}/retry`). It is None where the command is for a terminal alone.
"""

from __future__ import annotations

import re

from ....requests_db.records import Environment, Event, Replica, Request
from ....schema.states import ReplicaState
from ....system.process.exit_reason import ExitKind, ExitReason
from ....system.text.hidden_values import hide_credentials
from ....system.text.json_lines import Json
from ...api.views import error_view
from ...dispatch.outcomes import MoreMemory, is_over_session_limit, more_memory_after
from ...dispatch.running import label_of

_MEMORY = re.compile(r"--memory (\d+)M")
# Of these states, a replica's last death is not yet followed by a restart.
_DOWN = frozenset({ReplicaState.BACKING_OFF, ReplicaState.FAILED})


def death_of_request(request: Request) -> Json:
    """A worker that died, or a replica that a request was starting."""
    assert request.error is not None
    error = error_view(request.error, request.payload) or {}
    suggested = _MEMORY.search(request.error.hint or "")
    megabytes = int(suggested[1]) if suggested else None
    again = None
    if megabytes is not None and request.operation in ("launch", "rollout"):
        again = _again(MoreMemory(request.id, "memory_mb", megabytes))
    return {
        "id": request.id,
        "at": request.finished_at,
        "subject": hide_credentials(label_of(request)),
        "environment": hide_credentials(request.environment),
        "message": error["message"],
        "hint": error["hint"],
        "evidence": _evidence(error["evidence"]),
        "log_tail": error["log_tail"],
        "log": f"#/request/{request.id}",
        "again": again,
    }


def death_of_attempt(request: Request, event: Event) -> Json:
    """A worker or a replica that died, after which its request was queued again with more."""
    error: Json = event.data.get("error") or {}
    return {
        "id": f"{request.id}:{event.seq}",
        "at": event.at,
        "subject": hide_credentials(label_of(request)),
        "environment": hide_credentials(request.environment),
        "message": hide_credentials(event.data["message"]),
        "hint": None,
        "evidence": _evidence(error.get("evidence")),
        "log_tail": hide_credentials(error.get("log_tail") or []),
        "log": f"#/request/{request.id}",
        "again": None,
        "runs_again_with_bytes": event.data.get("memory_bytes"),
    }


def death_of_replica(replica: Replica, environment: Environment, at: float | None) -> Json | None:
    """The last death of a replica's server, seen at this time; None: it was not for memory."""
    reason = replica.exit
    if reason is None or reason.get("kind") != ExitKind.OOM_KILLED:
        return None
    exited = ExitReason.from_json(reason)
    return _of_environment(environment, exited, more_memory_after(environment, exited)) | {
        # Pids alone are not enough: those of instances of some engines are not known.
        "id": f"{replica.id}:{exited.pid}:{replica.restarts + (replica.state in _DOWN)}",
        "at": at,
        "subject": f"{environment.name} replica {replica.ordinal}",
        "message": exited.sentence(),
    }


def death_of_shard(replica: Json, environment: Environment) -> Json | None:
    """The last death of a process below a server that lives on: a shard, a session, a program."""
    last: Json = next((one for one in replica["exits"] if not one.get("server")), {})
    reason = last.get("reason")
    if reason is None or reason.get("kind") != ExitKind.OOM_KILLED:
        return None
    exited = ExitReason.from_json(reason)
    more = more_memory_after(environment, exited, is_session=is_over_session_limit(last))
    return _of_environment(environment, exited, more) | {
        "id": f"{replica['id']}:{last.get('pid') or last.get('number')}",
        "at": last.get("at"),
        "subject": f"{environment.name} replica {replica['ordinal']}",
        "message": last["message"],
    }


def _of_environment(environment: Environment, exited: ExitReason, more: MoreMemory | None) -> Json:
    return {
        "environment": environment.name,
        "hint": more.command if more else None,
        "evidence": _evidence(exited.to_json()),
        "log_tail": [],
        "log": f"#/environment/{environment.name}",
        "again": _again(more) if more else None,
    }


def _again(more: MoreMemory) -> Json:
    return {"request_id": more.request_id, "limits": {more.limit: more.megabytes}}


def _evidence(reason: Json | None) -> Json | None:
    """What an `ExitReason` tells beyond its sentence."""
    if reason is None:
        return None
    names = ("evidence", "detector", "certainty", "limit_bytes", "peak_bytes", "seconds", "pid")
    return {name: reason.get(name) for name in (*names, "victim_name", "victim_pid")}
