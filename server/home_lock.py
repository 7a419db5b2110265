# SPDX-License-Identifier: Apache-2.0
"""The lock on `daemon.lock`: one daemon a home.

The daemon holds it for as long as its process lives. A client that asks whether a daemon runs tries
the lock, and never trusts a pid alone.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..environments.shim.files import remove_if_empty
from ..schema.settings import Paths
from ..system.files import disk_space
from .errors import DaemonError

# What is there before the first database.
OURS = frozenset(
    {"config.toml", "daemon.lock", "start.lock", "daemon.log", "daemon.json"}
    | {"run", "logs", "sockets", "venvs"}
)


class HomeLock:
    """The lock of a home, held by this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def is_ours(self) -> bool:
        """Whether the locked file is still in its home, which was neither removed nor moved."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # unknown for the moment
            return True

    def is_anothers(self) -> bool:
        """Whether the home was made anew, and the lock in it is the next daemon's."""
        return self._path.exists() and not self.is_ours()


@contextmanager
def hold_lock(paths: Paths) -> Iterator[HomeLock]:
    """Make the home's folders, and hold its lock.

    Raises:
        DaemonError: another daemon holds it, or the home cannot be written.
    """
    try:
        _make_folders(paths)
        descriptor = os.open(paths.daemon_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise DaemonError(
            "already_running", "a daemon is already running", "openenv status shows it"
        ) from exc
    except OSError as exc:
        raise state_unwritable(paths, exc) from exc
    lock = HomeLock(paths.daemon_lock, descriptor)
    try:
        yield lock
    finally:
        if not lock.is_anothers():  # also after a start that failed
            remove_if_empty(str(paths.sockets))
        os.close(descriptor)


def state_unwritable(paths: Paths, exc: OSError) -> DaemonError:
    """Say that the state folder cannot be written, and what to do."""
    return DaemonError("state_unwritable", *disk_space.why_unwritable(paths.home, exc))


def _keep_private(paths: Paths) -> None:
    """Take a home that others can read from them: it holds tokens, logs and variables.

    Raises:
        DaemonError: it also holds what is not ours, so that it is the user's to decide.
    """
    if not stat.S_IMODE(paths.home.stat().st_mode) & 0o077:
        return
    is_ours = paths.database.exists() or {path.name for path in paths.home.iterdir()} <= OURS
    if not is_ours:
        raise DaemonError(
            "state_exposed",
            f"others can read the state folder {paths.home}, which holds more than our state",
            f"chmod 700 {shlex.quote(str(paths.home))}, or choose another folder (OPENENV_HOME)",
        )
    paths.home.chmod(0o700)


def _make_folders(paths: Paths) -> None:
    folders = (paths.home, paths.sockets, paths.request_logs, paths.environment_logs, paths.runs)
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _keep_private(paths)
    if paths.sockets.stat().st_uid != os.getuid():
        raise DaemonError(
            "state_unwritable",
            f"{paths.sockets} belongs to another user",
            "choose a shorter OPENENV_HOME, so that sockets can lie inside it",
        )
