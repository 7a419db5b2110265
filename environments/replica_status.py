# SPDX-License-Identifier: Apache-2.0
"""What is known of a replica, of a shim or of an agent: its status file, and the status line.

The fields are those of `shim/connections.py`: how far it has come (`replica_state.py`), what its
server of this generation has reported, and how processes of it have exited. No effects.
Light: a shim imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from ..system.text.json_lines import Json
from .replica_state import Action, Event, Life, State, advance

if TYPE_CHECKING:
    from ..schema.replica import ServerInfo, StatusLine

KEPT_EXITS = 8  # of those that a status shows
_NOTHING_SERVED: StatusLine = {"sessions": 0, "sessions_fail": None, "capacity": None}
_NOTHING_KNOWN: StatusLine = {"ready_at": None, "info": None, "exit": None, **_NOTHING_SERVED}
_REPORTED = (*_NOTHING_KNOWN, "log_tail")


class ReplicaStatus:
    """What is known of a replica, through its generations."""

    def __init__(self, earlier: StatusLine | None = None) -> None:
        """Begin before the first report; a later process continues from what is in `earlier`."""
        known: StatusLine = earlier or {}
        life = {key: value for key, value in known.items() if key in Life._fields}
        self.life = Life(**life | {"state": State(known.get("state", State.STARTING))})  # type: ignore[arg-type]
        self.failed: str | None = known.get("failed")  # why the server gave up, in its own words
        self.last_exit: Json | None = known.get("last_exit")
        reported = {key: value for key, value in known.items() if key in _REPORTED}
        self.known = _NOTHING_KNOWN | cast("StatusLine", reported)
        self.exits = ExitHistory(known)

    @classmethod
    def after_shim(cls, earlier: StatusLine | None, at: float) -> ReplicaStatus:
        """Begin again after a shim that was killed, and its server with it; the exits stay."""
        status = cls()
        status.exits = ExitHistory(earlier)
        if earlier is not None and earlier.get("pid") is not None:
            status.exits.add_server(exit_with_shim(earlier), at)
        return status

    def advance(self, event: Event, now: float, seconds: float = 0.0) -> Action | None:
        """Record an event; return the action that follows (`replica_state.py`)."""
        before = self.life
        self.life, action = advance(before, event, now, seconds)
        if self.life.generation > before.generation:
            self.known, self.failed = _NOTHING_KNOWN, None
        return action

    def note_ready(self, info: ServerInfo, at: float) -> None:
        """Note what the server says of itself when it is ready; `at`: seconds since the epoch."""
        self.known = self.known | {"info": info, "ready_at": at}

    def note_served(self, message: Mapping[str, object]) -> bool:
        """Note how full the server is, as far as the message says it; whether that is new."""
        before = self.known
        served = {key: message[key] for key in _NOTHING_SERVED if key in message}
        self.known = before | cast("StatusLine", served)
        return self.known != before

    def note_sleep(self) -> None:
        """Note that the server has exited because it was not used, which counts as no exit."""
        self.known = self.known | _NOTHING_SERVED

    def note_exit(self, reason: Json, log_tail: list[str], at: float) -> None:
        """Note how the server of this generation has exited, and its sessions with it."""
        self.exits.add_server(reason, at)
        self.last_exit = reason
        self.known = self.known | {"exit": reason, "log_tail": log_tail, **_NOTHING_SERVED}

    def to_json(self) -> StatusLine:
        """Return its part of the status that is written down, and that clients are sent."""
        return {
            "state": self.life.state,
            "generation": self.life.generation,
            "restarts": self.life.restarts,
            "wakes": self.life.wakes,
            "is_draining": self.life.is_draining,
            "last_exit": self.last_exit,
            "failed": self.failed,
            **self.known,
            **self.exits.to_json(),
        }


class ExitHistory:
    """The last exits of a replica's processes, those for lack of memory first, and their number."""

    def __init__(self, status: StatusLine | None = None) -> None:
        """Continue from a replica's status."""
        known: StatusLine = status or {}
        self.last: list[Json] = known.get("exits", [])
        self._kinds: dict[str, int] = dict(known.get("exit_kinds", {}))
        self._below: int = known.get("shard_exits", 0)

    def add(self, report: Json) -> None:
        """Add an exit: what was reported of it, with `reason` and `at`."""
        kind = _kind_of(report)
        self._kinds[kind] = self._kinds.get(kind, 0) + (report.get("programs") or 1)
        ranked = sorted(
            [report, *self.last],
            key=lambda each: (_kind_of(each) != "oom_killed", -(each.get("at") or 0.0)),
        )
        self.last = ranked[:KEPT_EXITS]
        self._below += not (report.get("server") or report.get("programs"))

    def add_server(self, reason: Json, at: float) -> None:
        """Add the exit of the server itself, unless that was asked to stop."""
        if reason["kind"] != "stopped":
            self.add({"server": True, "pid": reason.get("pid"), "reason": reason, "at": at})

    def to_json(self) -> StatusLine:
        """Return its part of a replica's status."""
        return {"exits": self.last, "exit_kinds": self._kinds, "shard_exits": self._below}


def _kind_of(report: Json) -> str:
    return str((report.get("reason") or {}).get("kind") or "lost")


def exit_with_shim(status: StatusLine) -> Json:
    """Return the `ExitReason` of a server whose shim did not end in order, by its last status."""
    shim = status.get("shim")
    why = f"ended with its shim (pid {shim and shim['pid']}), which was killed or crashed"
    return {"kind": "lost", "pid": status.get("pid") or 0, "evidence": why}
