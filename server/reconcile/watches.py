# SPDX-License-Identifier: Apache-2.0
"""An index of all watches by environment, and the sums of sessions and slots of each launch.

    adopted, given up ──add, remove──▶ index by environment ──▶ of(name)
    a status, a state ──note──▶ sums of its launch's replicas ──▶ occupancy(name, launch)
                         └────▶ `Moves` ──▶ `Roster`: the replicas of a change, by their parts in it

A status updates the sums and the replica's part by its difference from the last one: it costs the
same whether an environment has ten replicas or a thousand. Everything here runs on the daemon's
loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import anyio

from ...environments.replica_policy import Occupancy
from ...environments.run_files import RunFile, by_service
from ...schema.states import ReplicaState
from .replica_watch import BEGIN_SESSIONS, ReplicaWatch, is_over

_COUNTED = (*BEGIN_SESSIONS, ReplicaState.BACKING_OFF)


class _Share(NamedTuple):
    """The part that one replica adds to the sums of its launch."""

    slots: int | None  # how many sessions it can have, once it has said so
    sessions: int


@dataclass(slots=True)
class _Sums:
    """The sums over the replicas of one launch."""

    replicas: int = 0
    sessions: int = 0
    slots: Counter[int] = field(default_factory=Counter)  # replicas, by how many slots each has

    def add(self, share: _Share | None, sign: int) -> None:
        """Add a replica's share; subtract it if `sign` is -1."""
        if share is not None:
            self.replicas += sign
            self.sessions += sign * share.sessions
            if share.slots:
                self.slots[share.slots] += sign


class Watches(dict[str, "ReplicaWatch"]):
    """The watches by replica; owns the index and the sums."""

    def __init__(self) -> None:
        super().__init__()
        self._by_environment: dict[str, dict[str, ReplicaWatch]] = {}
        self._shares: dict[str, _Share | None] = {}  # by replica: what is in the sums
        self._sums: dict[tuple[str, str], _Sums] = {}  # by environment and launch

    def of(self, name: str, request_id: str | None = None) -> list[ReplicaWatch]:
        """The watches of an environment's replicas, or of one launch of it."""
        found = self._by_environment.get(name, {}).values()
        return [watch for watch in found if request_id in (None, watch.request_id)]

    def that_serves(self, name: str) -> RunFile | None:
        """Return the run file that `run_files.that_serves` finds, of a watched replica."""
        own = (watch for watch in self.of(name) if not is_over(watch.replica.state))
        return min((watch.run_file for watch in own), key=by_service, default=None)

    def without(self, found: list[RunFile]) -> list[RunFile]:
        """Return the replicas of these run files that are not watched."""
        return [r for r in found if not ((w := self.get(r.replica_id)) and w.is_of(r))]

    def add(self, watch: ReplicaWatch) -> None:
        """Watch a replica, which was not watched."""
        replica_id = watch.replica.id
        self[replica_id] = watch
        self._by_environment.setdefault(watch.replica.environment, {})[replica_id] = watch
        self.note(watch)

    def remove(self, replica_id: str) -> ReplicaWatch | None:
        """Stop watching a replica; return its watch, if there was one."""
        watch = self.pop(replica_id, None)
        if watch is not None:
            name = watch.replica.environment
            self._count(watch, None)
            del self._shares[replica_id]
            del self._by_environment[name][replica_id]
            if not self._by_environment[name]:
                del self._by_environment[name]
            if not self._sums[name, watch.request_id].replicas:
                del self._sums[name, watch.request_id]
        return watch

    def note(self, watch: ReplicaWatch) -> None:
        """Update the sums by a replica's state and sessions, if the replica is still watched."""
        if self.get(watch.replica.id) is watch:
            counts = watch.replica.state in _COUNTED  # it may begin sessions
            self._count(watch, _Share(watch.max_sessions, watch.sessions) if counts else None)

    def occupancy(self, name: str, request_id: str | None) -> Occupancy | None:
        """Return how full a launch's replicas are; None while none has reported its maximum."""
        sums = self._sums.get((name, request_id or ""))
        if sums is None or not (slots := +sums.slots):
            return None
        return Occupancy(sums.replicas, max(slots), sums.sessions)

    def _count(self, watch: ReplicaWatch, share: _Share | None) -> None:
        replica = watch.replica
        sums = self._sums.setdefault((replica.environment, watch.request_id), _Sums())
        sums.add(self._shares.get(replica.id), -1)
        sums.add(share, 1)
        self._shares[replica.id] = share


class Moves:
    """The replicas of one environment that have changed since `next` was called."""

    def __init__(self) -> None:
        self._changed: dict[str, ReplicaWatch] = {}
        self._has_changed = asyncio.Event()

    def add(self, watch: ReplicaWatch) -> None:
        """Record that a replica has changed."""
        self._changed[watch.replica.id] = watch
        self._has_changed.set()

    async def next(self, seconds: float) -> list[ReplicaWatch]:
        """Wait until replicas have changed, at most for `seconds`; return them."""
        with anyio.move_on_after(seconds):
            await self._has_changed.wait()
        self._has_changed.clear()
        found, self._changed = list(self._changed.values()), {}
        return found


class Part(Enum):
    """The part of a replica in a change."""

    STAYS = "stays"
    OLD = "old"  # it is to be replaced, and serves
    WAITING = "waiting"  # it was started, and is not ready
    READY = "ready"  # it was started, and is ready; it may still be dropped
    KEPT = "kept"  # it was started, and belongs to the environment
    ENDING = "ending"  # it is drained, and has not ended


class Roster:
    """The replicas that a change sees, by their parts in it, each in the order in which they came.

    `part_of` says which part a replica has; None: it has left the change.
    """

    def __init__(self, part_of: Callable[[ReplicaWatch], Part | None]) -> None:
        self._part_of = part_of
        self._found: dict[Part, dict[str, ReplicaWatch]] = {part: {} for part in Part}

    def note(self, watch: ReplicaWatch) -> None:
        """Give a replica its part as of now."""
        replica_id, now = watch.replica.id, self._part_of(watch)
        before = next((part for part, ids in self._found.items() if replica_id in ids), None)
        if now is before and (now is None or self._found[now][replica_id] is watch):
            return
        if before is not None:
            del self._found[before][replica_id]
        if now is not None:
            self._found[now][replica_id] = watch

    def count(self, *parts: Part) -> int:
        """Return how many replicas have one of these parts."""
        return sum(len(self._found[part]) for part in parts)

    def each(self, *parts: Part) -> Iterator[ReplicaWatch]:
        """The replicas that have one of these parts."""
        return (watch for part in parts for watch in self._found[part].values())
