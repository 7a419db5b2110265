# SPDX-License-Identifier: Apache-2.0
"""Memory: who was killed for it, the caps of sessions, and programs that sessions leave running.

    counter of a cgroup ──▶ `evidence_of` an exit     the counter before and after it
                       └──▶ `take_others`             kills that no process of ours died of

The kernel counts a kill, sends SIGKILL, and the victim is reaped a moment later. If a process of
ours is dying when the count rises, it was the victim; if not, the victim was a program that the
environment had started, whose exit the supervisor does not see. Each kill explains one exit, so
that a later `kill -9` by hand is not taken for a kill for memory.

The group is the replica's own below a shim, and that of its container or job elsewhere. Without one
(local replicas on machines without cgroups) the machine's counter is read, which proves nothing
about a single process: a kill that no exit explains within `DYING_SECONDS` is dropped.

An isolated session is held to its cap by a cgroup below the replica's own, where there can be one;
elsewhere by a watchdog.

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

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...system.memory.cgroup_tree import read_keyed
from ...system.memory.cgroups import Cgroup, own_group
from ...system.process import proc
from ...system.text.units import MB

if TYPE_CHECKING:
    from ...schema.protocol import HostConfig
    from .children import Child, Children
    from .status_reporter import StatusReporter

POLL_INTERVAL_SECONDS = 1.0  # at least, between two reads of the count
SETTLE_SECONDS = 0.3  # from a count until the signal has certainly been sent
DYING_SECONDS = 10.0  # from the count of a kill until its victim is reaped, as in `server_exit.py`
CHECK_SECONDS = 0.25  # between two checks of uncapped sessions
MIN_LEFT_BYTES = 16 * MB  # a program that holds less is not reported
MAX_NAMED = 5
_SESSION = re.compile(r"session-(\d+)-\d+")

log = logging.getLogger("openenvd.env_host")


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
        self._counted = self._explained = self._read()
        self._counted_at = self._looked_at = time.monotonic()

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
        is_settled = self.group is None or self._counted == self._explained
        return self._looked_at + POLL_INTERVAL_SECONDS if is_used or not is_settled else None

    def evidence_of(self, wait_status: int) -> dict[str, Any]:
        """Return the counter before and after an exit; a kill explains one exit by SIGKILL."""
        self._count()
        before, after = self._explained, self._counted
        if before is None or after is None:
            return {}
        if after > before and _was_killed(wait_status):
            self._explained = before + 1
        if self.group is None:
            return {"machine_oom_kills": [before, after]}
        return {"oom_kills": [before, after], "cgroup": self.group.name}

    def take_others(self, own_pids: Iterable[int]) -> int:
        """Return how many kills hit none of these processes; each kill is returned once."""
        if time.monotonic() < self._looked_at + POLL_INTERVAL_SECONDS:
            return 0
        self._count()
        if self.group is None or self._explained is None or self._counted is None:
            return 0
        if self._counted <= self._explained:
            return 0
        seconds = self._looked_at - self._counted_at
        if seconds < SETTLE_SECONDS or (
            seconds < DYING_SECONDS and any(map(proc.is_dying, own_pids))
        ):
            return 0
        return self._take_unexplained()

    def take_rest(self) -> int:
        """Return how many kills are unexplained after the last process of the group was reaped."""
        self._count()
        return self._take_unexplained()

    def _take_unexplained(self) -> int:
        others, self._explained = (self._counted or 0) - (self._explained or 0), self._counted
        return others

    def _count(self) -> None:
        self._looked_at = now = time.monotonic()
        if self.group is None and now - self._counted_at >= DYING_SECONDS:
            self._explained = self._counted
        if (kills := self._read()) != self._counted:
            self._counted, self._counted_at = kills, now

    def _read(self) -> int | None:
        group = self.group
        return read_keyed("/proc/vmstat", "oom_kill") if group is None else group.counted_kills()


def was_for_memory(evidence: dict[str, Any], wait_status: int) -> bool:
    """Return whether a process was killed, and its cgroup's counter moved."""
    before, after = evidence.get("oom_kills") or (0, 0)
    return bool(before != after and _was_killed(wait_status))


def memory_clause(kills: KillCount, evidence: dict[str, Any]) -> str:
    """Return the words for a process that was killed for the memory of the whole server."""
    limit, peak = kills.limit_bytes, kills.peak_bytes
    known = [proc.shared_limit_sentence(limit)] if limit else []
    known += [f"they held {peak / MB:.0f} MB together at most"] if peak else []
    counted = "→".join(map(str, evidence["oom_kills"]))
    return f"probably for memory: {', '.join([*known, f'oom_kill {counted}'])}"


def _was_killed(wait_status: int) -> bool:
    return os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == signal.SIGKILL


@dataclass(eq=False, slots=True)
class MemoryWatchdog:
    """Kills isolated sessions that are over their cap and have no cgroup."""

    _limit: int | None
    _next_check: float = 0.0

    def due(self, children: Iterable[Child]) -> float | None:
        """Return when to check next, monotonic; None when there is nothing to check."""
        is_wanted = self._limit is not None and any(_is_uncapped(each) for each in children)
        return self._next_check if is_wanted else None

    def check(self, children: Iterable[Child]) -> None:
        """Kill the sessions that are over their cap, when a check is due."""
        now = time.monotonic()
        if self._limit is None or now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        for each in children:
            # A page that n processes share counts as 1/n.
            if _is_uncapped(each) and (proc.rollup_bytes(each.pid, "Pss") or 0) > self._limit:
                each.killed_for = cap_sentence(self._limit)
                os.kill(each.pid, signal.SIGKILL)


def private_bytes(pid: int) -> int:
    """Return what would be free again if the process exited: the pages it shares with no other."""
    return proc.rollup_bytes(pid, "Private_Clean", "Private_Dirty") or 0


def cap_sentence(limit_bytes: int) -> str:
    """Return the words for the end of a session that exceeded its cap."""
    return f"was killed for memory: it needed more than {limit_bytes / MB:g} MB (--session-memory)"


def _is_uncapped(child: Child) -> bool:
    return child.is_isolated and child.group is None


def remove_abandoned(directory: str) -> None:
    """Remove the cgroups that killed supervisors have left, if no shim has removed them."""
    for name in os.listdir(directory):  # noqa: PTH208
        match = _SESSION.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):  # noqa: PTH110
            with contextlib.suppress(OSError):
                os.rmdir(f"{directory}/{name}")  # noqa: PTH106


class ProgramWatch:
    """Reports the programs of the environment that were killed for memory, or left running."""

    def __init__(self, config: HostConfig, children: Children, reporter: StatusReporter) -> None:
        self._is_own_group = not config.owns_cgroup
        self._limit = config.memory_bytes if config.owns_cgroup else None  # of a job
        self._children = children
        self._reporter = reporter
        self._group = own_group(is_ours=self._is_own_group)
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
        counts = [(each.kills, [each.pid], each.cap_bytes) for each in self._children if each.kills]
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
            size, stat = private_bytes(pid), proc.read_stat(pid)
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
            "limit_bytes": limit,
            "cgroup": kills.group.name,
        }
        self._reporter.report_exit(facts)
        what = "a program" if count == 1 else f"{count} programs"
        whose = "the environment" if cap_bytes is None else "an isolated session"
        sizes = [f"limit {limit / MB:.0f} MB"] if limit else []
        sizes += [f"peak {peak / MB:.0f} MB"] if peak else []
        known = f" ({', '.join(sizes)})" if sizes else ""
        text = "%s that %s had started: killed by the kernel for memory%s"
        log.warning(text, what, whose, known)
