# SPDX-License-Identifier: Apache-2.0
"""Directs a task's output into its log by file descriptor, so that it survives any exit.

A LONG task's log is there from its start. Most SHORT tasks print nothing, and a file for each would
cost more than many of them do (and some file systems make files very slowly after many were
deleted). So they write into a file of their *worker's*, which becomes the task's log once there is
something in it:

    .short-3-41233 ──▶ 7f3a….log    by the worker, with the first line that Python prints
                                    by the worker, at the end, when anything else (a child) wrote
                                    by the supervisor, when the worker has exited
                                    by the next daemon, when this one has

Renamed, it is the task's alone, and the worker's next SHORT task gets another. One that
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
    """Return the path of the worker's own file; beside the logs, so that it can be renamed."""
    return str(Path(log_path).with_name(f".{worker}-{pid}"))


def settle(scratch: str, log_path: str | None) -> None:
    """Make an exited worker's file its last task's log; remove it when it is empty."""
    with contextlib.suppress(OSError):
        if log_path is not None and Path(scratch).stat().st_size:
            put_in_place(scratch, log_path)
        else:
            Path(scratch).unlink()


def settle_leftovers(folder: Path, tasks: Iterable[tuple[str, int, str]]) -> None:
    """Do as `settle` does for every worker that exited with its daemon."""
    for worker, pid, log_path in tasks:
        settle(scratch_path(log_path, worker, pid), log_path)
    for scratch in folder.glob(f".{SHORT.lower()}-*"):
        settle(str(scratch), None)


def put_in_place(scratch: str, log_path: str) -> None:
    """Rename the file to the log, or append it to the one that an earlier attempt has left.

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
        """Direct output to this task's log from now on."""
        self._path = path
        if self._at_once:
            self._open(path)
        elif not self._is_reusable():
            scratch = scratch_path(path, self._worker, os.getpid())
            self._scratch = scratch if self._open(scratch, os.O_TRUNC) else None
        sys.stdout = self._usable(sys.stdout, 1)
        sys.stderr = self._usable(sys.stderr, 2)

    def end(self) -> None:
        """Flush: what the task printed is in its log when this returns."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if self._scratch is not None and not self._is_reusable():
            self.put_in_place()

    def put_in_place(self) -> None:
        """Make the worker's file, in which there is something now, the task's log."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            with contextlib.suppress(OSError):  # whatever it is, the task may be able to do without
                put_in_place(scratch, self._path)
                if not os.fstat(1).st_nlink:  # an earlier attempt's log has its text by now
                    self._open(self._path)

    def close(self) -> None:
        """Remove the worker's file when the worker leaves."""
        if self._scratch is not None:
            settle(self._scratch, None)

    def _is_reusable(self) -> bool:
        """Say whether stdout and stderr are the worker's own file, and it is empty."""
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
        """Return the stream over `descriptor`, made anew when an operation has closed it."""
        ours = self._streams.get(descriptor)
        if ours is None or ours.closed:
            buffered = io.BufferedWriter(_Descriptor(descriptor, self))
            ours = io.TextIOWrapper(
                buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True
            )
            self._streams[descriptor] = ours
        return ours if current is not ours else current


class _Descriptor(io.FileIO):
    """Writes to a descriptor, and has the task's log put in place."""

    def __init__(self, descriptor: int, log: TaskLog) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log = log

    def write(self, data: Any, /) -> int:
        """Write as any raw file does."""
        written = super().write(data)
        self._log.put_in_place()
        return written
