# SPDX-License-Identifier: Apache-2.0
"""Reads the kernel's counters and log of kills for memory. Light: a shim imports it.

They are read before and after an exit; `diagnose.py` interprets them.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from ..memory.cgroup_tree import read_keyed
from ..memory.cgroups import Cgroup

_KMSG = "/dev/kmsg"
_KMSG_RECORD_BYTES = 8192
# Records are stamped by the scheduler's clock, which starts and drifts on its own: 10 ms behind
# CLOCK_MONOTONIC on one virtual machine measured. Pids are not reused within this time.
_CLOCKS_APART_SECONDS = 1.0
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in <linux/proc_ns.h>
# mm/oom_kill.c, __oom_kill_process(): `…: Killed process 1234 (python) total-vm:…`
# The line before it, dump_oom_victim(): which cgroup the victim was in (Linux 5.0 and later).
_VICTIM = re.compile(r"task_memcg=([^,]+),.*pid=(\d+)")
_IN_CGROUP = "; in cgroup "
_KILLED = re.compile(r"Killed process (\d+) \((.*?)\)(?:,| |$)")


class OomCounters(NamedTuple):
    """The kernel's counters at one moment; None if one cannot be read."""

    oom_kills: int | None = None  # of the process's own cgroup
    vmstat: int | None = None  # of the whole machine


def read_oom_counters(cgroup: Cgroup | None) -> OomCounters:
    """Read both counters."""
    own = cgroup.oom_kills() if cgroup is not None and cgroup.exists() else None
    return OomCounters(own, read_keyed("/proc/vmstat", "oom_kill"))


def killed_process(line: str) -> tuple[int, str] | None:
    """Return pid and name of the killed process in a line of the kernel log."""
    match = _KILLED.search(line)
    return None if match is None else (int(match[1]), match[2])


def victims_cgroup(line: str) -> str | None:
    """Return the path of the victim's cgroup, from the hierarchy's root, if it is there."""
    _, found, path = line.rpartition(_IN_CGROUP)
    return path if found else None


def kernel_log_kills(since_monotonic: float) -> list[str]:
    """Return lines of the kernel log about kills for memory since then, oldest first.

    The log has a clock of its own, so lines of the second before may be included. Each line ends
    with the victim's cgroup, if the kernel logs it. Empty in a container, whose pids differ from
    those of the log, and without permission to read the log.
    """
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE:  # noqa: PTH115
            return _read_kernel_log(since_monotonic)
    return []


def _read_kernel_log(since_monotonic: float) -> list[str]:
    fd = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    lines: list[str] = []
    cgroup_of: dict[int, str] = {}
    try:
        while True:
            try:
                record = os.read(fd, _KMSG_RECORD_BYTES).decode(errors="replace")
            except BlockingIOError:
                return lines
            except BrokenPipeError:
                continue  # overwritten meanwhile; the next read continues after it
            head, _, text = record.partition(";")
            fields = head.split(",")
            if len(fields) < 3 or int(fields[2]) / 1e6 < since_monotonic - _CLOCKS_APART_SECONDS:
                continue
            if (victim := _VICTIM.search(text)) is not None:
                cgroup_of[int(victim[2])] = victim[1]
            elif (killed := killed_process(text)) is not None:
                cgroup = cgroup_of.pop(killed[0], None)
                suffix = "" if cgroup is None else f"{_IN_CGROUP}{cgroup}"
                lines.append(f"{text.splitlines()[0]}{suffix}")
    finally:
        os.close(fd)
