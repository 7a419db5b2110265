# SPDX-License-Identifier: Apache-2.0
"""The interface of a worker source, which the zygote and its fallback share.

Workers are requested of a source, which reports through one readable descriptor that they have
started and exited. It is used by the supervisor thread alone, and never blocks it for longer than
starting a program.
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
    """A worker has started. `sentinel` is readable once it has exited; None where there is none."""

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
    was_alone: bool = False  # known never to have had a child that a kill may have met instead


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
    """A zygote, or its fallback."""

    @property
    def pid(self) -> int | None:
        """Return the zygote's pid; None when there is none."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` has events."""

    def request(self, name: str) -> None:
        """Request a worker; `Forked` or `Refused` follows, unless the source is lost."""

    def read(self) -> list[SourceEvent] | None:
        """Return what has happened since; None when the source is lost."""

    def noticed_exit(self, pid: int) -> None:
        """Report the status of a worker that is seen to have exited."""

    def close(self, grace_seconds: float) -> None:
        """End the source; returns when it has exited."""


SourceFactory = Callable[[bool, bool], WorkerSource]  # called with may_preload, may_fork


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the thread caps that it does not set itself."""
    added = {name: value for name, value in THREAD_CAPS.items() if name not in environ}
    return {**environ, **added, THREAD_CAPS_VARIABLE: ",".join(added)}


def signal_group(leader: int, sentinel: int | None, number: signal.Signals) -> bool:
    """Signal a worker's whole process group; False when no process of it is left.

    By pidfd the signal can only reach that very group, even after the leader was reaped.
    """
    try:
        _signal_group(leader, sentinel, number)
    except ProcessLookupError:
        # It has exited, or has just started and leads no group yet.
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
