# SPDX-License-Identifier: Apache-2.0
"""The few things that are done to files, and made durable. A slow disk is a subclass of this.

Every error of the operating system becomes one of `errors`, which names the file.

What is large *passes*: it goes past the page cache (`past_cache`), or, where the file system cannot
do that, through it: written back as it comes, and dropped when more comes or when it is synced.
Otherwise a rollout of gigabytes pushes everybody else's files out of memory, holds the disk for
seconds when it is written back in one go, counts against the cap of the rollout's memory, and takes
new pages all the time, which a virtual machine has to get from its host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..episodes import BytesLike
from ..errors import of_os_error
from .direct_io import PastCache

BLOCK_BYTES = 1 << 20  # of a copy
_MOST_CHUNKS = 512  # of one `writev`; the system's limit is 1,024


@contextlib.contextmanager
def typed(path: Path) -> Iterator[None]:
    """Errors of the operating system as ours."""
    try:
        yield
    except OSError as exc:
        raise of_os_error(exc, path) from exc


class Disk:
    """Writes, and makes sure of what was written."""

    keeps_cached = False  # also of a subclass that knows nothing of it

    def __init__(self, *, keep_cached: bool = False) -> None:
        """`keep_cached`: nothing passes through, for a reader who comes at once."""
        self.keeps_cached = keep_cached

    def append(
        self, path: Path, chunks: Sequence[BytesLike], *, past: PastCache | None = None
    ) -> None:
        """At the end of the file, which is made when there is none; `past` the page cache, unless
        all is to stay there."""
        with typed(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if past is None or self.keeps_cached:
                    self.write(descriptor, chunks)
                elif not past.append(descriptor, chunks, self.write):
                    self._pass_through(descriptor)
            finally:
                os.close(descriptor)

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        """All of it, however little the system takes at a time."""
        for at in range(0, len(chunks), _MOST_CHUNKS):
            _write_all(descriptor, chunks[at : at + _MOST_CHUNKS])

    def sync(self, path: Path, *, passes: bool = False) -> None:
        """The file's (or folder's) content is on the medium when this returns."""
        with typed(path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                if passes:
                    self._pass_through(descriptor)
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

    def _pass_through(self, descriptor: int) -> None:
        if not self.keeps_cached:
            drop_cached(descriptor)


def _write_all(descriptor: int, chunks: Sequence[BytesLike]) -> None:
    rest = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    while rest:
        written = os.writev(descriptor, rest)
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def drop_cached(descriptor: int, offset: int = 0, size_bytes: int = 0) -> None:
    """Linux begins to write back what is new of that stretch of a file (0: to its end), and drops
    the rest from its cache. A wish: no error.
    """
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def blocks(path: Path) -> Iterator[bytes]:
    """A file's content, a block at a time."""
    with typed(path), path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            yield block
