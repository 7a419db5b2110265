# SPDX-License-Identifier: Apache-2.0
"""What a shim is handed, opens and writes: its sockets, its lock, its files.

    <run dir>/replica.json  what is to be kept (the run file); the shim adds who it is
    <run dir>/status.json   what its clients were told last
    <run dir>/shim.lock   held as long as it lives

Light: a shim imports it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from typing import Any

RUN_FILE_NAME = "replica.json"
STATUS_FILE_NAME = "status.json"
LOCK_FILE_NAME = "shim.lock"

CONTROL_FD_VARIABLE = "OPENENVD_CONTROL_FD"  # the control socket, already listening
# As in `env_host.protocol`, which is too heavy to import here; a test holds them together.
LISTEN_FD_VARIABLE = "OPENENVD_LISTEN_FD"
NOTIFY_FD_VARIABLE = "OPENENVD_NOTIFY_FD"

LISTEN_BACKLOG = 4096
CONTROL_BACKLOG = 512


def inherited_socket(variable: str) -> socket.socket | None:
    """The socket that whoever started us has handed over, if any; it goes no further by accident,
    nor does the variable."""
    fd = os.environ.pop(variable, None)
    if not fd:
        return None
    os.set_inheritable(int(fd), False)
    return socket.socket(fileno=int(fd))


def open_control_socket(path: str) -> socket.socket:
    """A listening Unix socket at `path`, for its owner alone; a stale one there is replaced.

    Raises:
        OSError: when it cannot be made, or the path is too long for a socket.
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


def read_run_file(run_dir: str) -> dict[str, Any]:
    """What is to be kept.

    Raises:
        OSError, ValueError: when it cannot be read.
    """
    with open(f"{run_dir}/{RUN_FILE_NAME}", "rb") as file:
        run: dict[str, Any] = json.loads(file.read())
    return run


def write_json(path: str, data: dict[str, Any]) -> None:
    """Replace a file by `data` at once, readable by its owner alone.

    Raises:
        OSError: when it cannot be written; the old file is as it was.
    """
    partial = f"{path}.{os.getpid()}"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(json.dumps(data).encode())
        os.replace(partial, path)  # noqa: PTH105
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)  # noqa: PTH108
        raise


def lock(run_dir: str) -> int:
    """The run directory is one shim's; the kernel lets go of the lock when we die."""
    fd = os.open(f"{run_dir}/{LOCK_FILE_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def open_log(path: str) -> int:
    """To append to.

    Raises:
        OSError: when it can be neither opened nor made.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def is_missing(path: str) -> bool:
    """Whether it is known not to be there: an error of the disk is no removal."""
    try:
        os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def remove_if_empty(folder: str) -> None:
    """Remove a folder of sockets, unless there is one in it, or whoever is about to make one there
    holds its lock."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rmdir(folder)  # noqa: PTH106
    finally:
        os.close(fd)


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at that address.

    Raises:
        OSError: when somebody else does, or it is none of ours; the address is its file name.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, exc.strerror or str(exc), f"{host}:{port}") from exc
    return listener
