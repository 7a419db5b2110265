# SPDX-License-Identifier: Apache-2.0
"""How a child of the supervisor exited: in words, as facts for the shim, as a failure to start.

    wait status, memory cgroup ──▶ `exit_of` ──▶ `ChildExit` ──▶ `facts`    to the shim
                                                           └──▶ `failure`  before any child served

Field names of the facts are those of `processes.exits.diagnose.Evidence`, which this room cannot
import. What a child's clients are sent: `close_notices.py`; when it is restarted:
`restart_backoff.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...system.proc import exit_sentence
from ..errors import ShardFailed
from .children import Child
from .session_memory import cap_sentence

if TYPE_CHECKING:
    from ..shared_state.process import StateExit


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child exited, and what it had been."""

    child: Child
    wait_status: int
    sessions: int  # that ended with it
    seconds: float  # that it ran
    peak_bytes: int | None
    limit_bytes: int | None  # the cap of isolated sessions
    out_of_memory: str | None  # a sentence, if it was killed for memory
    # A clause, if the kernel probably killed it for the memory of all processes of the server.
    memory_clause: str | None = None

    @property
    def is_expected(self) -> bool:
        """Whether it exited since its session is over, or since it was asked to."""
        return self.child.is_retired or (self.child.is_isolated and self.wait_status == 0)

    @property
    def how(self) -> str:
        """The exit for people: `was killed by SIGKILL`."""
        if self.out_of_memory is not None:
            return self.out_of_memory
        sentence = exit_sentence(self.wait_status)
        return sentence if self.memory_clause is None else f"{sentence}, {self.memory_clause}"

    @property
    def facts(self) -> dict[str, Any]:
        """The report to the shim: `shard_exit` in `protocol.py`."""
        child = self.child
        detector = "watchdog" if child.killed_for is not None else "cgroup"
        return {
            "shard": child.index,
            "pid": child.pid,
            "generation": child.config.generation,
            "wait_status": self.wait_status,
            "sessions": self.sessions,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "isolated": child.is_isolated,
            "out_of_memory": self.out_of_memory,
            "detector": None if self.out_of_memory is None else detector,
            "limit_bytes": self.limit_bytes if child.is_isolated else None,
        }

    @property
    def failure(self) -> ShardFailed:
        """Why the supervisor fails to start, when a child exited before any had served."""
        if (message := self.child.failure) is not None:
            return ShardFailed(message.head["failed"], message.head["log_tail"])
        return ShardFailed(f"{self.child} {self.how} before it could serve", [])


def exit_of(
    child: Child,
    wait_status: int,
    peak_bytes: int | None,
    *,
    sessions: int,
    limit_bytes: int | None,
    memory_clause: str | None = None,
) -> ChildExit:
    """Collect what is known of an exit, before the child's memory cgroup is removed.

    The cgroup, if there is one, knows better than `peak_bytes`.
    """
    out_of_memory = child.killed_for
    if child.group is not None:
        peak_bytes = child.group.peak_bytes() or peak_bytes
        if out_of_memory is None and child.group.oom_kills():
            out_of_memory = cap_sentence(limit_bytes)
    return ChildExit(
        child=child,
        wait_status=wait_status,
        sessions=sessions,
        seconds=time.monotonic() - child.started_at,
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        out_of_memory=out_of_memory,
        memory_clause=memory_clause,
    )


def facts_of_state(exited: StateExit, sessions: int) -> dict[str, Any]:
    """Return the report to the shim on the state process and the sessions that shared it."""
    return {
        "shard": None,
        "shared_state": True,
        "pid": exited.pid,
        "generation": exited.epoch,
        "wait_status": exited.wait_status,
        "sessions": sessions,
        "seconds": exited.seconds,
        "peak_bytes": exited.peak_bytes,
        "isolated": False,
        "out_of_memory": None,
        "detector": None,
        "limit_bytes": None,
    }
