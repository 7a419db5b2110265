# SPDX-License-Identifier: Apache-2.0
"""Durable file operations. A slow disk, for tests, is a subclass of this.

Every error of the operating system becomes one of `errors`, which names the file.

Large files do not stay in the page cache: each append asks the kernel to write its pages back, and
to drop those that are written (`posix_fadvise`). Otherwise a rollout of gigabytes evicts the cached
files of all other programs, holds the disk for seconds when it is written back at once, and counts
against the memory limit of the rollout.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...system.units import MB
from ..episodes import BytesLike
from ..errors import of_os_error

BLOCK_BYTES = MB  # of a copy
_MOST_CHUNKS = 512  # of one `writev`; the system's limit is 1,024


@contextlib.contextmanager
def typed(path: Path) -> Iterator[None]:
    """Errors of the operating system as ours."""
    try:
        yield
    except OSError as exc:
        raise of_os_error(exc, path) from exc


class Disk:
    """Writes files, and makes them durable."""

    keeps_cached = False  # also of a subclass that knows nothing of it

    def __init__(self, *, keep_cached: bool = False) -> None:
        """Makes a disk.

        Args:
            keep_cached: Leave large files in the page cache, for a reader that follows at once.
        """
        self.keeps_cached = keep_cached

    def append(self, path: Path, chunks: Sequence[BytesLike], *, drop_cached: bool = False) -> None:
        """Appends to a file, and creates it where it is missing."""
        with typed(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self.write(descriptor, chunks)
                self._drop_cached(descriptor, drop_cached)
            finally:
                os.close(descriptor)

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        """All of it, however little the system takes at a time."""
        for at in range(0, len(chunks), _MOST_CHUNKS):
            _write_all(descriptor, chunks[at : at + _MOST_CHUNKS])

    def sync(self, path: Path, *, drop_cached: bool = False) -> None:
        """Returns when the content of the file or folder is on the medium."""
        with typed(path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                self._drop_cached(descriptor, drop_cached)
            finally:
                os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """In one moment."""
        with typed(target):
            source.replace(target)

    def truncate(self, path: Path, size_bytes: int) -> None:
        """Forget what was written beyond."""
        with typed(path):
            os.truncate(path, size_bytes)

    def write_atomically(self, path: Path, content: bytes) -> None:
        """The old content or the new one, whatever happens."""
        fresh = path.with_name(path.name + ".new")
        with typed(path):
            fresh.unlink(missing_ok=True)
        self.append(fresh, [content])
        self.sync(fresh)
        self.rename(fresh, path)
        self.sync(path.parent)

    def _drop_cached(self, descriptor: int, wanted: bool) -> None:
        if wanted and not self.keeps_cached:
            drop_from_page_cache(descriptor)


def _write_all(descriptor: int, chunks: Sequence[BytesLike]) -> None:
    rest = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    while rest:
        written = os.writev(descriptor, rest)
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def drop_from_page_cache(descriptor: int, offset: int = 0, size_bytes: int = 0) -> None:
    """Asks Linux to write back the dirty pages of a stretch of a file, and to drop the clean ones.

    The stretch ends with the file where `size_bytes` is 0. Errors are ignored.
    """
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def digest_of(path: Path) -> hashlib._Hash:
    """The SHA-256 of a file."""
    with typed(path), path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256")


def blocks(path: Path) -> Iterator[bytes]:
    """A file's content, a block at a time."""
    with typed(path), path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            yield block
