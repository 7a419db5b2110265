# SPDX-License-Identifier: Apache-2.0
"""Where workers come from: the interface that the zygote and its fallback share.

A source is asked for workers and tells, through one readable descriptor, what became of that. It
is used by the supervisor thread alone, and never blocks it for longer than starting a program.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

FORK_IS_SAFE = sys.platform == "linux"

# Numeric libraries start a thread per core in every process that imports them: forty workers were
# seen to make 1,805 threads. Read when a library is loaded, so set before the first import.
THREAD_CAPS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Names the caps that we set and the user did not, so that an operation can take them out of the
# environment of what it starts for good (a replica may use all cores).
THREAD_CAPS_VARIABLE = "OPENENVD_THREAD_CAPS"

_PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2  # linux/pidfd.h, since 6.9


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker exists. `sentinel` is readable once it is dead; None where there is none."""

    name: str
    pid: int
    pipe: socket.socket
    sentinel: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The system would not start a worker."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker was reaped; `status` as of wait(2)."""

    pid: int
    status: int
    peak_bytes: int | None
    was_alone: bool = False  # known never to have had a child: whatever happened was its own


@dataclass(frozen=True, slots=True)
class Ready:
    """The source has finished its own start."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Unsafe:
    """The source has more threads than one, and must not fork; it ends."""

    threads: int


SourceEvent = Forked | Refused | Exited | Ready | Unsafe


class WorkerSource(Protocol):
    """What the supervisor needs of a zygote, or of what stands in for it."""

    def fileno(self) -> int:
        """Readable when `read` has something to say."""

    def request(self, name: str) -> None:
        """Ask for a worker; `Forked` or `Refused` will follow, unless the source is lost."""

    def read(self) -> list[SourceEvent] | None:
        """What happened since; None when the source is lost and will say no more."""

    def noticed_exit(self, pid: int) -> None:
        """Somebody saw that the worker is dead, and wants to know how."""

    def close(self, grace_seconds: float) -> None:
        """End the source; returns when it is gone."""


SourceFactory = Callable[[bool, bool], WorkerSource]  # told whether it may preload, and fork


def threads_of_this_process() -> int:
    """Those of C as well, which `threading` does not know of; 1 where nobody tells."""
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        return 1


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the thread caps that it does not set itself."""
    added = {name: value for name, value in THREAD_CAPS.items() if name not in environ}
    return {**environ, **added, THREAD_CAPS_VARIABLE: ",".join(added)}


def signal_group(leader: int, sentinel: int | None, number: signal.Signals) -> bool:
    """Signal a worker's whole process group; False when nobody of it is left.

    By pidfd it can only reach that very group, even after the leader was reaped.
    """
    try:
        _signal_group(leader, sentinel, number)
    except ProcessLookupError:
        # Dead; or so young that it leads no group yet.
        return _signal_leader(leader, sentinel, number)
    return True


def _signal_group(leader: int, sentinel: int | None, number: signal.Signals) -> None:
    if sentinel is None or sys.platform != "linux":
        os.killpg(leader, number)
        return
    try:
        signal.pidfd_send_signal(sentinel, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except ProcessLookupError:
        raise
    except OSError:  # an older kernel: make sure of the leader, then signal its group by number
        signal.pidfd_send_signal(sentinel, 0)
        os.killpg(leader, number)


def _signal_leader(leader: int, sentinel: int | None, number: signal.Signals) -> bool:
    try:
        if sentinel is not None and sys.platform == "linux":
            signal.pidfd_send_signal(sentinel, number)
        else:
            os.kill(leader, number)
    except ProcessLookupError:
        return False
    return True
