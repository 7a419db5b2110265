# SPDX-License-Identifier: Apache-2.0
"""Log files: their last lines, a bound of their size while other processes append, and times.

The newest half is moved to the front within the file, which is then cut: no second file is needed
(the disk may be full), writers keep their `O_APPEND` descriptors, and a crash in between repeats
lines instead of losing them. Lines that are appended in the microseconds between the last read and
the cut are lost. Light: a shim imports it.

A log's lines have no times. Who bounds the log also writes marks to `LOG.times`, at most one in
`MARK_SECONDS`: the time of the last write, and the log's size then. `offset_since` reads them.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial

MAX_TAIL_BYTES = 64 * 1024
POLL_INTERVAL_SECONDS = 10.0  # between checks of a quiet log
BUSY_POLL_INTERVAL_SECONDS = 0.2  # of a log that will soon exceed its bound
MARK_SECONDS = 5.0
TIMES_SUFFIX = ".times"
_MAX_MARKS_BYTES = 256 * 1024
_CHUNK_BYTES = 64 * 1024
_NOTICE = b"[openenvd: earlier lines were dropped to keep this log small]\n"


class BoundedLog:
    """A log whose size is checked now and then; each check may write a mark."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._size = 0  # at the last check
        self._marked_size = 0
        self._marked_at = self._mark_time = 0.0  # when, and what time, was written last

    def look(self) -> float:
        """Bound the log; returns the seconds until the next check."""
        before, self._size = self._size, self.bound()
        return next_look_seconds(self._size, self._size - before, self._limit_bytes)

    def bound(self, written_at: float | None = None) -> int:
        """Cut the log if it is too long; returns its size. An unreadable file is left alone.

        `written_at` is the Unix time of the last line; None: that of the file's last write.
        """
        try:
            status = os.stat(self._path)  # noqa: PTH116
            if status.st_size != self._marked_size:
                self._mark(status.st_size, status.st_mtime if written_at is None else written_at)
            if status.st_size <= self._limit_bytes:
                return status.st_size
            self._marked_size = keep_newest_half(self._path, self._limit_bytes)
            return self._marked_size
        except OSError:
            return 0

    def _mark(self, size: int, at: float) -> None:
        now, path = time.monotonic(), self._path + TIMES_SUFFIX
        if max(now - self._marked_at, at - self._mark_time) < MARK_SECONDS:
            return
        self._marked_size, self._marked_at, self._mark_time = size, now, at
        open_privately = partial(os.open, mode=0o600)
        with suppress(OSError), open(path, "a", opener=open_privately) as file:
            file.write(f"{at:.3f} {size}\n")
            if file.tell() > _MAX_MARKS_BYTES:
                file.flush()
                keep_newest_half(path, _MAX_MARKS_BYTES)


def next_look_seconds(size_bytes: int, grown_bytes: int, limit_bytes: int) -> float:
    """Return when to look again: soon, when growing as much twice more would fill what is left."""
    left = max(0, limit_bytes - size_bytes)
    if grown_bytes <= 0 or grown_bytes * 2 < left:
        return POLL_INTERVAL_SECONDS
    return BUSY_POLL_INTERVAL_SECONDS


def keep_newest_half(path: str, limit_bytes: int) -> int:
    """Cut the file to half of the limit, at a line's start; returns its size. Raises `OSError`."""
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
    finally:
        os.close(fd)
    if marks := _read_marks(path):
        with open(path + TIMES_SUFFIX, "w") as file:
            moved = ((at, offset - source + target) for at, offset in marks)
            file.writelines(f"{at:.3f} {offset}\n" for at, offset in moved if offset > 0)
    return target


def offset_since(path: str | os.PathLike[str], since: float) -> int:
    """Return the offset of the first line that may have been written since that Unix time.

    All lines since then follow. Up to 10 s of earlier lines may precede them, and more of a time
    without marks. A log that has no marks is returned whole if it was written to since then.
    """
    with suppress(OSError), open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_mtime < since:
            return status.st_size
        marks = _read_marks(os.fspath(path))
        found = max((o for at, o in marks if at < since and o <= status.st_size), default=0)
        before = max(0, found - _CHUNK_BYTES)
        file.seek(before)
        return before + file.read(found - before).rfind(b"\n") + 1  # the mark may be within a line
    return 0


def _read_marks(path: str) -> list[tuple[float, int]]:
    """Read the marks of a log; a damaged line is left out."""
    found = []
    with suppress(OSError), open(path + TIMES_SUFFIX, errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                at, offset = line.split()
                found.append((float(at), int(offset)))
    return found


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
