# SPDX-License-Identifier: Apache-2.0
"""Sockets, lock and files of a shim.

    <run dir>/replica.json  the run file: what the server serves; the shim adds its own identity
    <run dir>/status.json   the status that its clients were sent last
    <run dir>/lost          how many sessions are lost if it is killed now, for the next shim
    <run dir>/shim.lock     held as long as it lives

Light: a shim imports it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...system.net.listening_sockets import sockets_of

if TYPE_CHECKING:
    from ...schema.replica import RunFileData

RUN_FILE_NAME = "replica.json"
STATUS_FILE_NAME = "status.json"
LOCK_FILE_NAME = "shim.lock"

CONTROL_FD_VARIABLE = "OPENENVD_CONTROL_FD"  # the control socket, already listening
# As in `env_host.protocol`, which is too heavy to import here; a test holds them together.
LISTEN_FD_VARIABLE = "OPENENVD_LISTEN_FD"  # of several sockets, separated by commas
NOTIFY_FD_VARIABLE = "OPENENVD_NOTIFY_FD"
GATE_FD_VARIABLE = "OPENENVD_GATE_FD"
TRIAL_VARIABLE = "OPENENVD_TRIAL"

CONTROL_BACKLOG = 512
REMOVED_SECONDS = 1.0  # without its run directory, at two looks, until it is held to be removed


def inherited_sockets(variable: str) -> list[socket.socket]:
    """Return the sockets that a variable names, if it is there; children inherit none of it."""
    fds = os.environ.pop(variable, None)
    sockets = sockets_of(fds) if fds else []
    for one in sockets:
        one.set_inheritable(False)
    return sockets


def open_control_socket(path: str) -> socket.socket:
    """Open a listening Unix socket at `path`, for its owner alone; a stale one is replaced.

    Raises `OSError` when it cannot be made, or the path is too long for a socket.
    """
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        control.bind(path)
        os.chmod(path, 0o600)  # noqa: PTH101
        control.listen(CONTROL_BACKLOG)
    except OSError as exc:
        control.close()
        raise OSError(exc.errno, exc.strerror or str(exc), path) from exc
    return control


def read_run_file(run_dir: str) -> RunFileData:
    """Return the run file; raises `OSError` or `ValueError` when it cannot be read."""
    run: RunFileData = json.loads(_content(f"{run_dir}/{RUN_FILE_NAME}"))
    return run


def _content(path: str | os.PathLike[str]) -> bytes:
    """Return what is in a file; a pipe in its place is read as far as it goes, without waiting."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return file.read() or b""


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return what a run or status file says; None when there is none, or it is unreadable."""
    try:
        data = json.loads(_content(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: str, data: Mapping[str, object], *, sync: bool = False) -> None:
    """Replace a file by `data`, as `replace_file` does."""
    replace_file(path, json.dumps(data).encode(), sync=sync)


def replace_file(path: str, content: bytes, *, sync: bool = False) -> None:
    """Replace what a file contains atomically; it is readable by its owner alone.

    With `sync`, it is on the disk when this returns. Raises `OSError` when it cannot be written;
    the old file is as it was.
    """
    partial = f"{path}.{os.getpid()}"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(fd)
        os.replace(partial, path)  # noqa: PTH105
        if sync:
            folder = os.open(
                os.path.dirname(path),  # noqa: PTH120
                os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,
            )
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)  # noqa: PTH108
        raise


def lock(run_dir: str) -> int:
    """Lock the run directory until this shim exits; `BlockingIOError`: another has the lock."""
    fd = os.open(f"{run_dir}/{LOCK_FILE_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def open_log(path: str) -> int:
    """Open a log to append to; raises `OSError` when it can be neither opened nor made."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def is_missing(path: str) -> bool:
    """Tell whether a path is known not to exist: an error of the disk is no removal."""
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as exc:
        return isinstance(exc, FileNotFoundError)
    return False


class RunDirectoryWatch:
    """Whether the run directory is there; without it no client will ever find this shim again."""

    def __init__(self) -> None:
        self._missing_since: float | None = None

    @property
    def is_missing(self) -> bool:
        """Whether it was, at the last look."""
        return self._missing_since is not None

    def look(self, now: float, *, is_missing: bool) -> bool:
        """Note what was seen; True when it is gone for good."""
        if not is_missing:
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = now
            return False
        return now - self._missing_since >= REMOVED_SECONDS


def file_identity(path: str) -> tuple[int, int]:
    """Return what tells a file from another of the same name; no file has (0, 0)."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def remove_if_empty(folder: str) -> None:
    """Remove a folder of sockets, unless a socket is in it or a starter has locked it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rmdir(folder)  # noqa: PTH106
        finally:
            os.close(fd)
