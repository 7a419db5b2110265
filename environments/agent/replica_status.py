# SPDX-License-Identifier: Apache-2.0
"""What is known of one replica of an engine: its status file, and the line that clients are sent.

The same fields as a shim's (`environments/shim/connections.py`), so that whoever follows a replica
need not know what runs it, and four of its own:

    "agent": {pid, started_at}   instead of "shim": nobody ends the agent for one replica's sake
    "instance": str              what the engine calls it
    "problem": str or null       why the engine cannot be asked at the moment
    "waiting": str or null       why it is not ready yet

A restarted agent continues from the file: the state says what it was about to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from ...schema.replica import Capacity, ServerInfo, StatusLine
from ...system.process.diagnose import explain_child
from ...system.process.exit_reason import ExitKind
from ...system.text.json_lines import Json
from ..replica_status import ExitHistory

LONGEST_SECONDS = 3650 * 86_400.0  # until a deadline; those of another boot are further away


@dataclass
class ReplicaStatus:
    """What is known of one replica. No effects.

    Attributes:
        is_asked: Whether the engine may have been asked to start it: if not, it has nothing of it.
        state: As a shim's: starting, ready, draining, exited, stopping, stopped.
        generation: How many times it has been started.
        runs: How many times the engine itself has begun this instance anew.
        ends_at: When the engine ends the instance, as `boot_seconds` counts.
        replace_at: When another is to be asked for, so that its sessions can end before that.
        is_draining: Whether its sessions were to end: it is not started again.
        reported: The number of the last exit that the server has reported of a process below it.
        exits: The last exits of the server, and below it, those for lack of memory first.
        exit_kinds: How many exited in which way.
        shard_exits: How many of them were the server's children.
        deadline: When draining, or the grace of stopping, is over, as `boot_seconds` counts.
    """

    is_asked: bool = False
    state: str = "starting"
    generation: int = 1
    instance: str | None = None
    pid: int | None = None
    host: str | None = None
    port: int | None = None
    ready_at: float | None = None
    sessions: int = 0
    info: ServerInfo | None = None
    sessions_fail: str | None = None
    capacity: Capacity | None = None
    exit: Json | None = None
    last_exit: Json | None = None
    failed: str | None = None
    log_tail: list[str] | None = None
    problem: str | None = None
    waiting: str | None = None
    runs: int = 0
    ends_at: float | None = None
    replace_at: float | None = None
    is_draining: bool = False
    reported: int = 0
    exits: list[Json] = field(default_factory=list)
    exit_kinds: dict[str, int] = field(default_factory=dict)
    shard_exits: int = 0
    deadline: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaStatus:
        """Read a status file; nothing is known any more of what may have changed since."""
        known = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        return cls(**{**known, "problem": None, "ends_at": None, "replace_at": None})

    def to_json(self) -> StatusLine:
        """Return it as a status file has it, and a status line but for whose it is."""
        status = cast("StatusLine", asdict(self))
        if self.log_tail is None:
            del status["log_tail"]
        return {
            **status,
            "restarts": max(0, self.generation - 1),
            # Of a server that tells its shim more than a container tells its engine.
            "pid_started_at": None,
            "oom_kills": 0,
            "cgroup": None,
        }

    def seconds_left(self, now: float) -> float:
        """Return how long until the deadline; it is over when it was set before a reboot."""
        left = (self.deadline or 0.0) - now
        return left if 0.0 < left <= LONGEST_SECONDS else 0.0

    def begin_again(self) -> None:
        """Begin the next generation; what the last one reported goes, `last_exit` stays."""
        self.state = "starting"
        self.generation += 1
        self.instance = self.pid = self.ready_at = self.info = self.capacity = None
        self.exit = self.failed = self.log_tail = self.deadline = self.waiting = None
        self.sessions_fail = None
        self.ends_at = self.replace_at = None
        self.sessions = self.runs = self.reported = 0

    def note_new_run(self, reason: Json, runs: int, now: float) -> None:
        """Begin the next generation with the same instance, which its engine begins anew."""
        self._remember(reason, now)
        instance = self.instance
        self.begin_again()
        self.instance, self.runs, self.last_exit = instance, runs, reason

    def note_ready(self, info: ServerInfo, now: float) -> None:
        """Note that it answers; `now` in seconds since the epoch."""
        self.state = "ready"
        self.waiting = None
        self.info = info
        self.ready_at = now

    def note_reported(self, exits: list[Json], limit_bytes: int | None) -> bool:
        """Explain what the server reports of exits below it, oldest first; whether any is new."""
        new = [facts for facts in exits if facts["number"] > self.reported]
        history = ExitHistory(vars(self))
        for facts in new:
            reason = explain_child(facts, limit_bytes=limit_bytes)
            history.add({**facts, "life": self.generation, "reason": reason.to_json()})
            self.reported = facts["number"]
        vars(self).update(history.to_json())
        return bool(new)

    @property
    def oom_reported_at(self) -> float | None:
        """When the server of this generation has last reported a kill for memory below it."""
        own = (each for each in self.exits if each.get("life") == self.generation)
        kills = [each["at"] for each in own if each["reason"]["kind"] == ExitKind.OOM_KILLED]
        return max(kills, default=None)

    def _remember(self, reason: Json, now: float) -> None:
        history = ExitHistory(vars(self))
        history.add_server(reason, now)
        vars(self).update(history.to_json())

    def note_exit(self, reason: Json, log_tail: list[str], now: float) -> None:
        """Note that the instance of this generation has ended, and its sessions with it."""
        self._remember(reason, now)
        self.state = "exited"
        self.exit = self.last_exit = reason
        self.log_tail = log_tail
        self.pid = self.capacity = self.ends_at = self.replace_at = self.sessions_fail = None
        self.sessions = 0
