# SPDX-License-Identifier: Apache-2.0
"""Sockets, lock and files of a shim.

    <run dir>/replica.json  the run file, which describes the server; the shim adds its identity
    <run dir>/status.json   the status that its clients were last sent
    <run dir>/shim.lock     locked as long as the shim lives

Shims import this module, so it imports little.
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
# The same as in `schema/protocol.py`, which is too heavy to import here; a test compares them.
LISTEN_FD_VARIABLE = "OPENENVD_LISTEN_FD"  # descriptors, separated by commas
NOTIFY_FD_VARIABLE = "OPENENVD_NOTIFY_FD"
GATE_FD_VARIABLE = "OPENENVD_GATE_FD"
TRIAL_VARIABLE = "OPENENVD_TRIAL"

CONTROL_BACKLOG = 512
REMOVED_SECONDS = 1.0  # a run directory that is missing for longer counts as removed


def inherited_sockets(variable: str) -> list[socket.socket]:
    """Return the sockets that a variable names, if it is set; children do not inherit them."""
    fds = os.environ.pop(variable, None)
    sockets = sockets_of(fds) if fds else []
    for one in sockets:
        one.set_inheritable(False)
    return sockets


def open_control_socket(path: str) -> socket.socket:
    """Open a listening Unix socket at `path`, for its owner alone; a stale one is replaced.

    Raises `OSError` if it cannot be made, or the path is too long for a socket.
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


def unlink_sockets(run: RunFileData) -> None:
    """Remove the Unix sockets of a replica, if they are there."""
    for path in filter(None, (run.get("socket_path"), run.get("door_path"))):
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def read_run_file(run_dir: str) -> RunFileData:
    """Return the run file; raises `OSError` or `ValueError` when it cannot be read."""
    run: RunFileData = json.loads(_content(f"{run_dir}/{RUN_FILE_NAME}"))
    return run


def _content(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file; if a pipe is in its place, do not wait for more."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return file.read() or b""


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the content of a run or status file; None: there is none, or it cannot be read."""
    try:
        data = json.loads(_content(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: str, data: Mapping[str, object], *, sync: bool = False) -> None:
    """Replace a file by one that contains `data`, as `replace_file` does."""
    replace_file(path, json.dumps(data).encode(), sync=sync)


def replace_file(path: str, content: bytes, *, sync: bool = False) -> None:
    """Replace a file atomically by one that its owner alone can read.

    With `sync`, the content is on the disk when this returns. Raises `OSError` if it cannot be
    written; then the old file stays.
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
    """Lock the run directory until this shim exits; raises `BlockingIOError` if another has it."""
    fd = os.open(f"{run_dir}/{LOCK_FILE_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def open_log(path: str) -> int:
    """Open a log for appending, and make it if it is missing; raises `OSError`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def missing_since(path: str, before: float | None, now: float) -> float | None:
    """Return since when a path has been missing; `before` is the last answer. None: it is there.

    An error of the disk does not show that it is missing.
    """
    try:
        os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return now if before is None else before
    except OSError:
        pass
    return None


def file_identity(path: str) -> tuple[int, int]:
    """Return a value that differs for another file of the same name; (0, 0): there is no file."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def remove_if_empty(folder: str) -> None:
    """Remove a folder of sockets, unless it contains a socket, or a starter has locked it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rmdir(folder)  # noqa: PTH106
        finally:
            os.close(fd)
