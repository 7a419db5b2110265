# SPDX-License-Identifier: Apache-2.0
"""The states of a replica. `advance` decides without I/O; shims and agents carry out its actions.

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
| renewed | | starting | starting | | stop |
| time | | | | | kill |
| gone | | | | | stopped |

A cell names the next state and the action; nothing follows from an event in an empty one. Once a
drain has been asked for, `exited`, `slept`, `renewed` and `time` lead to "stopping: stop" in any
state. After a kill, `time` leads to "give up". A second drain or stop can only shorten the time.

Times are seconds of one clock, which the caller chooses. Light: a shim imports it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

LEFT_GRACE_SECONDS = 5.0  # of a server whose sessions have not ended when its drain is over
GIVE_UP_SECONDS = 5.0  # for the killed to be reaped; longer only for one stuck in the kernel
MAX_SECONDS = 3650 * 86_400.0  # until a deadline; a later one was set before a reboot


class State(StrEnum):
    """The state of a replica, as its status says it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # its sessions go on, and none begins
    EXITED = "exited"
    ASLEEP = "asleep"  # it has exited because it was not used; a client that connects starts it
    STOPPING = "stopping"  # it is ended, and not started again
    STOPPED = "stopped"  # nothing of it is left


class Event(StrEnum):
    """A request, or an observation."""

    START = "start"  # start it again; a client has connected to one that is asleep
    READY = "ready"  # its server serves
    DRAIN = "drain"  # its sessions are to end within some seconds, and then it
    DRAINS = "drains"  # its server begins no session any more
    STOP = "stop"  # it is to end within some seconds
    LEFT = "left"  # its server has exited, and processes that it has started have not
    EXITED = "exited"  # it has exited, or could not be started
    SLEPT = "slept"  # it has exited in order, having reported that it is not used
    RENEWED = "renewed"  # its engine itself has restarted it
    TIME = "time"  # time has passed: the deadline may have come
    GONE = "gone"  # nothing of it is left


class Action(StrEnum):
    """What a shim or an agent must do now."""

    START = "start"
    DRAIN = "drain"  # ask the server to begin no session, and to exit after the last one
    STOP = "stop"  # end it until the deadline, gently first
    KILL = "kill"
    GIVE_UP = "give up"  # a process is stuck in the kernel: report the exit of the rest
    LISTEN = "listen"  # start the server when a client connects


_LIVING = (State.STARTING, State.READY, State.DRAINING, State.STOPPING)  # something of it may run


class Life(NamedTuple):
    """How far a replica has come."""

    state: State = State.STARTING
    generation: int = 1  # how many times it has been started
    wakes: int = 0  # of these, from its sleep
    is_draining: bool = False  # its sessions are to end, and then it: it is not started again
    deadline: float | None = None  # when draining, or the grace of stopping, is over
    is_killed: bool = False  # it was sent SIGKILL, and is waited for

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing of it runs, and it may be started again."""
        return self.state in (State.EXITED, State.ASLEEP)

    @property
    def restarts(self) -> int:
        """How many times it was started after an exit."""
        return max(0, self.generation - 1 - self.wakes)

    def seconds_left(self, now: float) -> float:
        """Return how long until the deadline; it is over when it was set before a reboot."""
        left = (self.deadline or 0.0) - now
        return left if 0.0 < left < 2 * MAX_SECONDS else 0.0


def advance(
    life: Life, event: Event, now: float, seconds: float = 0.0
) -> tuple[Life, Action | None]:
    """Return the life of a replica after an event, and the action that follows, if any.

    `seconds` are for its sessions to end (`DRAIN`), or for it itself (`STOP`).
    """
    match event:
        case Event.DRAIN if life.state is not State.STOPPED:
            return _drain(life, now, seconds)
        case Event.STOP if life.state is not State.STOPPED:
            return _stop(life, now, seconds)
        case Event.START if life.is_at_rest:
            return _begin_again(life, wakes=life.state is State.ASLEEP), Action.START
        case Event.GONE if life.state is State.STOPPING:
            return life._replace(state=State.STOPPED, deadline=None, is_killed=False), None
        case Event.READY if life.state is State.STARTING:
            return life._replace(state=State.READY), None
        case Event.DRAINS if life.state in (State.STARTING, State.READY):
            return life._replace(state=State.DRAINING), None
        case Event.TIME if life.state in _LIVING and life.deadline is not None:
            return (life, None) if life.seconds_left(now) else _end_in_time(life, now)
        case Event.LEFT if life.state in _LIVING:
            return _kill(life, now)
        case Event.EXITED | Event.SLEPT | Event.RENEWED if life.state in _LIVING:
            return _end(life, event, now)
    return life, None


def _begin_again(life: Life, *, wakes: bool = False) -> Life:
    generation, waked = life.generation + 1, life.wakes + wakes
    return life._replace(
        state=State.STARTING, generation=generation, wakes=waked, deadline=None, is_killed=False
    )


def _deadline(life: Life, now: float, seconds: float, *, is_hastened: bool) -> float:
    """Return when time is over; a second request can only hasten the first."""
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
    match event:
        case Event.RENEWED:
            is_new = life.state is not State.STARTING  # else it is the first that we see
            return _begin_again(life) if is_new else life, None
        case Event.SLEPT:
            return life._replace(state=State.ASLEEP, deadline=None, is_killed=False), Action.LISTEN
        case _:
            return life._replace(state=State.EXITED, deadline=None, is_killed=False), None
