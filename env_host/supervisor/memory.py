# SPDX-License-Identifier: Apache-2.0
"""Memory: who was killed for it, the caps of sessions, and programs that sessions leave running.

    counter of a cgroup ──▶ `KillLedger` ──▶ `evidence_of` an exit    the kill that explains it
                                        └──▶ `take_others`            those that explain none

The kernel counts a kill, sends SIGKILL, and the victim is reaped a moment later. `KillLedger` alone
says which kill explains which exit: each kill explains one, by SIGKILL, of a process that was
started before it. The kernel log, where it can be read, names the victims. Other kills hit programs
that the environment had started, whose exits the supervisor does not see.

The group is the replica's own below a shim, and that of its container or job elsewhere. Without one
(local replicas on machines without cgroups) the machine's counter is read, which proves nothing
about a single process: a kill that no exit explains within `DYING_SECONDS` is dropped.

An isolated session is held to its cap by a cgroup below the replica's own, where there can be one;
elsewhere by a watchdog, which also holds the replica to its limit if the shim could make no cgroup.

    /…/openenvd/replicas-51fe/my_env-0-7f3a            the replica's, made by its shim
    /…/openenvd/replicas-51fe/my_env-0-7f3a/session-5  one session's, made here before it is forked

`ProgramWatch` reports the programs that the environment has started: those killed for memory, whose
sessions continue, and those left running. A session of a shard may start programs, and need not end
them. While there are sessions, nothing says whose a program is. When there are none, a program was
left by one of them if it is in the replica's cgroup and was not there before the first session.
Without a cgroup that is the replica's alone, only programs that are still below its processes are
found.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...system.memory.cgroup_tree import read_keyed
from ...system.memory.cgroups import Cgroup, own_group
from ...system.process import proc
from ...system.process.diagnose import explain_child, of_cgroup
from ...system.process.oom_evidence import kernel_log_kills, killed_process
from ...system.text.json_lines import Json
from ...system.text.units import MB

if TYPE_CHECKING:
    from ...schema.protocol import HostConfig
    from .children import Child, Children
    from .status_reporter import StatusReporter

POLL_INTERVAL_SECONDS = 1.0  # at least, between two reads of the count
SETTLE_SECONDS = 0.3  # from a count until the signal has certainly been sent
DYING_SECONDS = 10.0  # from the count of a kill until its victim is reaped, as in `server_exit.py`
CHECK_SECONDS = 0.25  # between two checks of what has no cgroup
MIN_LEFT_BYTES = 16 * MB  # a program that holds less is not reported
MAX_NAMED = 5

log = logging.getLogger("openenvd.env_host")


class KillLedger:
    """The kills of one group, numbered by the kernel's counter. No I/O."""

    def __init__(self, count: int) -> None:
        self.count = count  # those before explain nothing
        self.unexplained: list[int] = []

    def note(self, count: int) -> bool:
        """Record how many kills are counted by now; return whether there are new ones."""
        before, self.count = self.count, max(self.count, count)
        self.unexplained += range(before + 1, count + 1)
        return count > before

    def since(self, start: int) -> list[int]:
        """Return the unexplained kills that may have hit a process started when `start` were."""
        return [number for number in self.unexplained if number > start]

    def explain(self, pid: int, start: int, victims: Collection[int]) -> int | None:
        """Return the number of the kill that explains an exit by SIGKILL; None: a person's.

        `victims` are pids in the kernel log whose exits are not explained; none if it has no line.
        """
        possible = self.since(start)
        others = sum(victim != pid for victim in victims)
        if not possible or (pid not in victims and others >= len(possible)):
            return None
        self.unexplained.remove(possible[0])  # processes that were started later need later ones
        return possible[0]

    def take_rest(self) -> int:
        """Return how many kills hit other processes, each once."""
        others, self.unexplained = len(self.unexplained), []
        return others


class KillCount:
    """Counts what the kernel killed in one cgroup, or on the machine when `group` is None.

    `limited` is the group that has the limit, if the processes are in a group below it.
    """

    def __init__(
        self, group: Cgroup | None, limited: Cgroup | None = None, limit_bytes: int | None = None
    ) -> None:
        self.group = group
        self._known_limit = limit_bytes  # of a group around it
        self._limited = limited or group
        self._ledger = KillLedger(self._read() or 0)
        self._victims: set[int] = set()  # pids in the kernel log whose exits are explained
        self._began_at = self._counted_at = self._looked_at = time.monotonic()

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that all processes of the group held together."""
        return None if self._limited is None else self._limited.peak_bytes()

    @property
    def limit_bytes(self) -> int | None:
        """Return how much memory the processes may use; None if that is not known."""
        own = None if self._limited is None else self._limited.limit_bytes()
        return own or self._known_limit

    def due(self, *, is_used: bool) -> float | None:
        """Return when to read the count next (monotonic); None: not before something happens."""
        if self.group is not None and self._ledger.unexplained:
            return max(self._looked_at, self._counted_at) + SETTLE_SECONDS
        return self._looked_at + POLL_INTERVAL_SECONDS if is_used else None

    def count(self) -> int:
        """Return how many kills there have been: none of them hits a process that starts now."""
        now, kills = time.monotonic(), self._read()
        if self.group is None and now - self._counted_at >= DYING_SECONDS:
            self._ledger.take_rest()
        if kills is not None and self._ledger.note(kills):
            self._counted_at = now
        return self._ledger.count

    def evidence_of(self, pid: int, wait_status: int, start: int, started_at: float) -> Json:
        """Return the evidence that the kernel killed a process for memory; empty: there is none.

        The process was started when `start` kills were counted, at `started_at` (monotonic).
        """
        self.count()
        if wait_status & 0x7F != signal.SIGKILL or not self._ledger.since(start):
            return {}
        lines = self._logged(started_at, but=self._victims - {pid})
        number = self._ledger.explain(pid, start, lines)
        if number is None:
            return {}
        self._victims.add(pid)
        counted = {"kernel_log_line": lines.get(pid)}
        if self.group is None:
            return counted | {"machine_oom_kills": [number - 1, number]}
        return counted | {"oom_kills": [number - 1, number], "cgroup": self.group.name}

    def take_others(self, own_pids: Iterable[int]) -> int:
        """Return how many kills hit none of these processes; each kill is returned once."""
        now = time.monotonic()
        if now < (self.due(is_used=True) or 0.0):
            return 0
        self._looked_at = now
        self.count()
        seconds = now - self._counted_at
        if self.group is None or seconds < SETTLE_SECONDS:
            return 0
        if seconds < DYING_SECONDS and any(map(proc.is_dying, own_pids)):
            return 0
        return self._ledger.take_rest()

    def take_rest(self) -> int:
        """Return how many kills are unexplained after the last process of the group was reaped."""
        self.count()
        return self._ledger.take_rest()

    def take_line(self) -> str | None:
        """Return the kernel's last line about a program that was killed, unless it was returned."""
        lines = self._logged(self._began_at, but=self._victims)
        self._victims.update(lines)
        return list(lines.values())[-1] if lines else None

    def _logged(self, since: float, *, but: Collection[int]) -> dict[int, str]:
        """Return what the kernel log says of kills in the group, by pid."""
        directory = None if self.group is None else self.group.directory
        found = of_cgroup(kernel_log_kills(since), directory)
        pids = ((killed_process(line) or (0, ""))[0] for line in found)
        return {pid: line for pid, line in zip(pids, found, strict=True) if pid not in but}

    def _read(self) -> int | None:
        group = self.group
        return read_keyed("/proc/vmstat", "oom_kill") if group is None else group.counted_kills()


@dataclass(eq=False, slots=True)
class MemoryWatchdog:
    """Kills what is over its limit and has no cgroup: isolated sessions, and parts of a replica.

    Of a replica it kills the child that holds the most memory, with the programs below it.
    """

    _children: Children
    _session_limit: int | None
    _limit: int | None  # of the replica; None: it has none, or a cgroup
    _next_check: float = 0.0

    def due(self, *, is_used: bool) -> float | None:
        """Return when to check next, monotonic; None when there is nothing to check."""
        is_wanted = (is_used and self._limit is not None) or bool(self._capped())
        return self._next_check if is_wanted else None

    def check(self) -> None:
        """Kill what is over its limit, when a check is due."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        for each in self._capped():
            if (proc.rollup_bytes(each.pid, "Pss") or 0) > (self._session_limit or 0):
                _kill(each, self._session_limit)
        if self._limit is not None and _tree_bytes(os.getpid()) > self._limit:
            largest = self._children.find(max(self._children.pids, key=_tree_bytes, default=0))
            if largest is not None:
                _kill(largest, self._limit)

    def _capped(self) -> list[Child]:
        is_capped = self._session_limit is not None
        return [each for each in self._children.sessions if is_capped and each.group is None]


def _tree_bytes(pid: int) -> int:
    """Return the memory of a process and all below it; a page that n share counts as 1/n."""
    pids = (pid, *proc.descendants_of(pid))
    return sum(proc.rollup_bytes(each, "Pss") or 0 for each in pids)


def _kill(child: Child, limit: int | None) -> None:
    child.killed_over = limit
    for pid in (*proc.descendants_of(child.pid), child.pid):
        proc.kill(pid)


class ProgramWatch:
    """Reports the programs of the environment that were killed for memory, or left running."""

    def __init__(self, config: HostConfig, children: Children, reporter: StatusReporter) -> None:
        self._is_own_group = not config.owns_cgroup
        self._group = own_group(is_ours=self._is_own_group)
        is_known = config.owns_cgroup or self._group is None  # otherwise the group has it
        self._limit = config.memory_bytes if is_known else None
        self.watched_bytes = None if config.owns_cgroup else self._limit  # by `MemoryWatchdog`
        self._children = children
        self._reporter = reporter
        self._known: set[int] = set()
        self.kills = KillCount(self._group, limit_bytes=self._limit)  # of the whole server

    def start(self) -> None:
        """Count kills in the cgroup of the children, which on v2 may be below the server's."""
        if self._group is not None:
            group = own_group(is_ours=self._is_own_group)
            self.kills = KillCount(group, self._group, self._limit)

    def record_known(self) -> None:
        """Record the programs that run before the first session as the environment's own."""
        self._known = self._running()

    def report_killed(self) -> None:
        """Report programs that were killed for memory; their sessions continue."""
        sessions = self._children.sessions
        counts = [(each.kills, [each.pid], each.cap_bytes) for each in sessions if each.kills]
        for kills, pids, limit in [*counts, (self.kills, self._children.pids, None)]:
            self._report(kills, kills.take_others(pids), limit)

    def report_rest(self, child: Child) -> None:
        """Report what else was killed in the cgroup of an isolated session that has exited."""
        if child.kills is not None:
            self._report(child.kills, child.kills.take_rest(), child.cap_bytes)

    def find_left(self, state_pid: int | None) -> list[dict[str, Any]]:
        """Return what runs beside our processes, while no session is open.

        The largest programs come first, each with its pid, name and bytes.
        """
        found: list[dict[str, Any]] = []
        own = {os.getpid(), *self._children.pids, state_pid}
        for pid in self._running() - self._known - own:
            # What would be free again if it exited: the pages that it shares with no other.
            size = proc.rollup_bytes(pid, "Private_Clean", "Private_Dirty") or 0
            stat = proc.read_stat(pid)
            if size >= MIN_LEFT_BYTES and stat is not None:
                found.append({"pid": pid, "name": stat.name, "bytes": round(size / MB) * MB})
        return sorted(found, key=lambda one: -one["bytes"])[:MAX_NAMED]

    def _running(self) -> set[int]:
        below = proc.descendants_of(os.getpid())
        return below if self._group is None else below | set(self._group.pids())

    def _report(self, kills: KillCount, count: int, cap_bytes: int | None) -> None:
        """Report `count` programs; `cap_bytes`: of the isolated session that had started them."""
        if count == 0 or kills.group is None:
            return
        peak, limit = kills.peak_bytes, cap_bytes or kills.limit_bytes
        facts = {
            "shard": None,
            "programs": count,
            "pid": 0,
            "wait_status": int(signal.SIGKILL),
            "sessions": 0,
            "peak_bytes": peak,
            "isolated": cap_bytes is not None,
            "out_of_memory": cap_bytes is not None,
        }
        known = {"limit_bytes": limit, "kernel_log_line": kills.take_line()}
        reason = explain_child(facts | known)
        self._reporter.report_exit(facts | {"reason": reason.to_json()})
        log.warning("%s", reason.of_programs(count, is_isolated=cap_bytes is not None))
