# SPDX-License-Identifier: Apache-2.0
"""Reads a process's files below `/proc`, and describes its exit by its wait status.

`printed_by` runs a command for its output.

Sizes are bytes. Light: a shim imports it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..memory.cgroup_tree import read_text

_SECONDS_PER_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
OWN_SESSION = "/proc/self/autogroup"
_MAX_DEPTH = 16  # of a tree of processes
_KILL_SECONDS = 1.0  # then processes that the kernel cannot end yet are left
_KILL_ROUNDS = 100


class ProcessStat(NamedTuple):
    """The facts in one line of `/proc/<pid>/stat`."""

    pid: int
    name: str
    state: str  # a letter: R, S, D, T, Z (dead, not yet reaped), …
    parent: int
    group: int
    session: int
    started_seconds: float  # since boot

    @property
    def is_dead(self) -> bool:
        """Return whether the process has ended; a zombie has."""
        return self.state in "ZX"


def read_stat(pid: int) -> ProcessStat | None:
    """Return the kernel's facts on the process with this pid, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return parse_stat(file.read().decode(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):  # others: unknown
        return None


def parse_stat(line: str) -> ProcessStat:
    """Return the fields of a `/proc/<pid>/stat` line; the name may hold blanks and brackets."""
    head, _, tail = line.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    return ProcessStat(
        pid=int(pid),
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started_seconds=int(fields[19]) * _SECONDS_PER_TICK,
    )


def is_dying(pid: int) -> bool:
    """Return whether a process was sent SIGKILL, has released its memory, or is gone."""
    text = read_text(f"/proc/{pid}/status") or ""
    lines = dict(line.partition(":")[::2] for line in text.split("\n"))
    if "VmSize" not in lines:
        return True
    pending = int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)
    return bool(pending >> (signal.SIGKILL - 1) & 1)


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children and adopted orphans; none if it has ended."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            listed = read_text(f"/proc/{pid}/task/{thread}/children") or ""
            children += map(int, listed.split())
    return children


def descendants_of(pid: int) -> set[int]:
    """Return the pids of a process's descendants."""
    found: set[int] = set()
    generation = {pid}
    for _ in range(_MAX_DEPTH):
        generation = {child for parent in generation for child in children_of(parent)} - found
        if not generation:
            break
        found |= generation
    return found


def kill_descendants() -> None:
    """Kill the descendants of this process, including orphans if it adopts them."""
    own = os.getpid()
    for _ in range(_KILL_ROUNDS):  # the next round finds processes that are forked meanwhile
        stats = map(read_stat, descendants_of(own))
        alive = [stat.pid for stat in stats if stat is not None and not stat.is_dead]
        if not alive:
            return
        for pid in alive:
            kill(pid)
        time.sleep(_KILL_SECONDS / _KILL_ROUNDS)


def kill(pid: int, number: int = signal.SIGKILL, *, group: bool = False) -> None:
    """Send a signal to a process or to a process group, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


def has_exited(pid: int) -> bool:
    """Return whether a child has exited, and is still to be reaped."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def reap(pid: int) -> tuple[int, int, resource.struct_rusage]:
    """Do the same as `os.wait4`, without waiting.

    `os.wait4` imports `resource` at each call, and a project may have a module of this name.
    """
    theirs = sys.modules.get(resource.__name__)
    sys.modules[resource.__name__] = resource
    try:
        return os.wait4(pid, os.WNOHANG)
    finally:
        if theirs is None:
            del sys.modules[resource.__name__]
        else:
            sys.modules[resource.__name__] = theirs


def resident_bytes(pid: int) -> tuple[int | None, int]:
    """Return a process's resident memory (None: it has ended), and the part of files in it."""
    if not (text := read_text(f"/proc/{pid}/statm")):
        return None, 0
    _, resident, of_files = text.split()[:3]
    page_bytes = resource.getpagesize()
    return int(resident) * page_bytes, int(of_files) * page_bytes


def rollup_bytes(pid: int, *names: str) -> int | None:
    """Return the sum of some lines of `smaps_rollup`, such as `Pss` or `Private_Dirty`.

    None when it cannot be read: the process has ended, or the kernel is older than 5.4.
    """
    text = read_text(f"/proc/{pid}/smaps_rollup") or ""
    wanted = {f"{name}:" for name in names}
    lines = [line.split() for line in text.splitlines()[1:]]
    found = [int(line[1]) * 1024 for line in lines if line[0] in wanted]
    return sum(found) if found else None


def printed_by(
    command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None
) -> str:
    """Return a command's output; empty if it fails, takes longer, or does not exist."""
    import subprocess  # shims do not need it

    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def oom_score_adj() -> int:
    """Return how soon the kernel kills this process when memory runs out; 0 if unknown."""
    return int(read_text("/proc/self/oom_score_adj") or 0)


def set_oom_score_adj(pid: int, value: int) -> bool:
    """Set how soon the kernel picks a process when memory runs out; False if that failed.

    The value is from -1000, never, to 1000, first. Lowering it needs privilege.
    """
    return _write(f"/proc/{pid}/oom_score_adj", value)


def prefer_own_session(nice: int, file: str = OWN_SESSION) -> bool:
    """Set the niceness of this process's session; False if that fails.

    With autogroups (sched(7), the default of desktops and of many servers) each session has an
    equal share of the processors: a daemon competes with a hundred launches as one of 101, and
    `nice` counts only within a session. Between sessions, the session's niceness counts. Lowering
    it needs privilege.
    """
    return _write(file, nice)


def _write(file: str, value: int) -> bool:
    try:
        with open(file, "r+b", buffering=0) as opened:  # never created: only the kernel can
            opened.write(str(value).encode())
    except OSError:
        return False
    return True


def split_wait_status(wait_status: int) -> tuple[int | None, int | None]:
    """Return a process's exit code and the signal that ended it; one of them is None."""
    code = os.waitstatus_to_exitcode(wait_status)
    return (code, None) if code >= 0 else (None, -code)


def signal_name(number: int) -> str:
    """Return `SIGKILL` rather than 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


_fd_limits: list[tuple[int, int]] = []  # of this process, before the first was raised


def raise_fd_limit() -> int:
    """Raise the soft limit on open files to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower one in the kernel
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            _fd_limits.append((soft, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def lower_fd_limit(pid: int) -> None:
    """Give a program that was just started the limit from before `raise_fd_limit`.

    Programs that use `select`, or close every possible descriptor, need a low limit.
    """
    if _fd_limits and hasattr(resource, "prlimit"):
        with contextlib.suppress(OSError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _fd_limits[0])
