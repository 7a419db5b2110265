# SPDX-License-Identifier: Apache-2.0
"""Looks for what forbids to fork the process of a session: a copy would share it, or lack it.

    threads        of the environment: a copy lacks them, but has their locks
    children       programs that the environment has started
    sockets        connections and pipes: two processes would read from them in turn
    files          open for writing, in-memory databases and temporary folders included
    gpu            devices of CUDA
    shared_state   writable memory that several processes map

Files open for reading are opened again in the copy (`reopen_files`): the two would share an offset.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ...system.process import forking
from ...system.process.proc import children_of
from .copying import Reason, examine

_OWN_FILES = ("sqlite3.", "tempfile.")  # classes whose objects own files, by module
_OWN_MAPPINGS = ("openenvd", "anon_inode:")  # the scoreboard, and those of an event loop
_WRITABLE_SHARED = re.compile(r"^\S+ rw-s .*", re.MULTILINE)  # of /proc/self/maps
_STANDARD = frozenset((0, 1, 2))
_FD = Path("/proc/self/fd")
_TASK = Path("/proc/self/task")

Found = tuple[Reason, str]


def find_obstacles(env: Any, own_fds: Collection[int]) -> list[Found]:
    """Return the obstacles to forking this process, each with a name.

    Descriptors in `own_fds` belong to the env host, and are no obstacles.
    """
    return [
        *_threads(),
        *((Reason.CHILDREN, f"pid {pid}") for pid in children_of(os.getpid())),
        *_descriptors(own_fds),
        *_mappings(),
        *(each for each in examine(env).obstacles if any(own in each[1] for own in _OWN_FILES)),
    ]


def reopen_files(own_fds: Collection[int]) -> None:
    """Open the regular files that the environment reads again, at the same place."""
    for fd, mode in _foreign(own_fds):
        if stat.S_ISREG(mode):
            with contextlib.suppress(OSError):  # it is deleted, or may not be opened any more
                again = os.open(_FD / str(fd), os.O_RDONLY | os.O_CLOEXEC)
                os.lseek(again, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, fd, inheritable=os.get_inheritable(fd))
                os.close(again)


def _threads() -> Iterator[Found]:
    for task in _TASK.iterdir():
        if int(task.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                name = (task / "comm").read_text().strip()
                yield Reason.THREADS, f"{name} (tid {task.name})"


def _descriptors(own_fds: Collection[int]) -> Iterator[Found]:
    for fd, mode in _foreign(own_fds):
        path = str((_FD / str(fd)).readlink())
        if path.startswith(("/dev/nvidia", "/dev/dri")):
            yield Reason.GPU, path
        elif stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
            yield Reason.SOCKETS, f"descriptor {fd}, {path}"
        elif stat.S_ISREG(mode) and _is_writable(fd):
            yield Reason.FILES, path


def _mappings() -> Iterator[Found]:
    for line in _WRITABLE_SHARED.findall(Path("/proc/self/maps").read_text()):
        words = line.split(maxsplit=5)
        path = words[5] if len(words) > 5 else "anonymous"
        if not any(each in path for each in _OWN_MAPPINGS):
            yield Reason.SHARED_STATE, f"shared memory, {path}"


def _foreign(own_fds: Collection[int]) -> Iterator[tuple[int, int]]:
    for fd in forking.open_fds() - _STANDARD:
        if fd not in own_fds:
            yield fd, os.fstat(fd).st_mode


def _is_writable(fd: int) -> bool:
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("flags:"):
            return bool(int(line.split()[1], 8) & os.O_ACCMODE)
    return False
