# SPDX-License-Identifier: Apache-2.0
"""Environments and their replicas, with what shims tell of them, and deaths of servers for memory.

Rows are read when an event says that one has changed; what shims tell is in memory, and looked at
once a second.

Deaths for memory as the page shows them: what died, the evidence, and what to do next. Pure.

`again` says what the button beside the command does: submit `request_id` once more, with `limits`
(`POST /v1/requests/{id}/retry`). It is None where the command is for a terminal alone.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field

from ...requests_db.records import Environment, Event, Replica, Request, label_of
from ...requests_db.sql import queries
from ...requests_db.transactions.journal import (
    ENVIRONMENT_STATE,
    GENERATION_STATE,
    REPLICA_STATE,
)
from ...schema.replica import StatusLine, max_sessions_of
from ...schema.states import ReplicaState
from ...system.process.exit_reason import ExitKind, ExitReason
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials
from ..api.dependencies import Dependencies
from ..api.views import environment_view, error_view
from ..dispatch.outcomes import MoreMemory, is_over_session_limit, more_memory_after
from .live_state import LiveState, Turn
from .memory import MemoryHistory

REPORT_SECONDS = 5.0  # between two reports of a replica with something to do (`env_host`)
RATE_REPORTS = 4  # over which steps a second are counted
SILENT_SECONDS = 12.0  # without a report: it has nothing to do
READ_TICKS = 10  # between two readings of the rows, when no event has announced a change
_ROUNDING_BYTES = 100_000
_OF_ROWS = (ENVIRONMENT_STATE, GENERATION_STATE, REPLICA_STATE)


@dataclass(slots=True)
class StepRate:
    """Steps a second of one replica, by the totals that it reports."""

    reports: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_REPORTS))

    def note(self, steps: int, now: float) -> float | None:
        """Return the rate with this total; None before a second report."""
        if self.reports and steps < self.reports[-1][1]:  # another server
            self.reports.clear()
        if not self.reports or steps != self.reports[-1][1]:
            if self.reports and now - self.reports[-1][0] > SILENT_SECONDS:  # it begins again
                last = self.reports[-1][1]
                self.reports.clear()
                self.reports.append((now - REPORT_SECONDS, last))
            self.reports.append((now, steps))
        if len(self.reports) < 2:
            return None
        (first_at, first), (last_at, last) = self.reports[0], self.reports[-1]
        if now - last_at > SILENT_SECONDS:
            return 0.0
        return (last - first) / max(1.0, last_at - first_at)


class EnvironmentSource:
    """Kinds `environments` and `replicas`, and of `deaths` those of servers."""

    def __init__(self, deps: Dependencies, memory: MemoryHistory) -> None:
        self._deps = deps
        self._memory = memory
        self._environments: list[Environment] = []
        self._replicas: dict[str, list[Replica]] = {}
        self._rates: defaultdict[str, StepRate] = defaultdict(StepRate)
        self._ticks = 0

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Read rows that have changed, and render what shims tell of them."""
        self._ticks = (self._ticks + turn.is_tick) % READ_TICKS
        has_changed = any(map(turn.has, _OF_ROWS))
        if has_changed or (turn.is_tick and self._ticks == 0):
            await self._read()
        if has_changed or turn.is_tick:
            self._put_all(state, turn.now)
            self._put_deaths(state, None if turn.is_first else turn.now)

    async def _read(self) -> None:
        read = self._deps.store.read
        # Others have a launch that failed, and nothing else: they are shown as requests.
        self._environments = await read(queries.LAUNCHED_ENVIRONMENTS)
        replicas: defaultdict[str, list[Replica]] = defaultdict(list)
        for replica in await read(queries.replicas()):
            replicas[replica.environment].append(replica)
        self._replicas = dict(replicas)

    def _put_all(self, state: LiveState, now: float) -> None:
        live = self._deps.reconciler.replicas.live
        rates = {name: self._rates[name] for name in self._rates.keys() & live.keys()}
        self._rates = defaultdict(StepRate, rates)
        environments: dict[str, Json] = {}
        replicas: dict[str, Json] = {}
        for environment in self._environments:
            rows = self._replicas.get(environment.name, [])
            view = environment_view(environment, rows, live)
            own = [
                self._replica(each, environment.name, live.get(each["id"]) or {}, now)
                for each in view["replicas"]
            ]
            replicas |= {each["id"]: each for each in own}
            for each in own:
                if (death := death_of_shard(each, environment)) is not None:
                    state.put_new("deaths", death["id"], death)
            environments[environment.name] = view | _totals(own)
        state.replace("environments", environments)
        state.replace("replicas", replicas)

    def _replica(self, view: Json, environment: str, live: StatusLine, now: float) -> Json:
        capacity = live.get("capacity")
        rate = self._rates[view["id"]].note(capacity["steps"], now) if capacity else None
        size = self._memory.replicas.get(view["id"])
        return view | {
            "environment": environment,
            "max_sessions": max_sessions_of(live),
            "waiting": capacity["waiting"] if capacity else 0,
            "steps": capacity["steps"] if capacity else 0,
            "steps_per_second": None if rate is None else round(rate, 1),
            "lag_p99_seconds": capacity["lag_p99_seconds"] if capacity else None,
            "shards": capacity["shards"] if capacity else None,
            "memory_bytes": None if size is None else size // _ROUNDING_BYTES * _ROUNDING_BYTES,
        }

    def _put_deaths(self, state: LiveState, at: float | None) -> None:
        for environment in self._environments:
            for replica in self._replicas.get(environment.name, []):
                if (death := death_of_replica(replica, environment, at)) is not None:
                    state.put_new("deaths", death["id"], death)


def _totals(replicas: list[Json]) -> Json:
    """Return what the replicas of an environment are together."""
    lags = [lag for each in replicas if (lag := each["lag_p99_seconds"]) is not None]
    rates = [rate for each in replicas if (rate := each["steps_per_second"]) is not None]
    sizes = [size for each in replicas if (size := each["memory_bytes"]) is not None]
    return {
        "replicas": len(replicas),
        "ready": sum(each["state"] == ReplicaState.READY for each in replicas),
        "restarts": sum(each["restarts"] for each in replicas),
        "waiting": sum(each["waiting"] for each in replicas),
        "steps": sum(each["steps"] for each in replicas),
        "steps_per_second": round(sum(rates), 1) if rates else None,
        "lag_p99_seconds": max(lags, default=None),
        "memory_bytes": sum(sizes) if sizes else None,
    }


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
    """Return what an `ExitReason` tells beyond its sentence."""
    if reason is None:
        return None
    names = ("evidence", "detector", "certainty", "limit_bytes", "peak_bytes", "seconds", "pid")
    return {name: reason.get(name) for name in (*names, "victim_name", "victim_pid")}
