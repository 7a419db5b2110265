# SPDX-License-Identifier: Apache-2.0
"""The states of a replica, and its status, as the status file and the status line have it.

`advance` decides without I/O; shims and agents carry out its actions.

| event | starting | ready | draining | exited, asleep | stopping |
|---|---|---|---|---|---|
| start | | | | starting: start | |
| ready | ready | | | | |
| drain | drain | drain | drain | stopping: stop | |
| drains | draining | draining | | | |
| stop | stopping: stop | stopping: stop | stopping: stop | stopping: stop | |
| left | kill | kill | kill | | kill |
| exited | exited | exited | exited | | stop |
| slept | asleep: listen | asleep: listen | asleep: listen | | stop |
| time | | | | | kill |
| gone | | | | | stopped |

A cell names the next state and the action; in an empty cell the event changes nothing. Once a
drain has been requested, `exited`, `slept` and `time` lead to "stopping: stop" in any state. After
a kill, `time` leads to "give up". A second drain or stop can only shorten the time.

Times are seconds of one clock, which the caller chooses. `schema/replica.py` lists the fields of a
status. Shims import this module, so it imports little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, cast

from ..system.text.json_lines import Json
from ..system.text.units import MB

if TYPE_CHECKING:
    from ..schema.replica import ServerInfo, StatusLine
    from ..system.process.exit_reason import ExitReason

LEFT_GRACE_SECONDS = 5.0  # for a server to end whose sessions were not over in time
GIVE_UP_SECONDS = 5.0  # for a killed process to be reaped; one stuck in the kernel takes longer
GROWTH = 2  # how much more memory the next attempt is given after a kill
MAX_SECONDS = 3650 * 86_400.0  # until a deadline; a later one was set before a reboot
KEPT_EXITS = 4  # how many exits for lack of memory a status has, and how many others
_NOTHING_SERVED: StatusLine = {"sessions": 0, "sessions_fail": None, "capacity": None}
_NOTHING_KNOWN: StatusLine = {"info": None, "exit": None, **_NOTHING_SERVED}
_REPORTED = (*_NOTHING_KNOWN, "log_tail")


class State(StrEnum):
    """The state of a replica, as its status has it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # its sessions continue, and none begins
    EXITED = "exited"
    ASLEEP = "asleep"  # it has exited because it was not used; a client that connects starts it
    STOPPING = "stopping"  # it is being ended, and will not be started again
    STOPPED = "stopped"  # nothing of it is left


class Event(StrEnum):
    """A request, or an observation."""

    START = "start"  # it is to be started again, or a client connects while it is asleep
    READY = "ready"  # its server serves
    DRAIN = "drain"  # its sessions are to end within some seconds, and then the replica
    DRAINS = "drains"  # its server begins no sessions any more
    STOP = "stop"  # it is to end within some seconds
    LEFT = "left"  # its server has exited, and processes that the server started have not
    EXITED = "exited"  # it has exited, or could not be started
    SLEPT = "slept"  # it has exited in order, after it reported that it was not used
    TIME = "time"  # time has passed: the deadline may have come
    GONE = "gone"  # nothing of it is left


class Action(StrEnum):
    """The step that a shim or an agent takes next."""

    START = "start"
    DRAIN = "drain"  # ask the server to begin no sessions, and to exit after the last one
    STOP = "stop"  # end it by the deadline, gently first
    KILL = "kill"
    GIVE_UP = "give up"  # a process is stuck in the kernel: report the exit of the rest
    LISTEN = "listen"  # start the server when a client connects


_LIVING = (State.STARTING, State.READY, State.DRAINING, State.STOPPING)  # something of it may run


class Life(NamedTuple):
    """The state of a replica, with what the next transition depends on."""

    state: State = State.STARTING
    generation: int = 1  # how many times it has been started
    wakes: int = 0  # how many of these starts ended its sleep
    is_draining: bool = False  # it ends after its sessions, and is not started again
    deadline: float | None = None  # the end of the drain, or of the grace of a stop
    is_killed: bool = False  # it was sent SIGKILL, and has not been reaped

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing of it runs, and it may be started again."""
        return self.state in (State.EXITED, State.ASLEEP)

    @property
    def restarts(self) -> int:
        """Return how many times it was started after an exit."""
        return max(0, self.generation - 1 - self.wakes)

    def seconds_left(self, now: float) -> float:
        """Return the time until the deadline; 0 if that is over, or was set before a reboot."""
        left = (self.deadline or 0.0) - now
        return left if 0.0 < left < 2 * MAX_SECONDS else 0.0


def advance(
    life: Life, event: Event, now: float, seconds: float = 0.0
) -> tuple[Life, Action | None]:
    """Return the life of a replica after an event, and the action that follows, if any.

    `seconds` is the time for its sessions (`DRAIN`), or for the replica (`STOP`), to end.
    """
    match event:
        case Event.DRAIN if life.state is not State.STOPPED:
            return _drain(life, now, seconds)
        case Event.STOP if life.state is not State.STOPPED:
            return _stop(life, now, seconds)
        case Event.START if life.is_at_rest:
            begun = _without_deadline(life, State.STARTING)
            wakes = life.wakes + (life.state is State.ASLEEP)
            return begun._replace(generation=life.generation + 1, wakes=wakes), Action.START
        case Event.GONE if life.state is State.STOPPING:
            return _without_deadline(life, State.STOPPED), None
        case Event.READY if life.state is State.STARTING:
            return life._replace(state=State.READY), None
        case Event.DRAINS if life.state in (State.STARTING, State.READY):
            return life._replace(state=State.DRAINING), None
        case Event.TIME if life.state in _LIVING and life.deadline is not None:
            return (life, None) if life.seconds_left(now) else _end_in_time(life, now)
        case Event.LEFT if life.state in _LIVING:
            return _kill(life, now)
        case Event.EXITED | Event.SLEPT if life.state in _LIVING:
            return _end(life, event, now)
    return life, None


def _without_deadline(life: Life, state: State) -> Life:
    return life._replace(state=state, deadline=None, is_killed=False)


def _deadline(life: Life, now: float, seconds: float, *, is_hastened: bool) -> float:
    """Return the deadline of a request; a second request can only hasten the first."""
    deadline = now + min(max(0.0, seconds), MAX_SECONDS)
    if is_hastened and life.deadline is not None:
        return min(deadline, life.deadline)
    return deadline


def _drain(life: Life, now: float, seconds: float) -> tuple[Life, Action | None]:
    drained = life._replace(is_draining=True)
    if life.is_at_rest:  # it has no sessions
        return _stop(drained, now, LEFT_GRACE_SECONDS)
    if life.state is State.STOPPING:
        return drained, None
    if not life.is_killed:
        deadline = _deadline(life, now, seconds, is_hastened=life.is_draining)
        drained = drained._replace(deadline=deadline)
    return drained, None if life.is_draining else Action.DRAIN


def _stop(life: Life, now: float, seconds: float) -> tuple[Life, Action | None]:
    is_second = life.state is State.STOPPING
    deadline = _deadline(life, now, seconds, is_hastened=is_second)
    stopping = life._replace(state=State.STOPPING, deadline=deadline)
    return stopping, None if is_second else Action.STOP


def _kill(life: Life, now: float) -> tuple[Life, Action | None]:
    return life._replace(is_killed=True, deadline=now + GIVE_UP_SECONDS), Action.KILL


def _end_in_time(life: Life, now: float) -> tuple[Life, Action | None]:
    if life.is_killed:
        return life, Action.GIVE_UP
    if life.state is State.STOPPING:
        return _kill(life, now)
    return _stop(life, now, LEFT_GRACE_SECONDS)


def _end(life: Life, event: Event, now: float) -> tuple[Life, Action | None]:
    if life.is_draining or life.state is State.STOPPING:
        ended = life._replace(state=State.STOPPING, deadline=now, is_killed=False)
        return ended, Action.STOP
    if event is Event.SLEPT:
        return _without_deadline(life, State.ASLEEP), Action.LISTEN
    return _without_deadline(life, State.EXITED), None


class ReplicaStatus:
    """The known facts about a replica, through its generations."""

    def __init__(self, earlier: StatusLine | None = None) -> None:
        """Begin before the first report, or continue from the status that is in `earlier`."""
        known: StatusLine = earlier or {}
        life = {key: value for key, value in known.items() if key in Life._fields}
        self.life = Life(**life | {"state": State(known.get("state", State.STARTING))})  # type: ignore[arg-type]
        self.failed: str | None = known.get("failed")  # the server's own reason for giving up
        self.last_exit: Json | None = known.get("last_exit")
        reported = {key: value for key, value in known.items() if key in _REPORTED}
        self.known = _NOTHING_KNOWN | cast("StatusLine", reported)
        self.exits = ExitHistory(known)

    @classmethod
    def after_shim(cls, earlier: StatusLine | None, at: float) -> ReplicaStatus:
        """Begin again, keeping the exits, after a shim was killed, and its server with it."""
        status = cls()
        status.exits = ExitHistory(earlier)
        if earlier is not None and earlier.get("pid") is not None:
            status.exits.add_server(exit_with_shim(earlier), at)
        return status

    def advance(self, event: Event, now: float, seconds: float = 0.0) -> Action | None:
        """Record an event; return the action that follows."""
        before = self.life
        self.life, action = advance(before, event, now, seconds)
        if self.life.generation > before.generation:
            self.known, self.failed = _NOTHING_KNOWN, None
        return action

    def note_ready(self, info: ServerInfo) -> None:
        """Record what the server reports when it is ready."""
        self.known = self.known | {"info": info}

    def note_served(self, message: Mapping[str, object]) -> bool:
        """Record how full the server is, as far as `message` has it; return whether that is new."""
        before = self.known
        served = {key: message[key] for key in _NOTHING_SERVED if key in message}
        self.known = before | cast("StatusLine", served)
        return self.known != before

    def note_sleep(self) -> None:
        """Record that the server exited because it was not used, which counts as no exit."""
        self.known = self.known | _NOTHING_SERVED

    def note_exit(self, reason: Json, log_tail: list[str], at: float) -> None:
        """Record how the server of this generation exited, and with it its sessions."""
        self.exits.add_server(reason, at)
        self.last_exit = reason
        self.known = self.known | {"exit": reason, "log_tail": log_tail, **_NOTHING_SERVED}

    def to_json(self) -> StatusLine:
        """Return its part of the status that is written down, and that clients are sent."""
        life = self.life
        return {
            "state": life.state,
            "generation": life.generation,
            "restarts": life.restarts,
            "wakes": life.wakes,
            "is_draining": life.is_draining,
            "last_exit": self.last_exit,
            "failed": self.failed,
            **self.known,
            **self.exits.to_json(),
        }


class ExitHistory:
    """The last exits of a replica's processes, out-of-memory kills first, and their numbers."""

    def __init__(self, status: StatusLine | None = None) -> None:
        """Continue from a replica's status."""
        known: StatusLine = status or {}
        self.last: list[Json] = known.get("exits", [])
        self._kinds: dict[str, int] = dict(known.get("exit_kinds", {}))
        self._below: int = known.get("shard_exits", 0)

    def add(self, report: Json) -> None:
        """Add an exit: its report, with `reason` and `at`."""
        kind = _kind_of(report)
        self._kinds[kind] = self._kinds.get(kind, 0) + (report.get("programs") or 1)
        ranked = sorted([report, *self.last], key=lambda each: -(each.get("at") or 0.0))
        for_memory = [each for each in ranked if _kind_of(each) == "oom_killed"]
        others = [each for each in ranked if _kind_of(each) != "oom_killed"]
        self.last = for_memory[:KEPT_EXITS] + others[:KEPT_EXITS]
        self._below += not (report.get("server") or report.get("programs"))

    def add_server(self, reason: Json, at: float) -> None:
        """Add the exit of the server itself, unless its stop had been requested."""
        if reason["kind"] != "stopped":
            self.add({"server": True, "pid": reason.get("pid"), "reason": reason, "at": at})

    def to_json(self) -> StatusLine:
        """Return its part of a replica's status."""
        return {"exits": self.last, "exit_kinds": self._kinds, "shard_exits": self._below}


def _kind_of(report: Json) -> str:
    return str((report.get("reason") or {}).get("kind") or "lost")


def more_memory_after(
    launch_id: str | None, exited: ExitReason, *, is_session: bool = False
) -> str | None:
    """Return the command that doubles an environment's memory after a process was killed for it.

    It doubles the limit, or else the peak; with `is_session`, that of isolated sessions. None if
    the launch is not known, or neither of the two.
    """
    had = exited.limit_bytes or exited.peak_bytes
    if not (launch_id and had):
        return None
    option = "session-memory" if is_session else "memory"
    return f"openenv retry {launch_id} --{option} {math.ceil(had * GROWTH / MB)}M"


def exit_with_shim(status: StatusLine) -> Json:
    """Return the `ExitReason` of a server whose shim was killed or crashed, by its last status."""
    shim = status.get("shim")
    why = f"ended with its shim (pid {shim and shim['pid']}), which was killed or crashed"
    return {"kind": "lost", "pid": status.get("pid") or 0, "evidence": why}
