# SPDX-License-Identifier: Apache-2.0
"""Durable file operations. Tests subclass `Disk` to have a slow or failing disk.

Large files do not stay in the page cache: each append asks the kernel to write its pages back, and
to drop the written ones (`posix_fadvise`). Otherwise a rollout of gigabytes would evict the cached
files of all other programs, occupy the disk for seconds while it is written back at once, and count
against the rollout's memory limit.
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

    def append(self, path: Path, chunks: Sequence[BytesLike], *, write_back: bool = False) -> None:
        """Append to a file, and create it if it is missing.

        `write_back` asks the kernel to start writing it to the medium, and to drop written pages.
        """
        path.parent.mkdir(exist_ok=True)  # a person may have removed it
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.write(descriptor, chunks)
            if write_back:
                drop_from_page_cache(descriptor)
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        """Write all of the data, even if the system takes it in small pieces."""
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.writelines(chunks)

    def sync(self, path: Path, *, drop_cached: bool = False) -> None:
        """Return when the content of the file or folder is on the medium."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if drop_cached:
                drop_from_page_cache(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder atomically."""
        target.parent.mkdir(exist_ok=True)
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file or an empty folder; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() else path.unlink()


def stamp_of(path: Path) -> Stamp | None:
    """Return values that change with a file, or None if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def drop_from_page_cache(descriptor: int) -> None:
    """Ask Linux to write back a file's dirty pages, and to drop the clean ones; ignores errors."""
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
