# SPDX-License-Identifier: Apache-2.0
"""Opens files of a folder that may still be written, and keeps the last few open.

A part's files lose `.partial` at some moment after the reader knows of them, and what was a growing
part's lines may be a file in columns by then. So each is looked for under all names that it may
have, in the order in which it gets them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OutputDamaged, OutputError
from .layout import partial

FORBIDDEN = "fix the file's permissions, or read a copy"
TOO_MANY = "copy the arrays that you keep (each keeps its file open), or raise `ulimit -n`"

Opened = TypeVar("Opened")


def opened(paths: Sequence[Path], open_it: Callable[[Path], Opened]) -> Opened:
    """The file under the first of its names that it has."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError), readable(path):
            return open_it(path)
    raise OutputDamaged(f"{paths[-1]} is missing")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns errors of the operating system into ours, except that a file is missing."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        hint = TOO_MANY if exc.errno == errno.EMFILE else FORBIDDEN
        raise OutputError(f"{path} cannot be read: {exc.strerror or exc}", hint) from exc


def mapped(path: Path) -> memoryview:
    """A file's content. It stays mapped for as long as anything of it is held."""
    with FileIO(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        if sys.version_info >= (3, 13):  # no descriptor for each file that is mapped
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False))
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def present(path: Path) -> Path:
    """A finished file's name now: a crash may have left it with its temporary one."""
    return partial(path) if partial(path).exists() else path


class Recent:
    """A cache of the last few values, such as open files; may be used from several threads.

    A value that is dropped is closed when its last reference goes. In another process the cache
    begins empty.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[Hashable, Any] = {}  # the one asked for last is last
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Recent, (self._most,)

    def get(self, key: Hashable, make: Callable[[], Opened]) -> Opened:
        """The one with that key."""
        with self._lock:
            found: Opened | None = self._kept.pop(key, None)
            if found is None:
                found = make()
            self._kept[key] = found
            if len(self._kept) > self._most:
                del self._kept[next(iter(self._kept))]
            return found
