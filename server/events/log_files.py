# SPDX-License-Identifier: Apache-2.0
"""Log files, read from the end and followed without polling.

Workers and replicas write their logs by file descriptor, so the daemon does not see the writes.
`LogWatcher` (one thread of `watchdog`: inotify on Linux, FSEvents on macOS) sets the
`asyncio.Event` of each follower of a file when it has changed.

A log that shrinks (a shim cut it to its bound) is read on from its new end of line.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver, ObservedWatch

log = logging.getLogger(__name__)

MAX_READ_BYTES = 256 * 1024
TAIL_BLOCK_BYTES = 64 * 1024


class LogFile:
    """One log, read on from `offset`."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def read(self, *, final: bool = False) -> str:
        """The whole lines since the last call; with `final`, the unfinished one too."""
        try:
            with self.path.open("rb") as file:
                # Of a file that was cut, from its new end.
                self.offset = min(self.offset, os.fstat(file.fileno()).st_size)
                file.seek(self.offset)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return ""
        if not final and len(data) < MAX_READ_BYTES:
            data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return data.decode("utf-8", "replace")

    def read_lines(self) -> Iterator[str]:
        """Yield the whole lines since the last call, in pieces."""
        while text := self.read():
            yield text

    def read_all(self) -> Iterator[str]:
        """Yield everything up to the end, the unfinished line too, in pieces."""
        while text := self.read(final=True):
            yield text


def offset_of_last_lines(path: Path, count: int, block_bytes: int = TAIL_BLOCK_BYTES) -> int:
    """Find the offset in bytes of the last `count` lines; blocks while it reads them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if count == 0 or size == 0:
                return size
            file.seek(size - 1)
            # The newline that ends the last line does not start another.
            missing = count + 1 if file.read(1) == b"\n" else count
            last_block = (size - 1) // block_bytes * block_bytes
            for start in range(last_block, -1, -block_bytes):
                file.seek(start)
                block = file.read(min(block_bytes, size - start))
                found = block.count(b"\n")
                if found >= missing:
                    return start + _newline_from_the_end(block, missing) + 1
                missing -= found
            return 0
    except FileNotFoundError:
        return 0


def _newline_from_the_end(block: bytes, number: int) -> int:
    index = len(block)
    for _ in range(number):
        index = block.rindex(b"\n", 0, index)
    return index


class LogWatcher:
    """Wakes followers when their file changes. The thread starts with the first of them.

    Where the system has no watch left (`fs.inotify.max_user_instances`), it polls every second: a
    late log is better than none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._observer: BaseObserver | None = None
        self._followers: dict[Path, list[asyncio.Event]] = {}
        self._watches: dict[Path, ObservedWatch] = {}

    @contextmanager
    def follow(self, path: Path, wake: asyncio.Event) -> Iterator[None]:
        """Set `wake` at every change of `path`, until the block ends."""
        self._followers.setdefault(path, []).append(wake)
        try:
            self._watch(path.parent)
            yield
        finally:
            self._followers[path].remove(wake)
            if not self._followers[path]:
                del self._followers[path]
            self._unwatch(path.parent)

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()
            self._observer = None
            self._watches.clear()

    def changed(self, path: Path) -> None:
        """Wake the followers of a file that has changed; on the loop."""
        for wake in self._followers.get(path, ()):
            wake.set()

    def _watch(self, folder: Path) -> None:
        if folder in self._watches:
            return
        from watchdog.observers import Observer  # with the first follower, not at every start
        from watchdog.observers.polling import PollingObserver

        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._watches[folder] = self._schedule(folder, Observer)
        except OSError as exc:
            log.warning("%s: log files are polled every second instead", exc)
            self.close()
            for known in {path.parent for path in self._followers}:
                self._watches[known] = self._schedule(known, PollingObserver)

    def _schedule(self, folder: Path, make_observer: Callable[[], BaseObserver]) -> ObservedWatch:
        from watchdog.events import FileSystemEvent, FileSystemEventHandler

        changed, loop = self.changed, self._loop

        class Handler(FileSystemEventHandler):
            """Wakes followers on the loop, from the watcher's thread."""

            def on_any_event(self, event: FileSystemEvent) -> None:
                if event.event_type not in ("modified", "created", "moved"):
                    return  # reading a log is an event too
                path = Path(os.fsdecode(event.dest_path or event.src_path))
                try:
                    loop.call_soon_threadsafe(changed, path)
                except RuntimeError:
                    if not loop.is_closed():
                        raise

        if self._observer is None:
            self._observer = make_observer()
            self._observer.name = "log-watcher"
            self._observer.start()
        return self._observer.schedule(Handler(), str(folder))

    def _unwatch(self, folder: Path) -> None:
        if any(path.parent == folder for path in self._followers):
            return
        if self._observer is not None and (watch := self._watches.pop(folder, None)):
            self._observer.unschedule(watch)
