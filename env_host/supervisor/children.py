# SPDX-License-Identifier: Apache-2.0
"""The supervisor's children: records of them, and the description of an exit.

    wait status, memory cgroup ──▶ `exit_of` ──▶ words for clients and log, facts for the shim

`close_notices.py` notifies a child's clients; `system/process/backoff.py` times its restarts.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...system.memory.cgroups import Cgroup
from ...system.process.diagnose import explain_child
from ...system.process.proc import kill, reap
from ...system.text.json_lines import Json
from .memory import CHECK_SECONDS, KillCount

if TYPE_CHECKING:
    from ..startup import ChildConfig

RETIRE_SECONDS = 5.0  # for a shard that was asked to exit


@dataclass(slots=True, eq=False)
class Child:
    """A process that serves sessions: a shard, or the process of one session."""

    pid: int
    config: ChildConfig  # of the shard, that which holds the session
    link: socket.socket | None  # of a shard
    started_at: float  # monotonic
    holder: Child | None = None  # the shard that has the session
    number: int = 0  # of this shard's request to start it; 0: a copy of another process
    group: Cgroup | None = None
    kills_before: int = 0  # counted for the whole server, when it was started
    kills: KillCount | None = None  # in its group, if it has one
    cap_bytes: int | None = None  # of memory, of an isolated session
    holds_slot: bool = False  # a session's process: it has a session
    is_ready: bool = False
    retire_at: float | None = None  # when it is stopped, because it is not needed any more
    is_retired: bool = False  # asked to exit: it is not needed any more
    replaced_for: str | None = None  # why it was killed with its sessions, to be replaced
    last_beat: int = 0  # its heartbeat when its loop was last found blocked
    failure: Json | None = None  # why it could not serve: `failed`, and the end of its output
    killed_over: int | None = None  # the limit in bytes for which the memory watchdog killed it
    socket_copies: dict[int, tuple[int, str]] = field(default_factory=dict)  # token: fd, path

    @property
    def index(self) -> int:
        """The child's row of the scoreboard."""
        return self.config.index

    @property
    def is_isolated(self) -> bool:
        """Return whether the child serves a single session."""
        return self.holder is not None

    @property
    def where(self) -> str:
        """The child within a sentence about one of its sessions: `shard 2, pid 71`."""
        pid = f"pid {self.pid}"
        return pid if self.is_isolated else f"shard {self.index}, {pid}"

    @property
    def log_fields(self) -> dict[str, int]:
        """The fields of a log record about this child."""
        return {"shard": self.index, "pid": self.pid, "generation": self.config.generation}

    def retire_if_due(self, now: float) -> None:
        """Ask a shard without sessions to exit when that is due; kill it if it does not."""
        if self.retire_at is None or now < self.retire_at:
            return
        kill(self.pid, signal.SIGKILL if self.is_retired else signal.SIGTERM)
        self.is_retired = True
        self.retire_at = now + RETIRE_SECONDS

    def __str__(self) -> str:
        kind = "isolated session" if self.is_isolated else f"shard {self.index}"
        return f"{kind} (pid {self.pid})"


class Children:
    """The children that run or have not been reaped, by pid."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Child] = {}
        self._shards: dict[int, Child] = {}  # by pid, too

    def __len__(self) -> int:
        return len(self._by_pid)

    @property
    def shards(self) -> list[Child]:
        """The shards."""
        return list(self._shards.values())

    @property
    def sessions(self) -> Iterator[Child]:
        """The processes of isolated sessions."""
        return (each for each in self._by_pid.values() if each.is_isolated)

    @property
    def pids(self) -> list[int]:
        """The pids of all children."""
        return list(self._by_pid)

    def add(self, new: Child) -> None:
        """Add a child that was started."""
        self._by_pid[new.pid] = new
        if not new.is_isolated:
            self._shards[new.pid] = new

    def find(self, pid: int) -> Child | None:
        """Return the child with a pid, or None if it has been reaped."""
        return self._by_pid.get(pid)

    def at(self, index: int) -> Child | None:
        """Return the shard of one row of the scoreboard."""
        return next((each for each in self._shards.values() if each.index == index), None)

    def reap(self) -> Iterator[tuple[Child, int, int | None]]:
        """Yield each child that has exited, its wait status, and its peak memory in bytes.

        Only these pids are waited for: the environment waits for the processes that it started
        when it was imported. They are tried one by one only if one of those has exited.
        """
        while hasattr(os, "waitid"):
            try:
                exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if exited is None:
                return
            if exited.si_pid not in self._by_pid:
                break
            _, status, usage = reap(exited.si_pid)
            yield self._pop(exited.si_pid), status, usage.ru_maxrss * 1024
        for pid in list(self._by_pid):
            if pid not in self._by_pid:  # reaped while an exit was handled
                continue
            try:
                reaped, status, usage = reap(pid)
            except ChildProcessError:  # other code in this process has waited for it
                yield self._pop(pid), 0, None
                continue
            if reaped:
                yield self._pop(pid), status, usage.ru_maxrss * 1024

    def _pop(self, pid: int) -> Child:
        self._shards.pop(pid, None)
        return self._by_pid.pop(pid)

    def kill(self) -> None:
        """Kill all children."""
        for pid in self._by_pid:
            kill(pid)

    def terminate_shards(self) -> None:
        """Send SIGTERM to the shards, which first end their sessions and session processes."""
        for pid in self._shards:
            kill(pid, signal.SIGTERM)


def exit_of(
    child: Child, wait_status: int, peak_bytes: int | None, *, sessions: int, kills: KillCount
) -> tuple[str, dict[str, Any]]:
    """Collect what is known of an exit, before the child's memory cgroup is removed.

    A kill is looked for in the child's own cgroup, if it has one, then in the server's.
    Returns how it exited, for people (`was killed by SIGSEGV`), and the facts for the shim
    (`shard_exit` in `protocol.py`), with the `ExitReason`, which is decided here alone.
    """
    evidence: Json = {}
    cap, pid, started_at = child.cap_bytes, child.pid, child.started_at
    if child.kills is not None and child.group is not None:
        peak_bytes = child.group.peak_bytes() or peak_bytes
        evidence = child.kills.evidence_of(pid, wait_status, 0, started_at)
    is_over_cap = cap is not None and (bool(evidence) or child.killed_over == cap)
    if child.killed_over is not None:
        evidence = {"watchdog": f"checked each {CHECK_SECONDS:g} s, as it has no memory cgroup"}
    evidence = evidence or kills.evidence_of(pid, wait_status, child.kills_before, started_at)
    facts = {
        "shard": child.index,
        "pid": pid,
        "generation": child.config.generation,
        "wait_status": wait_status,
        "sessions": sessions,
        "seconds": time.monotonic() - started_at,
        "peak_bytes": peak_bytes,
        "isolated": child.is_isolated,
        "out_of_memory": is_over_cap,
        "replaced_for": child.replaced_for,
    }
    limit_bytes = cap if is_over_cap else kills.limit_bytes
    reason = explain_child(facts | evidence | {"limit_bytes": limit_bytes})
    how = reason.sentence(shares_limit=not is_over_cap)
    return how, facts | {"reason": reason.to_json()}
