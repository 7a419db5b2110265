# SPDX-License-Identifier: Apache-2.0
"""The JSON of the API's answers: documented in `docs/api.md`, stable, without secrets.

Plain functions from records to dicts. Times are seconds since the epoch, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ...environments.replica_state import more_memory_after
from ...requests_db import records
from ...schema.protocol import LOOPBACK
from ...schema.replica import EARLIER, WAITING, StatusLine, max_sessions_of
from ...schema.states import FAILING, EnvironmentState, ReplicaState, RequestState
from ...system.net.access import is_loopback
from ...system.process.exit_reason import ExitKind, ExitReason
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials, redact, without_secrets
from ...system.text.units import plural

SLEEPING = "sleeping; wakes on connect"
_OWN_SERVERS = {
    "as_is": "as it is: the project's own server",
    "http": "as it is: the project's own server, which has no sessions",
}
_WITH_SESSIONS = (ReplicaState.READY, ReplicaState.DRAINING)
_SHOWN_OF_REQUEST = (
    *("id", "operation", "state", "schedule", "environment", "priority"),
    *("attempts", "max_attempts", "lost_daemons", "timeout_seconds", "retry_oom", "worker"),
    *("created_at", "started_at", "finished_at", "cancel_requested_at"),
    *("memory_bytes", "peak_bytes"),
)


def _fields(record: object, *names: str) -> Json:
    return {name: getattr(record, name) for name in names}


def request_view(
    request: records.Request, pending_reason: str | None = None, retried: Json | None = None
) -> Json:
    """Return one request, why it waits, and the last death after which it was requeued."""
    return short_request_view(request) | {
        "payload": redact(request.payload),
        "result": request.result,
        "trace_id": request.traceparent.split("-")[1] if request.traceparent else None,
        "pending_reason": pending_reason if request.state is RequestState.PENDING else None,
        "retried": retried,
    }


def short_request_view(request: records.Request) -> Json:
    """Return one request, without the fields that may be large."""
    return _fields(request, *_SHOWN_OF_REQUEST) | {
        "label": hide_credentials(records.label_of(request)),
        "environment": hide_credentials(request.environment),
        "error": error_view(request.error, request.payload),
    }


def error_view(error: records.RequestError | None, payload: Json) -> Json | None:
    """Return an error without the payload's secrets; None if there is none."""
    if error is None:
        return None
    return {name: without_secrets(value, payload) for name, value in asdict(error).items()}


def environment_view(
    environment: records.Environment, replicas: list[records.Replica], live: dict[str, StatusLine]
) -> Json:
    """One environment with its replicas. `live` holds the shims' last status by replica id."""
    spec = environment.spec
    lives = [live.get(replica.id) for replica in replicas]
    views = [replica_view(*each, environment) for each in zip(replicas, lives, strict=True)]
    staying = [replica for replica in replicas if replica.state is not ReplicaState.DRAINING]
    known = [size for r in staying if (size := max_sessions_of(live.get(r.id)))]
    cause, serving = sessions_fail(lives), serving_view(lives)
    if serving is not None and environment.state is EnvironmentState.ASLEEP:
        serving["sentence"] = SLEEPING
    is_failing = cause is not None and environment.state is EnvironmentState.READY
    is_exposed = not is_loopback(spec.get("host") or LOOPBACK)
    return _fields(environment, "name", "address", "request_id", "generation", "created_at") | {
        "state": FAILING if is_failing else environment.state,
        "sessions": sum(view["sessions"] for view in views),
        "max_sessions": sum(known) if known else spec.get("max_sessions"),
        "serving": serving,
        "sessions_fail": without_secrets(cause, spec),
        "provider": spec.get("provider"),
        "gpus": gpus_of(spec),
        "source": hide_credentials(spec.get("source")),
        "host": spec.get("host") or LOOPBACK,
        "is_exposed": is_exposed,
        "has_token": is_exposed or bool(spec.get("token")),
        "error": error_view(environment.error, spec),
        "replicas": views,
    }


def generation_view(generation: records.Generation) -> Json:
    """One generation of an environment; its spec was written without secrets."""
    names = ("number", "state", "request_id", "spec", "created_at", "served_at", "ended_at")
    return _fields(generation, *names) | {"error": hide_credentials(generation.error)}


def replica_view(
    replica: records.Replica,
    live: StatusLine | None,
    environment: records.Environment | None = None,
) -> Json:
    """One replica, with its shim's last status."""
    status: StatusLine = live or {}
    capacity = status.get("capacity")
    reason = dict(replica.exit or {})
    exits = reason.pop(EARLIER, None) if live is None else live
    message = status.get("problem") or _replica_message(replica)
    return _fields(replica, "id", "ordinal", "pid", "restarts") | {
        "state": "UNKNOWN" if status.get("unwatched") else replica.state,
        "sessions": status.get("sessions", 0) if replica.state in _WITH_SESSIONS else 0,
        "wakes": status.get("wakes", 0),
        "exit": reason or None,
        "message": without_secrets(message, environment.spec if environment else {}),
        "exits": exit_views(exits, replica.exit, environment),
        "exit_kinds": (exits or {}).get("exit_kinds", {}),
        "abandoned": capacity.get("abandoned", []) if capacity else [],
        "left": capacity.get("left", []) if capacity else [],
    }


def gpus_of(spec: Json) -> Json | None:
    """Return each replica's GPUs: how many, or which part of one, and the resource's name."""
    options = dict(text.partition("=")[::2] for text in spec.get("engine_options") or ())
    try:
        each = float(options.get("gpus") or spec.get("gpus") or 0)
    except ValueError:  # which its engine refuses
        return None
    resource = options.get("gpu-resource") or options.get("gres")  # Slurm's: shard:2
    return {"each": each, "resource": resource} if each and math.isfinite(each) else None


def _replica_message(replica: records.Replica) -> str | None:
    if replica.state is ReplicaState.ASLEEP:
        return SLEEPING
    if replica.exit is None:
        return None
    how = ExitReason.from_json(replica.exit).sentence()
    if replica.state is ReplicaState.BACKING_OFF:
        return f"{how}; {replica.exit.get(WAITING, 'restarting')}"
    if replica.state is ReplicaState.READY:
        return f"its previous server {how}"
    return how


def event_view(event: records.Event) -> Json:
    """One entry of the event log."""
    known = _fields(event, "seq", "at", "kind", "request_id", "data")
    return known | {"environment": hide_credentials(event.environment)}


# How an environment is served, and which of its processes have exited.


def serving_view(lives: Iterable[StatusLine | None]) -> Json | None:
    """`{"shards", "isolated", "has_sessions", "sentence", "held"}`; None until one is ready.

    `held` is `{"shards", "since"}` of event loops that are blocked, or None.
    """
    known = [live for live in lives if live]
    infos = [info for live in known if (info := live.get("info"))]
    if not infos:
        return None
    capacities = [capacity for live in known if (capacity := live.get("capacity"))]
    shards = sum(info.get("shards", 1) for info in infos)
    held = [each for each in capacities if "held_since" in each]  # as last reported
    blocked = sum(each["shards"].get("wedged", 0) for each in held)
    since = min((each["held_since"] for each in held), default=None)
    is_isolated = any(info.get("isolate") for info in infos)
    how = _OWN_SERVERS.get(infos[0].get("serving", ""), plural(shards, "shard"))
    if is_isolated:
        how = "isolated: a process per session"
    return {
        "shards": shards,
        "isolated": is_isolated,
        "has_sessions": infos[0].get("serving") != "http",
        "sentence": how,
        "held": {"shards": blocked, "since": since} if held else None,
    }


def sessions_fail(lives: Iterable[StatusLine | None]) -> str | None:
    """Return why the last environment was not created; None: it was, or there was none."""
    causes = (cause for live in lives if live and (cause := live.get("sessions_fail")))
    return hide_credentials(next(causes, None))  # type: ignore[no-any-return]  # a text, or None


def exit_views(
    live: Mapping[str, Any] | None,
    shown: Json | None = None,
    environment: records.Environment | None = None,
    *,
    server: str = "the server",
) -> list[Json]:
    """The last exits of a replica's processes, those for lack of memory first, each in a sentence.

    The server's exit is left out if it is `shown` elsewhere. `server` is the server's name.
    """
    views = []
    for one in (live or {}).get("exits") or ():
        reason, hint = one.get("reason") or {}, None
        if one.get("server") and shown and shown.get("pid") == reason.get("pid"):
            continue
        if environment is not None and reason.get("kind") == ExitKind.OOM_KILLED:
            exited, is_session = ExitReason.from_json(reason), bool(one.get("out_of_memory"))
            hint = more_memory_after(environment.request_id, exited, is_session=is_session)
        views.append({**one, "message": _exit_message(one, server), "hint": hint})
    return views


def _exit_message(one: Json, server: str) -> str:
    how = "exited"
    if one.get("reason"):
        reason = ExitReason.from_json(one["reason"])
        how = reason.sentence(shares_limit=not one.get("out_of_memory"))
        if programs := one.get("programs"):  # whose sessions continue
            killed = reason.of_programs(programs, is_isolated=bool(one.get("isolated")))
            return f"{killed}; the session went on"
    what = f"shard {one.get('shard')}"
    if one.get("server"):
        what = server
    elif one.get("shared_state"):
        what = "the process of the shared state"
    elif one.get("isolated"):
        what = "an isolated session"
    sessions = plural(one.get("sessions", 0), "session")
    ends_alone = one.get("isolated") or one.get("server")
    cost = "" if ends_alone else f"; {sessions} ended with it, and it was replaced"
    pid = f" (pid {one['pid']})" if one.get("pid") else ""
    return f"{what}{pid} {how}{cost}"
