# SPDX-License-Identifier: Apache-2.0
"""Counts how many more processes there may be, and explains why the system refuses one.

The kernel counts threads as processes, in every control group with a `pids.max` and, for anybody
but root, per user (`RLIMIT_NPROC`). A fork beyond that is refused with EAGAIN, which Python shows
as `BlockingIOError: Resource temporarily unavailable`, which does not help. The limits
are listed in `limits.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .cgroup_tree import level_number, locate
from .limits import level_source, own_process_limit

NO_ROOM = "there is no room for another process"
HINT = (
    "end what is not needed (openenv status, openenv down NAME), ask for fewer --replicas or "
    "--shards, or raise that limit"
)
_NO_THREAD = "can't start new thread"  # CPython's words
_MAKERS = ("fork", "spawn", "_fork_exec")


@dataclass(frozen=True, slots=True)
class ProcessRoom:
    """One limit on processes and threads, and how much of it is used."""

    limit: int
    used: int
    source: str

    @property
    def left(self) -> int:
        """Return how many more processes and threads the limit allows."""
        return max(0, self.limit - self.used)

    def sentence(self) -> str:
        """`60 of 64 processes and threads are in use (cgroup v1 pids.max at /a)`."""
        return f"{self.used} of {self.limit} processes and threads are in use ({self.source})"


def process_room(root: Path = Path("/")) -> ProcessRoom | None:
    """The limit that leaves least; None where there is none."""
    prefix = "" if root == Path("/") else str(root)
    return min(_rooms(prefix), key=lambda room: room.left, default=None)


def no_room_text() -> str:
    """The message for a fork that was refused."""
    room = process_room()
    return NO_ROOM if room is None else f"{NO_ROOM}: {room.sentence()}"


def why_not_started(exc: OSError) -> str:
    """One clause on a process that could not be started."""
    if exc.errno == errno.EAGAIN:
        return no_room_text()
    return f"{exc.strerror or exc} ({type(exc).__name__})"


def tells_no_room(text: str) -> bool:
    """Return whether the end of a program's log says that it was refused a process or a thread."""
    refused = os.strerror(errno.EAGAIN)
    return any(sign in text for sign in (NO_ROOM, refused, _NO_THREAD))


def is_no_room(exc: BaseException) -> bool:
    """Return whether this was raised because a process or a thread was refused."""
    if isinstance(exc, RuntimeError):
        return str(exc) == _NO_THREAD
    # A socket that would block raises the same error.
    return isinstance(exc, BlockingIOError) and _makes_processes(exc.__traceback__)


def _makes_processes(traceback: TracebackType | None) -> bool:
    """Return whether the function that raised it is one that forks."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    names = traceback.tb_frame.f_code.co_names
    return any(maker in name for name in names for maker in _MAKERS)


def _rooms(prefix: str) -> Iterator[ProcessRoom]:
    own = locate("pids", prefix)
    for level in own.levels() if own is not None else ():
        limit, used = level_number(level, "pids.max"), level_number(level, "pids.current")
        if limit is not None and used is not None:
            yield ProcessRoom(limit, used, level_source(level, "pids.max"))
    limit = None if prefix else own_process_limit()
    if limit is not None:
        yield ProcessRoom(limit, _threads_of(os.geteuid()), f"RLIMIT_NPROC of user {os.geteuid()}")


def _threads_of(user: int) -> int:
    """Return how many threads run for a user, in all processes that can be seen."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == user:
                count += len(os.listdir(folder / "task"))  # noqa: PTH208
        except OSError:  # it has ended
            continue
    return count
