# SPDX-License-Identifier: Apache-2.0
"""Environments and their replicas, with what shims report of them; and faults.

Rows are read when an event says that one has changed; what shims report is in memory, and looked at
once a second.

    source ──found──▶ Faults.put ──those of one cause as one──▶ kind `faults`

A fault has a cause, evidence, and the command that is its button: `FaultKind` lists them all. One
that ends (a step returns, a request gets its worker) disappears; others stay until a user has seen
them, which is recorded in a file. The functions that make faults are pure.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from ...environments.replica_state import more_memory_after
from ...environments.shim.files import read_json, write_json
from ...requests_db.records import Environment, Event, Replica, Request, label_of
from ...requests_db.sql import queries
from ...requests_db.transactions.journal import ENVIRONMENT_STATE, GENERATION_STATE, REPLICA_STATE
from ...schema.replica import StatusLine, max_sessions_of
from ...schema.states import EnvironmentState, ErrorKind, ReplicaState
from ...system.process.exit_reason import ExitKind, ExitReason
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials
from ...system.text.units import plural
from ..api.dependencies import Dependencies
from ..api.views import environment_view, error_view, exit_views
from .live_state import LiveState, Turn
from .memory import MemoryHistory, coarse

REPORT_SECONDS = 5.0  # between two reports of a replica with something to do (`env_host`)
SILENT_SECONDS = 12.0  # without a report: it has nothing to do
WAITING_SECONDS = 60.0  # a request or a client that waits longer is a fault
ABANDONED_SECONDS = 10.0  # a step that runs longer after the end of its session is one, too
MAX_SEEN = 2000
READ_TICKS = 10  # between two readings of the rows, when no event has announced a change
_OF_ROWS = (ENVIRONMENT_STATE, GENERATION_STATE, REPLICA_STATE)


@dataclass(slots=True)
class StepRate:
    """Steps a second of one replica, between the last two totals that it has reported."""

    last: tuple[float, int] | None = None  # when, and how many steps by then
    rate: float | None = None

    def note(self, steps: int, now: float) -> float | None:
        """Return the rate with this total; None before a second report."""
        at, before = self.last or (now, steps)
        if self.last is None or steps < before:  # another server
            self.last, self.rate = (now, steps), None
        elif steps > before:
            seconds = now - at if now - at <= SILENT_SECONDS else REPORT_SECONDS  # it begins again
            self.last, self.rate = (now, steps), (steps - before) / max(1.0, seconds)
        elif self.rate and now - at > SILENT_SECONDS:
            self.rate = 0.0
        return self.rate


class EnvironmentSource:
    """Kinds `environments` and `replicas`, and the faults of these."""

    def __init__(self, deps: Dependencies, memory: MemoryHistory, faults: Faults) -> None:
        self._deps = deps
        self._memory = memory
        self._faults = faults
        self._waiting_since: dict[str, float] = {}  # of environments whose clients wait
        self._environments: list[Environment] = []
        self._replicas: dict[str, list[Replica]] = {}
        self._rates: defaultdict[str, StepRate] = defaultdict(StepRate)
        self._ticks = 0

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Read rows that have changed, and render what shims tell of them."""
        self._ticks = (self._ticks + turn.is_tick) % READ_TICKS
        has_changed = any(map(turn.has, _OF_ROWS))
        if has_changed or (turn.is_tick and self._ticks == 0):
            read = self._deps.store.read
            # Other environments have nothing but a failed launch, which is shown as a request.
            self._environments = await read(queries.LAUNCHED_ENVIRONMENTS)
            self._replicas = await read(queries.REPLICAS_OF_EACH)
        if has_changed or turn.is_tick:
            self._put_all(state, turn)

    def _put_all(self, state: LiveState, turn: Turn) -> None:
        live = self._deps.reconciler.replicas.live
        rates = {name: self._rates[name] for name in self._rates.keys() & live.keys()}
        self._rates = defaultdict(StepRate, rates)
        environments: dict[str, Json] = {}
        replicas: dict[str, Json] = {}
        gateway = self._deps.reconciler.gateway.process.watch
        exits = exit_views(gateway.status, server="Envoy") if gateway else []
        faults = [exit_of_envoy(each) for each in exits]
        for environment in self._environments:
            rows = self._replicas.get(environment.name, [])
            view = environment_view(environment, rows, live)
            own = [
                self._replica(each, environment.name, live.get(each["id"]) or {}, turn.now)
                for each in view["replicas"]
            ]
            replicas |= {each["id"]: each for each in own}
            environments[environment.name] = shown = view | _totals(own)
            faults += faults_of(environment, rows, shown, own, turn.now)
            if (fault := self._waiting(shown, turn.now)) is not None:
                faults.append(fault)
        state.replace("environments", environments)
        state.replace("replicas", replicas)
        self._faults.put(state, "environments", faults, None if turn.is_first else turn.now)

    def _waiting(self, environment: Json, now: float) -> Json | None:
        name, count = environment["name"], environment["waiting"]
        if not count:
            self._waiting_since.pop(name, None)
            return None
        since = self._waiting_since.setdefault(name, now)
        if now - since < WAITING_SECONDS:
            return None
        room = f"{environment['sessions']} of {plural(environment['max_sessions'] or 0, 'session')}"
        return _fault(
            FaultKind.WAITING,
            f"{name}:waiting:{since:.0f}",
            f"{plural(count, 'client')} waiting for a session: {room} open",
            environment=name,
            at=since,
            command=f"openenv scale {name} {environment['replicas'] + 1}",
        )

    def _replica(self, view: Json, environment: str, live: StatusLine, now: float) -> Json:
        capacity = live.get("capacity")
        rate = self._rates[view["id"]].note(capacity["steps"], now) if capacity else None
        return view | {
            "environment": environment,
            "max_sessions": max_sessions_of(live),
            "waiting": capacity["waiting"] if capacity else 0,
            "steps": capacity["steps"] if capacity else 0,
            "steps_per_second": None if rate is None else round(rate, 1),
            "lag_p99_seconds": capacity["lag_p99_seconds"] if capacity else None,
            "shards": capacity["shards"] if capacity else None,
            "memory_bytes": coarse(self._memory.replicas.get(view["id"])),
        }


def _totals(replicas: list[Json]) -> Json:
    """Return the totals over the replicas of an environment."""
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


# States in which a replica's last exit has not been followed by a restart yet.
_DOWN = frozenset({ReplicaState.BACKING_OFF, ReplicaState.FAILED})
_RUNS = _DOWN | {ReplicaState.READY, ReplicaState.STARTING}
_NUMBER = re.compile(r"\b[0-9a-f]{8,}\b|\d+")


class FaultKind(StrEnum):
    """Everything that can be wrong."""

    OUT_OF_MEMORY = "out_of_memory"  # a worker, replica, shard or session was killed for memory
    FAILED = "failed"  # a long request failed otherwise
    FAILING = "failing"  # an environment has failed, or none of its sessions can begin
    RESTARTING = "restarting"  # a replica's server exited, and was or is started again
    WAITING = "waiting"  # a request waits for a worker, or a client for a session, too long
    ABANDONED = "abandoned"  # steps run whose sessions have ended
    GATEWAY = "gateway"  # Envoy exited


def _fault(kind: FaultKind, fault_id: str, message: str, **facts: Any) -> Json:
    """Return a fault; `facts` are the fields that differ from the defaults here."""
    name = facts.get("environment")
    return {
        "id": fault_id,
        "kind": kind,
        "at": None,
        "subject": name,
        "environment": name,
        "message": message,
        "hint": None,
        "command": None,  # which the button carries out
        "evidence": None,
        "log_tail": [],
        "page": f"#/environment/{name}",  # which it is about
        "count": 1,
        **facts,
    }


class Faults:
    """The faults that all sources have found; the file `path` records which of them were seen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = dict.fromkeys((read_json(path) or {}).get("seen", ()))
        self._found: dict[str, Sequence[Json]] = {}
        self._since: dict[str, float | None] = {}

    def put(
        self, state: LiveState, source: str, found: Sequence[Json], now: float | None = None
    ) -> None:
        """Replace what a source has found; faults whose time is not known get `now`."""
        self._found[source] = found
        causes: defaultdict[str, list[Json]] = defaultdict(list)
        for fault in chain(*self._found.values()):
            since = fault["at"] or self._since.setdefault(fault["id"], now)
            seen = " seen" if fault["id"] in self._seen else ""
            causes[f"{cause_of(fault)}{seen}"].append(fault | {"at": since, "is_seen": bool(seen)})
        self._since = {f["id"]: f["at"] for each in causes.values() for f in each}
        state.replace("faults", {cause: _together(group) for cause, group in causes.items()})

    def see(self, fault_ids: Iterable[str]) -> None:
        """Mark faults as seen; blocks while it writes."""
        self._seen = dict.fromkeys([*self._seen, *fault_ids][-MAX_SEEN:])
        with contextlib.suppress(OSError):  # a full disk: they are known until the daemon ends
            write_json(str(self._path), {"seen": list(self._seen)})


def cause_of(fault: Json) -> str:
    """Return the key that all faults of one cause share."""
    where = "" if fault["kind"] == FaultKind.FAILED else fault["environment"]
    words = fault["message"].replace(fault["environment"] or " ", " ")
    return f"{fault['kind']} {where} {_NUMBER.sub('0', words)}"


def _together(faults: Sequence[Json]) -> Json:
    newest = max(faults, key=lambda fault: fault["at"] or 0.0)
    ids = sorted(fault["id"] for fault in faults)
    return newest | {"ids": ids, "count": sum(fault["count"] for fault in faults)}


def faults_of(
    environment: Environment,
    rows: Iterable[Replica],
    view: Json,
    replicas: Sequence[Json],
    at: float,
) -> list[Json]:
    """Return what is wrong with an environment and its replicas, as `views` and rows have it."""
    name = environment.name
    found = [exit_of_replica(row, environment) for row in rows]
    error = view["error"] or {}
    cause = error.get("message") or view["sessions_fail"]
    if environment.state is EnvironmentState.FAILED or view["sessions_fail"]:
        found = [each for each in found if each and each["kind"] != FaultKind.RESTARTING]
        has_failed = environment.state is EnvironmentState.FAILED and environment.request_id
        again = f"retry {environment.request_id}" if has_failed else f"restart {name}"
        failing = _fault(
            FaultKind.FAILING,
            f"{name}:{environment.generation}:failing",
            f"No session can begin: {cause}" if view["sessions_fail"] else str(cause),
            environment=name,
            command=f"openenv {again}",
            hint=error.get("hint"),
            log_tail=error.get("log_tail") or [],
        )
        found.append(failing)
    for replica in replicas:
        found += [death_of_shard(replica, environment), _abandoned(replica, name, at)]
    return [each for each in found if each is not None]


def fault_of_request(request: Request) -> Json:
    """A worker that died, a replica that a request was starting, or what the operation raised."""
    assert request.error is not None
    error = error_view(request.error, request.payload) or {}
    is_memory = request.error.kind is ErrorKind.OOM_KILLED
    return _of_request(request) | {
        "id": request.id,
        "kind": FaultKind.OUT_OF_MEMORY if is_memory else FaultKind.FAILED,
        "at": request.finished_at,
        "message": error["message"],
        "hint": error["hint"],
        "command": None if is_memory else f"openenv retry {request.id}",
        "evidence": _evidence(error["evidence"]),
        "log_tail": error["log_tail"],
    }


def death_of_attempt(request: Request, event: Event) -> Json:
    """A worker or a replica that died, after which its request was queued again with more."""
    error: Json = event.data.get("error") or {}
    return _of_request(request) | {
        "id": f"{request.id}:{event.seq}",
        "at": event.at,
        "message": hide_credentials(event.data["message"]),
        "evidence": _evidence(error.get("evidence")),
        "log_tail": hide_credentials(error.get("log_tail") or []),
        "runs_again_with_bytes": event.data.get("memory_bytes"),
    }


def waiting_request(request: Request, reason: str) -> Json:
    """The first in the queue, when it has waited too long."""
    return _of_request(request) | {
        "id": f"{request.id}:waiting",
        "kind": FaultKind.WAITING,
        "at": request.created_at,
        "message": reason,
        "command": f"openenv cancel {request.id}",
    }


def _of_request(request: Request) -> Json:
    environment, page = hide_credentials(request.environment), f"#/request/{request.id}"
    facts = {"environment": environment, "subject": hide_credentials(label_of(request))}
    return _fault(FaultKind.OUT_OF_MEMORY, request.id, "", page=page, **facts)


def exit_of_replica(replica: Replica, environment: Environment) -> Json | None:
    """The last exit of a replica's server, unless it was requested."""
    if replica.exit is None or replica.state not in _RUNS:
        return None
    exited = ExitReason.from_json(replica.exit)
    is_down = replica.state in _DOWN
    exits = replica.restarts + is_down
    if exited.kind == ExitKind.OOM_KILLED:
        kind, count = FaultKind.OUT_OF_MEMORY, 1
        command = more_memory_after(environment.request_id, exited)
    else:
        kind, count = FaultKind.RESTARTING, exits  # a replica that is back needs no command
        command = f"openenv restart {environment.name}" if is_down else None
    return _fault(
        kind,
        # Pids alone are not enough: those of instances of some engines are not known.
        f"{replica.id}:{exited.pid}:{exits}",
        f"its server {exited.sentence()}",
        environment=environment.name,
        subject=f"{environment.name} replica {replica.ordinal}",
        command=command,
        evidence=_evidence(replica.exit),
        count=max(1, count),
    )


def death_of_shard(replica: Json, environment: Environment) -> Json | None:
    """The last death of a process below a server that lives on: a shard, a session, a program."""
    last: Json = next((one for one in replica["exits"] if not one.get("server")), {})
    reason = last.get("reason")
    if reason is None or reason.get("kind") != ExitKind.OOM_KILLED:
        return None
    return _fault(
        FaultKind.OUT_OF_MEMORY,
        f"{replica['id']}:{last.get('pid') or last.get('number')}",
        last["message"],
        environment=environment.name,
        subject=f"{environment.name} replica {replica['ordinal']}",
        at=last.get("at"),
        command=last["hint"],
        evidence=_evidence(reason),
    )


def _abandoned(replica: Json, name: str, now: float) -> Json | None:
    """Steps of a replica that run although their sessions have ended."""
    found = [one for one in replica["abandoned"] if now - one["since"] > ABANDONED_SECONDS]
    if not found:
        return None
    since, count = min(one["since"] for one in found), sum(one["count"] for one in found)
    return _fault(
        FaultKind.ABANDONED,
        f"{replica['id']}:abandoned:{since:.0f}",
        f"{plural(count, 'step')} still running after the end of the session",
        environment=name,
        subject=f"{name} replica {replica['ordinal']}",
        at=since,
        command=f"openenv restart {name}",
    )


def exit_of_envoy(view: Json) -> Json:
    """An exit of the gateway's process, as `exit_views` has it."""
    reason = view.get("reason") or {}
    return _fault(
        FaultKind.GATEWAY,
        f"gateway:{reason.get('pid')}:{view.get('at')}",
        f"{view['message']}; its sessions ended, and it is started again",
        subject="Envoy",
        at=view.get("at"),
        command="openenv gateway status",
        evidence=_evidence(reason),
        page="#/",
    )


def _evidence(reason: Json | None) -> Json | None:
    """Return what an `ExitReason` tells beyond its sentence."""
    if reason is None:
        return None
    names = ("evidence", "detector", "certainty", "limit_bytes", "peak_bytes", "seconds", "pid")
    return {name: reason.get(name) for name in (*names, "victim_name", "victim_pid")}
