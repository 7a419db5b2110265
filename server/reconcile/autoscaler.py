# SPDX-License-Identifier: Apache-2.0
"""`Autoscaler`: has environments scaled by how many of their slots are taken (`launch --max`).

    a replica's status changes ──▶ note ──▶ occupancy ──▶ decide ──▶ submit `scale`, with the reason
    fewer were enough for a while ──timer──┘                           │
    the request has ended ──▶ serve ──▶ from here again  ◀─────────────┘

What is wanted is decided in `environments/replica_policy.py`.
Nothing is looked at while no status changes.
The requests are as a user's: they are in the history, one at a time changes an environment, and one
that fails changes nothing.

    the request is refused   another one changes the environment: looked at again in a while
    it fails                 the same
    the daemon is killed     the next one begins to count again; its queue has the request
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ...environments.replica_policy import DownWindow, Occupancy, Scaling, decide
from ...requests_db.errors import DatabaseError
from ...requests_db.records import Environment
from ..errors import ApiError
from .work_queue import BackgroundTasks

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0  # after a request was refused, or has failed

# Submits a `scale`: the environment's name, how many replicas, and why.
Submit = Callable[[str, int, str], Coroutine[Any, Any, None]]


@dataclass
class _Scaled:
    """One environment that scales itself."""

    scaling: Scaling
    launch: str | None  # whose replicas count
    window: DownWindow | None = None
    asked: int | None = None  # how many replicas were asked for, until that request has ended
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Autoscaler:
    """Owns what is remembered of the environments that scale themselves."""

    tasks: BackgroundTasks
    # How full a launch's replicas are: the environment's name, and the launch.
    occupancy: Callable[[str, str | None], Occupancy | None]
    submit: Submit | None = None  # before that nothing is submitted
    clock: Callable[[], float] = time.monotonic
    again_seconds: float = AGAIN_SECONDS
    _scaled: dict[str, _Scaled] = field(init=False, default_factory=dict)

    def serve(self, environment: Environment, *, is_changing: bool = False) -> None:
        """Scale an environment from now on, if it is to.

        `is_changing`: a request that does so has not ended yet.
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
            self._look_later(environment.name, known, self.again_seconds)
        else:
            self.note(environment.name)

    def forget(self, name: str) -> None:
        """Scale an environment no more."""
        known = self._scaled.pop(name, None)
        if known is not None and known.timer is not None:
            known.timer.cancel()

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
        self._look_later(name, known, None if decision.look_at is None else decision.look_at - now)
        if decision.replicas != seen.replicas and self.submit is not None:
            known.asked = decision.replicas
            self.tasks.spawn(self._submit(name, known, seen), f"scale {name}")

    def _look_later(self, name: str, known: _Scaled, seconds: float | None) -> None:
        """Decide again at that time, and at no other."""
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            known.timer = loop.call_later(max(0.0, seconds), self.note, name)

    async def _submit(self, name: str, known: _Scaled, seen: Occupancy) -> None:
        assert self.submit is not None
        assert known.asked is not None
        slots = seen.slots * seen.replicas
        reason = f"{seen.sessions} of {slots} sessions are taken"
        try:
            await self.submit(name, known.asked, reason)
        except (ApiError, DatabaseError) as exc:
            extra = {"environment": name}
            log.warning("%s is not scaled now, trying again: %s", name, exc, extra=extra)
            known.asked = None
            self._look_later(name, known, self.again_seconds)


def scaling_of(spec: dict[str, Any]) -> Scaling | None:
    """Return how an environment scales itself; None when it does not."""
    least, most = spec.get("min_replicas") or 1, spec.get("max_replicas")
    if not most:
        return None
    return Scaling(least, most, spec.get("scale_down_seconds", 60.0))
