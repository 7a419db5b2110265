# SPDX-License-Identifier: Apache-2.0
"""The status of one replica of an engine: its file, and the line that clients are sent.

The same fields as a shim's (`../replica_status.py`), and some of its own. A restarted agent
continues from the file: the state says what it was about to do. Deadlines are counted since boot,
so that no step of the clock moves them, and the next agent understands them.
"""

from __future__ import annotations

from typing import cast

from ...schema.replica import ServerInfo, StatusLine
from ...system.process.diagnose import explain_child
from ...system.process.exit_reason import ExitKind
from ...system.text.json_lines import Json
from ..engines.base import Instance
from ..replica_state import Action, Event
from ..replica_status import ReplicaStatus


class EngineReplicaStatus(ReplicaStatus):
    """What is known of one replica. No effects.

    Attributes:
        is_asked: Whether the engine may have been asked to start it: if not, it has nothing of it.
        runs: How many times the engine itself has restarted this instance.
        ends_at: When the engine ends the instance, as `boot_seconds` counts.
        replace_at: When to ask for another, so that its sessions can end before that.
        reported: The number of the last exit that the server has reported of a process below it.
    """

    is_asked: bool = False
    instance: str | None = None
    pid: int | None = None
    host: str | None = None
    port: int | None = None
    problem: str | None = None
    waiting: str | None = None
    runs: int = 0
    ends_at: float | None = None
    replace_at: float | None = None
    reported: int = 0

    def __init__(self, earlier: StatusLine | None = None) -> None:
        """Go on from a status file; nothing is known any more of what may have changed since."""
        super().__init__(earlier)
        vars(self).update({key: value for key, value in (earlier or {}).items() if key in _OWN})
        self.problem = self.ends_at = self.replace_at = None

    def advance(self, event: Event, now: float, seconds: float = 0.0) -> Action | None:
        """Record an event; of a new generation nothing is known but its address."""
        before = self.life.generation
        action = super().advance(event, now, seconds)
        if self.life.generation != before:
            self.pid = self.waiting = self.ends_at = self.replace_at = None
            self.reported = 0
            if event is Event.START:
                self.instance, self.runs = None, 0
        return action

    def note_instance(self, instance: Instance) -> bool:
        """Record which instance it is; return whether anything of that is new."""
        before = (self.instance, self.pid, self.ends_at, self.replace_at)
        self.instance, self.pid = instance.id, instance.pid or self.pid
        self.ends_at, self.replace_at = instance.ends_at, instance.replace_at
        return before != (self.instance, self.pid, self.ends_at, self.replace_at)

    def note_ready(self, info: ServerInfo, at: float) -> None:
        """Record what the server says of itself when it is ready; it waits for nothing."""
        super().note_ready(info, at)
        self.waiting = None

    def note_exit(self, reason: Json, log_tail: list[str], at: float) -> None:
        """Record that the instance of this generation has ended, and its sessions with it."""
        super().note_exit(reason, log_tail, at)
        self.pid = self.ends_at = self.replace_at = None

    def note_renewal(self, reason: Json, runs: int, at: float) -> None:
        """Record how the server of an instance exited that its engine has restarted."""
        self.exits.add_server(reason, at)
        self.last_exit, self.runs = reason, runs

    def note_reported(self, exits: list[Json], limit_bytes: int | None) -> bool:
        """Explain what the server reports of exits below it, oldest first; whether any is new."""
        new = [facts for facts in exits if facts["number"] > self.reported]
        for facts in new:
            reason = explain_child(facts, limit_bytes=limit_bytes).to_json()
            self.exits.add({**facts, "life": self.life.generation, "reason": reason})
            self.reported = facts["number"]
        return bool(new)

    @property
    def oom_reported_at(self) -> float | None:
        """Return when the server of this generation last reported a kill for memory below it."""
        own = (each for each in self.exits.last if each.get("life") == self.life.generation)
        kills = [each["at"] for each in own if each["reason"]["kind"] == ExitKind.OOM_KILLED]
        return max(kills, default=None)

    def to_json(self) -> StatusLine:
        """Return it as a status file has it, and a status line but for whose it is."""
        return {
            **super().to_json(),
            **cast("StatusLine", {name: getattr(self, name) for name in _OWN}),
            "deadline": self.life.deadline,
            # Of a server that tells its shim more than a container tells its engine.
            "pid_started_at": None,
            "oom_kills": 0,
            "cgroup": None,
        }


_OWN = tuple(EngineReplicaStatus.__annotations__)
