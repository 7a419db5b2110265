# SPDX-License-Identifier: Apache-2.0
"""`Autoscaler` and `Successors` submit the daemon's own requests, as a user would.

    a replica's status changes ──▶ note ──▶ occupancy ──▶ decide ──▶ submit `scale`, with the reason
    fewer were enough for a while ──timer──┘                           │
    the request has ended ──▶ serve ──▶ from here again  ◀─────────────┘

    a replica's `ends_at`, `replace_at` change ──timer──▶ due ──▶ submit `restart`, with the reason
                                                                     │ new ones ready
    the old ones are drained, and have ended at `ends_at` ◀──────────┘

`environments/replica_policy.py` decides how many replicas the sessions need (`launch --max`).
Replicas that their engine will end, for example at a job's time limit, are replaced before that if
they are behind the gateway, where another can take their place; all that are due are replaced
together. Nothing is decided while no status changes. The history has the requests. Only one at a
time changes an environment, and one that fails changes nothing.

    the request is refused   another one changes the environment: tried again in a while
    it fails                 a `scale`: the same; a `restart`: the engine has the replica drained by
                             itself, and it is started again when it has ended
    the daemon is killed     the next one begins to count again; its queue has the request
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...environments.replica_policy import DownWindow, Occupancy, Scaling, decide
from ...requests_db.errors import DatabaseError
from ...requests_db.records import Environment
from ...schema.states import ReplicaState
from ...system.process.process_identity import boot_seconds
from ...system.text.units import plural
from ..errors import ApiError
from .replica_watch import ReplicaWatch
from .work_queue import BackgroundTasks

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0  # after a request was refused, or has failed
TOGETHER_SECONDS = 60.0  # replicas that are due within this time are replaced together
MIN_SECONDS = 1.0  # for sessions to end

# Submits a request of the daemon's own: the operation's name, and the payload.
Submit = Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]]


@dataclass
class _Scaled:
    """One environment that scales itself."""

    scaling: Scaling
    launch: str | None  # whose replicas count
    window: DownWindow | None = None
    asked: int | None = None  # how many replicas were asked for, until that request has ended


class _Timers:
    """The next look at each environment, by its name."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self._look = look
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, seconds: float | None) -> None:
        """Look after some seconds instead of at the time that was set before; None: not again."""
        if (handle := self._handles.pop(name, None)) is not None:
            handle.cancel()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._handles[name] = loop.call_later(max(0.0, seconds), self._look, name)


@dataclass(eq=False)
class Autoscaler:
    """Owns the state of the environments that scale themselves."""

    tasks: BackgroundTasks
    # How full a launch's replicas are: the environment's name, and the launch.
    occupancy: Callable[[str, str | None], Occupancy | None]
    submit: Submit
    clock: Callable[[], float] = time.monotonic
    again_seconds: float = AGAIN_SECONDS
    _scaled: dict[str, _Scaled] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._timers = _Timers(self.note)

    def serve(self, environment: Environment, *, is_changing: bool = False) -> None:
        """Scale an environment from now on, if its specification says so.

        `is_changing`: a request that changes its replicas has not ended yet.
        """
        if (scaling := scaling_of(environment.spec)) is None:
            self.forget(environment.name)
            return
        known = self._scaled.setdefault(environment.name, _Scaled(scaling, None))
        known.scaling, known.launch = scaling, environment.request_id
        if is_changing:
            return
        failed = known.asked is not None and known.asked != environment.spec.get("replicas")
        known.asked = None
        if failed:
            self._timers.set(environment.name, self.again_seconds)
        else:
            self.note(environment.name)

    def forget(self, name: str) -> None:
        """Stop scaling an environment."""
        self._scaled.pop(name, None)
        self._timers.set(name, None)

    def note(self, name: str) -> None:
        """Decide, since something has changed."""
        known = self._scaled.get(name)
        if known is None or known.asked is not None:
            return
        seen = self.occupancy(name, known.launch)
        if seen is None:
            return
        now = self.clock()
        decision = decide(seen, known.scaling, known.window, now)
        known.window = decision.window
        self._timers.set(name, None if decision.look_at is None else decision.look_at - now)
        if decision.replicas != seen.replicas:
            known.asked = decision.replicas
            self.tasks.spawn(self._submit(name, known, seen), f"scale {name}")

    async def _submit(self, name: str, known: _Scaled, seen: Occupancy) -> None:
        slots = seen.slots * seen.replicas
        reason = f"{seen.sessions} of {plural(slots, 'session')} taken"
        try:
            await self.submit("scale", {"name": name, "replicas": known.asked, "reason": reason})
        except (ApiError, DatabaseError) as exc:
            extra = {"environment": name}
            log.warning("%s is not scaled now, trying again: %s", name, exc, extra=extra)
            known.asked = None
            self._timers.set(name, self.again_seconds)


def scaling_of(spec: dict[str, Any]) -> Scaling | None:
    """Return how an environment scales itself; None when it does not."""
    least, most = spec.get("min_replicas") or 1, spec.get("max_replicas")
    return Scaling(least, most, spec.get("scale_down_seconds", 60.0)) if most else None


class _End(NamedTuple):
    """The end of an instance, which its engine may move."""

    replica_id: str
    ordinal: int
    instance: str | None
    at: float
    replace_at: float  # when to ask for another


@dataclass(eq=False)
class Successors:
    """Owns the state of replicas that their engine ends."""

    tasks: BackgroundTasks
    watched: Callable[[str], Iterable[ReplicaWatch]]
    submit: Submit
    clock: Callable[[], float] = boot_seconds
    again_seconds: float = AGAIN_SECONDS
    _asked: dict[str, set[_End]] = field(init=False, default_factory=dict)  # by name
    # When each replica of an environment ends and is replaced, as last seen.
    _seen: dict[str, dict[str, _End]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._timers = _Timers(self.look)

    def note(self, watch: ReplicaWatch) -> None:
        """Schedule the replacements of an environment again if a replica's end has changed."""
        name, replica_id = watch.replica.environment, watch.replica.id
        if _end_of(watch) != self._seen.get(name, {}).get(replica_id):
            self.look(name)

    def look(self, name: str) -> None:
        """Replace what is due in an environment, and schedule the next replacement."""
        watches = list(self.watched(name))
        there = {watch.replica.id for watch in watches}
        self._seen.pop(name, None)
        if seen := {end.replica_id: end for watch in watches if (end := _end_of(watch))}:
            self._seen[name] = seen
        asked = {end for end in self._asked.pop(name, ()) if end.replica_id in there}
        waiting = [end for end in seen.values() if end not in asked]
        now = self.clock()
        left = min((end.replace_at - now for end in waiting), default=None)
        self._timers.set(name, left if left is None or left > 0 else None)
        if left is not None and left <= 0:
            due = [end for end in waiting if end.replace_at <= now + TOGETHER_SECONDS]
            asked.update(due)
            self.tasks.spawn(self._replace(name, due), f"replace replicas of {name}")
        if asked:
            self._asked[name] = asked

    async def _replace(self, name: str, due: list[_End]) -> None:
        left = min(end.at for end in due) - self.clock()
        reason = f"the time limit of {len(due)} of its replicas is over in {max(0.0, left):.0f} s"
        given = {"name": name, "together": [end.ordinal for end in due]}
        seconds = {"drain_timeout_seconds": max(MIN_SECONDS, left)}
        try:
            await self.submit("restart", {**given, **seconds, "reason": reason})
        except (ApiError, DatabaseError) as exc:
            extra = {"environment": name}
            log.warning("%s is not replaced now, trying again: %s", name, exc, extra=extra)
            await asyncio.sleep(self.again_seconds)
            self._asked.get(name, set()).difference_update(due)
            self.look(name)


def _end_of(watch: ReplicaWatch) -> _End | None:
    """Return the end of the replica to replace first; None if no other can take its place."""
    replica, status = watch.replica, watch.status
    at, replace_at = status.get("ends_at"), status.get("replace_at")
    can_be_replaced = replica.state is ReplicaState.READY and watch.run_file.is_at_gateway
    if not can_be_replaced or at is None or replace_at is None:
        return None
    return _End(replica.id, replica.ordinal, status.get("instance"), at, replace_at)
