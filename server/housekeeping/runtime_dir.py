# SPDX-License-Identifier: Apache-2.0
"""The folder of a home's sockets.

It is `home/sockets`, or a short one in the temporary folder when that is too long a path.

    made        by each daemon that starts (`held`)
    removed     by the daemon that stops, when no shim has a socket there; by the last shim of a
                home that was removed (`shim.files.remove_if_empty`)
    collected   by the next daemon of any home of the same user, when no process listens there:
                killed daemons and shims leave their sockets behind (`collect_abandoned`)

A process that binds a socket there or removes the folder holds the lock on the folder itself, so
that the folder is not removed between being made and being bound in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...schema.layout import make_private

MAX_REMOVALS = 100  # of the folder between making and locking it, one after the other

# How `connect` fails at a socket whose owner has died. Any other error may be a live owner: a full
# backlog is EAGAIN.
_NO_LISTENER = (errno.ECONNREFUSED, errno.ENOENT)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder, and keep it from being removed within the block.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    with contextlib.ExitStack() as stack:
        for attempt in range(MAX_REMOVALS):
            try:
                make_private(folder)
                stack.enter_context(_locked(folder))
                break
            # `mkdir` raises the latter, too, for a folder removed meanwhile.
            except (FileNotFoundError, FileExistsError):
                if attempt == MAX_REMOVALS - 1:
                    raise
        yield


def collect_abandoned(folders: Iterable[Path]) -> list[Path]:
    """Remove the folders of sockets in which no process listens; return them.

    Other users' folders, and folders that hold anything but sockets, stay.
    """
    return [folder for folder in folders if _remove_if_abandoned(folder)]


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        with _locked(folder, wait=False):
            sockets = list(folder.iterdir())
            if not all(has_no_listener(path) for path in sockets):
                return False
            for path in sockets:
                path.unlink(missing_ok=True)
            folder.rmdir()
    except OSError:  # removed meanwhile, held, or another user's
        return False
    return True


def has_no_listener(path: Path) -> bool:
    """Return whether a path is a socket at which no process listens any more.

    Raises:
        OSError: There is nothing at the path.
    """
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in _NO_LISTENER


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder of this user.

    Raises:
        FileNotFoundError: it does not exist, or was removed while we waited.
        OSError: it is another user's, or is held.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not os.path.samestat(os.fstat(descriptor), folder.lstat()):
            raise FileNotFoundError(errno.ENOENT, "it was replaced", str(folder))
        yield
    finally:
        os.close(descriptor)
