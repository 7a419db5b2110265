# SPDX-License-Identifier: Apache-2.0
"""Messages about a disk that is full or read-only, shared by all programs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
RESERVE_BYTES = 2 * 2**20  # enough for the daemon to start, and for a few requests
_REASONS = tuple(os.strerror(number) for number in _FULL)


def keep_reserve(home: Path) -> None:
    """Make a file that `free_reserve` removes, unless there is one or its disk is nearly full."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(home).free > 8 * RESERVE_BYTES and not _reserve(home).exists():
            _reserve(home).write_bytes(bytes(RESERVE_BYTES))


def free_reserve(home: Path) -> None:
    """Make room on a full disk for the requests that free more of it."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(home).free < RESERVE_BYTES:
            _reserve(home).unlink()


def _reserve(home: Path) -> Path:
    return home / "reserve"


def is_full(exc: BaseException) -> bool:
    """Return whether this was raised because a disk has no space or no inode left."""
    if not isinstance(exc, OSError):
        return False
    if exc.errno is None:  # `shutil.Error` has the errors of several files, as text
        return tells_full(str(exc))
    return exc.errno in _FULL


def tells_full(text: str) -> bool:
    """Return whether the last words of a program say that a disk is full."""
    return any(reason in text for reason in _REASONS)


def is_read_only(folder: Path) -> bool:
    """Return whether a folder lies on a file system that is mounted read-only."""
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def why_unwritable(home: Path, exc: OSError) -> tuple[str, str]:
    """Return why the state folder cannot be written, in one clause, and what to do."""
    if is_full(exc):
        return full(home)
    if exc.errno == errno.EROFS:
        return f"the state folder {home} is on a read-only file system", read_only_hint(home)
    text = f"the state folder {home} cannot be written: {why_refused(home, exc)}"
    return text, "fix its permissions, or point OPENENV_HOME at another folder"


def why_refused(path: Path, exc: OSError) -> str:
    """Return the error's reason, and the folder or file of the path that permits no access."""
    if exc.errno not in (errno.EACCES, errno.EPERM):
        return exc.strerror or str(exc)
    places = (*reversed(path.parents), path)
    first = next((one for one in places if not os.access(one, os.X_OK)), path)
    place = first if os.path.lexists(first) else first.parent
    found = os.lstat(place)
    mode = stat.filemode(found.st_mode)
    return f"{exc.strerror}, since {place} belongs to the user id {found.st_uid} ({mode})"


def read_only_hint(folder: Path) -> str:
    """Return what to do where a folder's file system is mounted read-only."""
    return (
        f"see findmnt -T {folder} and dmesg, since the kernel makes a disk with errors read-only; "
        "mount it writable, or point OPENENV_HOME at another folder"
    )


def folder_of(exc: BaseException, otherwise: Path) -> Path:
    """Return the folder of the file that the exception names; `otherwise` when it names none."""
    # The second file name of a copy's error is the file that is written.
    name = getattr(exc, "filename2", None) or getattr(exc, "filename", None)
    return Path(name).parent if isinstance(name, str) and Path(name).is_absolute() else otherwise


def full(folder: Path) -> tuple[str, str]:
    """Return one clause on the full disk of a folder, which need not exist, and what to do."""
    from shlex import quote  # needed only for errors

    place = quote(str(next(one for one in (folder, *folder.parents) if one.exists())))
    return f"no space left on the disk of {folder}", (
        f"see df -h {place}, df -i {place} and, if there are quotas, quota -s; remove what is not"
        " needed there (of openenvd's own: openenv prune)"
    )
