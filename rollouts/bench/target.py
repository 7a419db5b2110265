# SPDX-License-Identifier: Apache-2.0
"""The server under test: an address, and the processes whose CPU time and memory count."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

HTTP_PORT = 80
_COUNTERS = Path("/proc/net/netstat")
_WHOLE_PROCESS = 2  # CPUCLOCK_SCHED in the kernel's coding of clocks, clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class Target:
    """One server."""

    name: str  # as it is called in tables and figures
    url: str
    root_pids: tuple[int, ...] = ()  # it, with everything below; nothing: it is not ours to see
    token: str | None = None  # that it wants
    others: tuple[str, ...] = ()  # further `host:port` of it: load generators take them in turn

    @property
    def host(self) -> str:
        """The host part of the URL."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        """The port of the URL; HTTP's own when it names none."""
        return urlsplit(self.url).port or HTTP_PORT

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each of its addresses."""
        pairs = (text.rpartition(":") for text in self.others)
        return (self.host, self.port), *((host, int(port)) for host, _, port in pairs)

    @property
    def path(self) -> str:
        """What comes in front of `/ws`."""
        return urlsplit(self.url).path.rstrip("/")


def processes_of(target: Target) -> list[psutil.Process]:
    """Its processes that are there now."""
    found: dict[int, psutil.Process] = {}
    for pid in target.root_pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found.update({p.pid: p for p in (root, *root.children(recursive=True))})
    return list(found.values())


def cpu_seconds(target: Target) -> float:
    """What its processes have used so far; children that have ended count with their parent."""
    total = 0.0
    for process in processes_of(target):
        with contextlib.suppress(psutil.Error, OSError):
            times = process.cpu_times()
            total += times.children_user + times.children_system
            if sys.platform == "linux":  # to the nanosecond: ticks of 10 ms are too coarse
                total += time.clock_gettime((~process.pid << 3) | _WHOLE_PROCESS)
            else:
                total += times.user + times.system
    return total


def read_drops() -> int | None:
    """Return how many connections the kernel has dropped; None where it does not say.

    `TcpExtListenDrops` counts those that found the queue of a listening socket full, of all sockets
    of the network namespace together: other programs' count as well.
    """
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    names, values = (line.split()[1:] for line in lines if line.startswith("TcpExt:"))
    return int(dict(zip(names, values, strict=True))["ListenDrops"])
