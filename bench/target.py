# SPDX-License-Identifier: Apache-2.0
"""The server under test: an address, and the processes whose CPU time and memory count."""

from __future__ import annotations

import contextlib
import http.client
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from ..system.access_tokens import bearer_header
from .errors import Unreachable

HTTP_PORT = 80
ASK_SECONDS = 10.0
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


def check_answers(target: Target) -> None:
    """Check that the server answers `GET /health`, whatever it says."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=ASK_SECONDS)
    try:
        connection.request("GET", f"{target.path}/health", headers=bearer_header(target.token))
        connection.getresponse()
    except (OSError, http.client.HTTPException) as exc:
        why = str(exc) or type(exc).__name__
        raise Unreachable(
            f"{target.name}: nothing answers at {target.url}: {why}",
            "start it first, or correct the address",
        ) from exc
    finally:
        connection.close()


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


def pss_bytes(target: Target) -> dict[int, int]:
    """By process, what it holds, with what is shared shared out (where the system tells)."""
    held: dict[int, int] = {}
    for process in processes_of(target):
        with contextlib.suppress(psutil.Error):
            memory = process.memory_full_info()
            held[process.pid] = int(getattr(memory, "pss", 0) or memory.uss)
    return held


class Dropped(NamedTuple):
    """Connections that the kernel dropped because a listening socket's queue was full.

    Counted for all sockets of the network namespace together: other programs' count as well.
    """

    overflows: int  # `TcpExtListenOverflows`: the queue of accepted connections was full
    drops: int  # `TcpExtListenDrops`: these, and what was dropped for any other reason


def read_dropped() -> Dropped | None:
    """Return the kernel's counters as they are now; None where the system has none."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    names, values = (line.split()[1:] for line in lines if line.startswith("TcpExt:"))
    counters = dict(zip(names, map(int, values), strict=True))
    return Dropped(counters["ListenOverflows"], counters["ListenDrops"])
