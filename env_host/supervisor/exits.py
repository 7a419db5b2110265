# SPDX-License-Identifier: Apache-2.0
"""Deaths of the host's children: how one died, what its clients are told, what the shim.

    wait status, memory group ──▶ `death_of` ──▶ Death ──▶ `Burials.bury`   its clients, its slot
                                                  ├──▶ `facts_of`          for the shim
                                                  └──▶ `failure_of`        when none has served yet

When a shard is started again is decided in `restart_backoff.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ShardFailed
from ..ipc.scoreboard import Scoreboard
from . import close_notices
from .children import Child
from .session_memory import cap_sentence
from .socket_copies import HeldSockets

if TYPE_CHECKING:
    from ..shared_state.process import StateExit

_STOPPING = "The environment is stopping."


@dataclass(frozen=True, slots=True)
class Death:
    """How a child ended, and what it had been."""

    child: Child
    wait_status: int
    sessions: int  # that ended with it
    lived_seconds: float
    peak_bytes: int | None
    out_of_memory: str | None  # how, if it was for memory

    @property
    def is_expected(self) -> bool:
        """Whether that is how it should end."""
        return self.child.is_isolated and self.wait_status == 0

    @property
    def how(self) -> str:
        """For people: `was killed by SIGKILL`."""
        return close_notices.how_it_died(self.wait_status, out_of_memory=self.out_of_memory)


def reaped(pids: Iterable[int]) -> Iterator[tuple[int, int, int | None]]:
    """Those of these processes that have ended: pid, wait status, peak memory in bytes."""
    for pid in pids:
        try:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
        except ChildProcessError:  # somebody else has waited for it
            yield pid, 0, None
            continue
        if ended:
            yield pid, status, usage.ru_maxrss * 1024


def death_of(dead: Child, status: int, peak_bytes: int | None, limit_bytes: int | None) -> Death:
    """What there is to know, while its memory group is still there, and its sockets are held."""
    out_of_memory = dead.killed_for
    if dead.group is not None:
        peak_bytes = dead.group.peak_bytes() or peak_bytes
        if out_of_memory is None and dead.group.oom_kills():
            out_of_memory = cap_sentence(limit_bytes)
    return Death(
        child=dead,
        wait_status=status,
        sessions=int(dead.holds_slot) if dead.is_isolated else len(dead.held),
        lived_seconds=time.monotonic() - dead.started,
        peak_bytes=peak_bytes,
        out_of_memory=out_of_memory,
    )


class Burials:
    """Leaves nothing of a dead child but its clients' answers."""

    def __init__(self, scoreboard: Scoreboard, held: HeldSockets) -> None:
        self._scoreboard = scoreboard
        self._held = held

    def bury(self, death: Death, *, is_stopping: bool) -> None:
        """Notify its clients, free its slot, remove its memory group."""
        dead = death.child
        who = f"({dead.where}) {death.how}"
        if death.wait_status or dead.held:
            text = f"The process of this session {who}; the session has ended."
            self._held.speak_for(dead, _STOPPING if is_stopping else text)
        elif dead.connection_fd is not None:  # its client came and went
            os.close(dead.connection_fd)
        self._scoreboard[dead.orders.index].clear()
        if dead.group is not None:
            dead.group.remove()


def facts_of(death: Death, limit_bytes: int | None) -> dict[str, Any]:
    """What the shim is told of a child; `limit_bytes`: the cap of isolated sessions."""
    dead = death.child
    by = "watchdog" if dead.killed_for is not None else "cgroup"
    return {
        "shard": dead.orders.index,
        "pid": dead.pid,
        "generation": dead.orders.generation,
        "wait_status": death.wait_status,
        "sessions": death.sessions,
        "seconds": death.lived_seconds,
        "peak_bytes": death.peak_bytes,
        "isolated": dead.is_isolated,
        "out_of_memory": death.out_of_memory,
        "detector": None if death.out_of_memory is None else by,
        "limit_bytes": limit_bytes if dead.is_isolated else None,
    }


def facts_of_state(ended: StateExit, sessions: int) -> dict[str, Any]:
    """The same of the state process, and of the sessions that shared it."""
    return {
        "shard": None,
        "shared_state": True,
        "pid": ended.pid,
        "generation": ended.epoch,
        "wait_status": ended.wait_status,
        "sessions": sessions,
        "seconds": ended.lived_seconds,
        "peak_bytes": ended.peak_bytes,
        "isolated": False,
        "out_of_memory": None,
        "detector": None,
        "limit_bytes": None,
    }


def failure_of(death: Death) -> ShardFailed:
    """Why the host fails of it, when nobody has served yet."""
    if (said := death.child.failure) is not None:
        return ShardFailed(said.head["failed"], said.head["log_tail"])
    return ShardFailed(f"{death.child.what} {death.how} before it could serve", [])
