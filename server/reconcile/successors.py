# SPDX-License-Identifier: Apache-2.0
"""`Successors`: has replicas replaced before their engine ends them, at a job's time limit, say.

    a replica's `ends_at`, `replace_at` change ──timer──▶ due ──▶ submit `restart`, with the reason
                                                                     │ new ones ready
    the old ones are drained, and have ended at `ends_at` ◀──────────┘

Only behind the gateway, where another replica can take a place. All of an environment that are due
are replaced in one go: they were started together, and their limits are over together.

    the request is refused       another one changes the environment: tried again in a while
    it fails, or is not through  the engine has the replica drained by itself, and it is started
      in time                    again when it has ended
    the daemon is killed         the next one hears of the same times; its queue has the request
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...requests_db.errors import DatabaseError
from ...schema.states import ReplicaState
from ...system.process.process_identity import boot_seconds
from ..errors import ApiError
from .replica_watch import ReplicaWatch
from .work_queue import BackgroundTasks

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0  # after a request was refused
TOGETHER_SECONDS = 60.0  # what is due within these is replaced with what is due now
MIN_SECONDS = 1.0  # for sessions to end

# Submits a `restart`: the environment's name, which replicas, seconds for their sessions, and why.
Submit = Callable[[str, list[int], float, str], Coroutine[Any, Any, None]]


class _End(NamedTuple):
    """The end of one run of an instance; a requeued job keeps its id, and ends later."""

    replica_id: str
    ordinal: int
    instance: str | None
    at: float | None

    @classmethod
    def of(cls, watch: ReplicaWatch) -> _End:
        replica, status = watch.replica, watch.status
        return cls(replica.id, replica.ordinal, status.get("instance"), status.get("ends_at"))


class _Due(NamedTuple):
    """The times at which a replica is replaced, and ends."""

    at: float  # when to ask for another
    end: _End


@dataclass(eq=False)
class Successors:
    """Owns what is remembered of replicas that end by themselves."""

    tasks: BackgroundTasks
    watched: Callable[[str], Iterable[ReplicaWatch]]
    submit: Submit | None = None  # before that nothing is submitted
    clock: Callable[[], float] = boot_seconds
    again_seconds: float = AGAIN_SECONDS
    _timers: dict[str, asyncio.TimerHandle] = field(init=False, default_factory=dict)  # by name
    _asked: dict[str, set[_End]] = field(init=False, default_factory=dict)  # by name
    # When each replica of an environment ends and is replaced, as last seen.
    _seen: dict[str, dict[str, _Due]] = field(init=False, default_factory=dict)

    def note(self, watch: ReplicaWatch) -> None:
        """Schedule the replacements of an environment again if a replica's end has changed."""
        name, replica_id = watch.replica.environment, watch.replica.id
        if _due_of(watch) != self._seen.get(name, {}).get(replica_id):
            self.look(name)

    def look(self, name: str) -> None:
        """Replace what is due in an environment, and schedule the next replacement."""
        watches = list(self.watched(name))
        self._seen.pop(name, None)
        if seen := {w.replica.id: one for w in watches if (one := _due_of(w))}:
            self._seen[name] = seen
        asked = self._asked.pop(name, set()).intersection(map(_End.of, watches))
        waiting = [one for one in seen.values() if one.end not in asked]
        if asked:
            self._asked[name] = asked
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        if not waiting or self.submit is None:
            return
        now = self.clock()
        first = min(one.at for one in waiting)
        if first > now:
            self._look_later(name, first - now)
            return
        due = [one.end for one in waiting if one.at <= now + TOGETHER_SECONDS]
        self._asked[name] = asked.union(due)
        self.tasks.spawn(self._replace(name, due), f"replace replicas of {name}")

    def _look_later(self, name: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(seconds, self.look, name)

    async def _replace(self, name: str, due: list[_End]) -> None:
        assert self.submit is not None
        left = min(end.at for end in due if end.at is not None) - self.clock()
        reason = f"the time limit of {len(due)} of its replicas is over in {max(0.0, left):.0f} s"
        ordinals = [end.ordinal for end in due]
        try:
            await self.submit(name, ordinals, max(MIN_SECONDS, left), reason)
        except (ApiError, DatabaseError) as exc:
            extra = {"environment": name}
            log.warning("%s is not replaced now, trying again: %s", name, exc, extra=extra)
            await asyncio.sleep(self.again_seconds)
            self._asked.get(name, set()).difference_update(due)
            self.look(name)


def _due_of(watch: ReplicaWatch) -> _Due | None:
    """Return when to ask for another in its place; None: never."""
    is_to_be_replaced = (
        watch.replica.state is ReplicaState.READY
        and watch.run_file.is_at_gateway
        and watch.status.get("ends_at") is not None
    )
    at = watch.status.get("replace_at") if is_to_be_replaced else None
    return None if at is None else _Due(at, _End.of(watch))
