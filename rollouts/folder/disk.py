# SPDX-License-Identifier: Apache-2.0
"""Durable file operations. A slow or failing disk, for tests, is a subclass of this.

Large files do not stay in the page cache: each append asks the kernel to write its pages back, and
to drop those that are written (`posix_fadvise`). Otherwise a rollout of gigabytes evicts the cached
files of all other programs, holds the disk for seconds when it is written back at once, and counts
against the memory limit of the rollout.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ..episodes import BytesLike

Stamp = tuple[int, int, int]


class Disk:
    """Writes files, and makes them durable."""

    keeps_cached = False  # also of a subclass that knows nothing of it

    def __init__(self, *, keep_cached: bool = False) -> None:
        """`keep_cached` leaves large files in the page cache, for a reader that follows at once."""
        self.keeps_cached = keep_cached

    def append(self, path: Path, chunks: Sequence[BytesLike], *, write_back: bool = False) -> None:
        """Appends to a file, and creates it where it is missing.

        `write_back` asks the kernel to begin writing it to the medium, and to drop what is there.
        """
        path.parent.mkdir(exist_ok=True)  # someone may have removed it
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.write(descriptor, chunks)
            if write_back and not self.keeps_cached:
                drop_from_page_cache(descriptor)
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        """All of it, however little the system takes at a time."""
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.writelines(chunks)

    def sync(self, path: Path, *, drop_cached: bool = False) -> None:
        """Returns when the content of the file or folder is on the medium."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if drop_cached and not self.keeps_cached:
                drop_from_page_cache(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """In one moment."""
        target.parent.mkdir(exist_ok=True)
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Removes a file, or an empty folder; one that is missing is no error."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() else path.unlink()


def stamp_of(path: Path) -> Stamp | None:
    """Return what changes with a file; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def drop_from_page_cache(descriptor: int, offset: int = 0, size_bytes: int = 0) -> None:
    """Asks Linux to write back the dirty pages of a stretch of a file, and to drop the clean ones.

    The stretch ends with the file where `size_bytes` is 0. Errors are ignored.
    """
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)
