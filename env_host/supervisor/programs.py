# SPDX-License-Identifier: Apache-2.0
"""Programs that the environment has started: those killed for memory, and those left running.

The cgroup of a program counts a kill: the replica's, or an isolated session's. A kill
that no exit of a child explains killed another program; its session continues.

A session of a shard may start programs, and need not end them. While there are sessions, nothing
says whose a program is. When there are none, a program was left by one of them if it is in the
replica's cgroup and was not there before the first session. Without a cgroup that is the replica's
alone, only programs that are still below its processes are found.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...system.memory.cgroups import own_group
from ...system.process.proc import descendants_of, read_stat
from ...system.text.units import MB
from .children import Child, Children
from .exits import ExitReports
from .memory import KillCount, private_bytes

if TYPE_CHECKING:
    from ...schema.protocol import HostConfig

MIN_LEFT_BYTES = 16 * MB  # that a program holds, to be named
MAX_NAMED = 5

log = logging.getLogger("openenvd.env_host")


class ProgramWatch:
    """Reports the programs of the environment that were killed for memory, or left running."""

    def __init__(self, config: HostConfig, children: Children, reports: ExitReports) -> None:
        self._is_own_group = not config.owns_cgroup
        self._cap = config.session_memory_bytes
        self._children = children
        self._reports = reports
        self._group = own_group(is_ours=self._is_own_group)
        self._known: set[int] = set()
        self.kills = KillCount(self._group)  # of the whole server

    def start(self) -> None:
        """Count kills in the cgroup of the children, which on v2 may be below the server's."""
        if self._group is not None:
            self.kills = KillCount(own_group(is_ours=self._is_own_group), self._group)

    def record_known(self) -> None:
        """Record the programs that run before the first session as the environment's own."""
        self._known = self._running()

    def report_killed(self) -> None:
        """Report programs that were killed for memory; their sessions continue."""
        counts = [(each.kills, [each.pid], self._cap) for each in self._children if each.kills]
        for kills, pids, limit in [*counts, (self.kills, self._children.pids, None)]:
            self._report(kills, kills.take_others(pids), limit)

    def report_rest(self, child: Child) -> None:
        """Report what else was killed in the cgroup of an isolated session that has exited."""
        if child.kills is not None:
            self._report(child.kills, child.kills.take_rest(), self._cap)

    def find_left(self, own_pids: Iterable[int | None]) -> list[dict[str, Any]]:
        """Return what runs beside these processes, while no session is open.

        The largest programs come first, each with its pid, name and bytes.
        """
        found: list[dict[str, Any]] = []
        for pid in self._running() - self._known - {os.getpid(), *own_pids}:
            size, stat = private_bytes(pid), read_stat(pid)
            if size >= MIN_LEFT_BYTES and stat is not None:
                found.append({"pid": pid, "name": stat.name, "bytes": round(size / MB) * MB})
        left = sorted(found, key=lambda one: -one["bytes"])[:MAX_NAMED]
        self._reports.note_left(left)
        return left

    def _running(self) -> set[int]:
        below = descendants_of(os.getpid())
        return below if self._group is None else below | set(self._group.pids())

    def _report(self, kills: KillCount, count: int, limit: int | None) -> None:
        if count:
            facts = facts_of_programs(kills, count, limit)
            self._reports.report(facts)
            log.warning("%s", programs_sentence(facts))


def facts_of_programs(kills: KillCount, count: int, limit_bytes: int | None) -> dict[str, Any]:
    """Return the report on programs that the environment had started, killed for memory.

    `limit_bytes` is the cap of the isolated session that they belonged to; None: they are in the
    cgroup of the whole server.
    """
    assert kills.group is not None
    return {
        "shard": None,
        "programs": count,
        "pid": 0,
        "wait_status": int(signal.SIGKILL),
        "sessions": 0,
        "peak_bytes": kills.peak_bytes,
        "isolated": limit_bytes is not None,
        "limit_bytes": limit_bytes or kills.limit_bytes,
        "cgroup": kills.group.name,
    }


def programs_sentence(facts: dict[str, Any]) -> str:
    """Return the log line for the facts that `facts_of_programs` returned."""
    count, peak, limit = facts["programs"], facts["peak_bytes"], facts["limit_bytes"]
    what = "a program" if count == 1 else f"{count} programs"
    sizes = [f"limit {limit / MB:.0f} MB"] if limit else []
    sizes += [f"peak {peak / MB:.0f} MB"] if peak else []
    known = f" ({', '.join(sizes)})" if sizes else ""
    whose = "an isolated session" if facts["isolated"] else "the environment"
    return f"{what} that {whose} had started: killed by the kernel for memory{known}"
