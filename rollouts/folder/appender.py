# SPDX-License-Identifier: Apache-2.0
"""Appends what episodes under way have to their files, for one open folder and from its thread.

    chunks ─┬─▶ the disk: past the page cache (`past_cache`) or as everything else
            └─▶ a thread beside: their checksum, a quarter of the time otherwise

A `Disk` may serve several folders at once and keeps nothing of them; what is kept between two
appends, the memory for blocks and the thread, is here, and ends with the folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ..episodes import BytesLike
from .direct_io import PastCache
from .disk import Disk

DIGESTED_BESIDE_BYTES = 256 << 10  # another thread's turn costs as much as a digest of 64 kB


class Digest(Protocol):
    """What `hashlib` makes."""

    def update(self, data: BytesLike, /) -> None: ...


class Appender:
    """Of one thread; to be closed."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._past = PastCache()
        self._digesting = ThreadPoolExecutor(1, thread_name_prefix="rollout-digest")

    def append(
        self, path: Path, chunks: Sequence[BytesLike], digest: Digest, *, passes: bool = False
    ) -> None:
        """To the file and to its digest. What `passes` is not to stay in the page cache."""
        with self._taken_in(chunks, digest):
            self._disk.append(path, chunks, past=self._past if passes else None)

    def close(self) -> None:
        """The thread has ended when this returns."""
        self._digesting.shutdown()

    @contextlib.contextmanager
    def _taken_in(self, chunks: Sequence[BytesLike], digest: Digest) -> Iterator[None]:
        if sum(map(len, chunks)) < DIGESTED_BESIDE_BYTES:
            yield
            _take_in(digest, chunks)
            return
        taken_in = self._digesting.submit(_take_in, digest, chunks)
        try:
            yield
        except BaseException:
            taken_in.exception()  # waited for: nobody looks at the chunks any more
            raise
        taken_in.result()


def _take_in(digest: Digest, chunks: Sequence[BytesLike]) -> None:
    for chunk in chunks:
        digest.update(chunk)
