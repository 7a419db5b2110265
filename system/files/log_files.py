# SPDX-License-Identifier: Apache-2.0
"""Log files: their last lines, and a bound of their size while other processes append.

The newest half is moved to the front within the file, which is then cut: no second file is needed
(the disk may be full), writers keep their `O_APPEND` descriptors, and a crash in between repeats
lines instead of losing them. Lines that are appended in the microseconds between the last read and
the cut are lost. Light: a shim imports it.
"""

from __future__ import annotations

import os

MAX_TAIL_BYTES = 64 * 1024
POLL_INTERVAL_SECONDS = 10.0  # between checks of a quiet log
BUSY_POLL_INTERVAL_SECONDS = 0.2  # of a log that will soon exceed its bound
_CHUNK_BYTES = 64 * 1024
_NOTICE = b"[openenvd: earlier lines were dropped to keep this log small]\n"


class BoundedLog:
    """A log whose size is checked now and then."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._size = 0  # at the last check

    def look(self) -> float:
        """Bound the log; returns the seconds until the next check."""
        before, self._size = self._size, self.bound()
        return next_look_seconds(self._size, self._size - before, self._limit_bytes)

    def bound(self) -> int:
        """Cut the log if it is too long; returns its size. An unreadable file is left alone."""
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116
            too_long = size > self._limit_bytes
            return keep_newest_half(self._path, self._limit_bytes) if too_long else size
        except OSError:
            return 0


def next_look_seconds(size_bytes: int, grown_bytes: int, limit_bytes: int) -> float:
    """Return when to look again, after a log has grown by `grown_bytes` since the last look.

    Soon, when growing as much twice more would fill what is left.
    """
    left = max(0, limit_bytes - size_bytes)
    if grown_bytes <= 0 or grown_bytes * 2 < left:
        return POLL_INTERVAL_SECONDS
    return BUSY_POLL_INTERVAL_SECONDS


def keep_newest_half(path: str, limit_bytes: int) -> int:
    """Cut the file to about half of `limit_bytes`, at a line's start; returns its new size.

    Raises `OSError` when the file cannot be read or written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # not O_APPEND: `pwrite` would append
    try:
        size = os.fstat(fd).st_size
        source = max(0, size - limit_bytes // 2)
        if source > 0:  # at the next start of a line, if one is near
            source += max(0, os.pread(fd, _CHUNK_BYTES, source - 1).find(b"\n"))
        if source <= len(_NOTICE):
            return size
        target = os.pwrite(fd, _NOTICE, 0)
        while chunk := os.pread(fd, _CHUNK_BYTES, source):
            source += len(chunk)
            target += os.pwrite(fd, chunk, target)
        os.ftruncate(fd, target)
        return target
    finally:
        os.close(fd)


def last_lines(path: str | os.PathLike[str], count: int, *, after: int = 0) -> list[str]:
    """Return at most `count` last lines of the last `MAX_TAIL_BYTES`; none of a missing file.

    What comes before the offset `after` is left out.

    A first line that this limit cuts is left out, unless it is the only one.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(after, size - MAX_TAIL_BYTES)
            file.seek(start)
            data = file.read(MAX_TAIL_BYTES)
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    if start > after and len(lines) > 1:
        del lines[0]
    return lines[-count:] if count > 0 else []
