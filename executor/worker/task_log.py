# SPDX-License-Identifier: Apache-2.0
"""Where a task's output goes: its log by file descriptor, so that it survives any death.

A LONG task's log is there from its start. Most SHORT tasks print nothing, and a file for each would
cost more than many of them do (and some file systems make files very slowly after many were
deleted). So they write into a file of their *worker's*, which becomes the task's log once there is
something in it:

    .short-3-41233 ──▶ 7f3a….log    by the worker, with the first line that Python prints
                                    by the worker, at the end, when anything else (a child) wrote
                                    by the supervisor, when the worker has died
                                    by the next daemon, when this one has

Renamed, it is nobody's but the task's, and the worker's next SHORT task gets another. One that
stayed empty serves the next task, and goes with the worker.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from ..messages import SHORT

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def scratch_path(log_path: str, worker: str, pid: int) -> str:
    """The file of the worker's own; beside the logs, so that it can be renamed to one."""
    return str(Path(log_path).with_name(f".{worker}-{pid}"))


def settle(scratch: str, log_path: str | None) -> None:
    """What a dead worker's file holds is its last task's output; without, it is removed."""
    with contextlib.suppress(OSError):
        if log_path is not None and Path(scratch).stat().st_size:
            put_in_place(scratch, log_path)
        else:
            Path(scratch).unlink()


def settle_leftovers(folder: Path, tasks: Iterable[tuple[str, int, str]]) -> None:
    """As `settle`, of every worker that died with its daemon. `tasks` are those that they ran:
    the worker, its pid, the log.
    """
    for worker, pid, log_path in tasks:
        settle(scratch_path(log_path, worker, pid), log_path)
    for scratch in folder.glob(f".{SHORT.lower()}-*"):
        settle(str(scratch), None)


def put_in_place(scratch: str, log_path: str) -> None:
    """Let it be the log; at the end of it, where an earlier attempt has left one.

    Raises:
        OSError
    """
    if not os.path.lexists(log_path):
        Path(scratch).rename(log_path)
        return
    try:
        with open(scratch, "rb") as found, open(log_path, "ab") as log:
            shutil.copyfileobj(found, log)
    finally:
        Path(scratch).unlink()


class TaskLog:
    """A worker's stdout and stderr, from task to task."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._at_once = not worker.startswith(SHORT.lower())
        self._path = ""
        self._scratch: str | None = None  # what stdout and stderr are, while it is no task's log
        self._streams: dict[int, TextIO] = {}

    def begin(self, path: str) -> None:
        """Output is this task's from now on."""
        self._path = path
        if self._at_once:
            self._open(path)
        elif not self._is_reusable():
            scratch = scratch_path(path, self._worker, os.getpid())
            self._scratch = scratch if self._open(scratch, os.O_TRUNC) else None
        sys.stdout = self._usable(sys.stdout, 1)
        sys.stderr = self._usable(sys.stderr, 2)

    def end(self) -> None:
        """What the task printed is in its log when this returns."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if self._scratch is not None and not self._is_reusable():
            self.put_in_place()

    def put_in_place(self) -> None:
        """There is something to read: the worker's file becomes the task's log."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            with contextlib.suppress(OSError):  # whatever it is, the task may be able to do without
                put_in_place(scratch, self._path)
                if not os.fstat(1).st_nlink:  # an earlier attempt's log has its text by now
                    self._open(self._path)

    def close(self) -> None:
        """The worker leaves: nothing but logs stays behind."""
        if self._scratch is not None:
            settle(self._scratch, None)

    def _is_reusable(self) -> bool:
        """Whether stdout and stderr are the worker's own file, and nothing is in it."""
        if self._scratch is None:
            return False
        try:
            out, err = os.fstat(1), os.fstat(2)
        except OSError:  # an operation closed one
            return False
        return out.st_size == 0 and out.st_nlink == 1 and os.path.samestat(out, err)

    def _open(self, path: str, flags: int = 0) -> bool:
        """Point stdout and stderr at the end of the file; at nothing when it cannot be opened."""
        opened = True
        try:
            log = os.open(path, _FLAGS | flags, 0o600)
        except OSError:  # a full disk must not fail a task that may be able to do without
            log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            opened = False
        os.dup2(log, 1)
        os.dup2(log, 2)
        if (
            log > 2
        ):  # an operation may have closed 1 or 2, so that the log was opened as one of them
            os.close(log)
        return opened

    def _usable(self, current: Any, descriptor: int) -> TextIO:
        """The stream over `descriptor`: made once, and again when an operation has closed it."""
        ours = self._streams.get(descriptor)
        if ours is None or ours.closed:
            buffered = io.BufferedWriter(_Descriptor(descriptor, self))
            ours = io.TextIOWrapper(
                buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True
            )
            self._streams[descriptor] = ours
        return ours if current is not ours else current


class _Descriptor(io.FileIO):
    """Writes to a descriptor, and has what it writes found."""

    def __init__(self, descriptor: int, log: TaskLog) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log = log

    def write(self, data: Any, /) -> int:
        """As any raw file's."""
        written = super().write(data)
        self._log.put_in_place()
        return written
