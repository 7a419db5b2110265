# SPDX-License-Identifier: Apache-2.0
"""The daemon's addresses: its home's lock, two sockets, uvicorn, and files by which it is found.

`daemon.lock` lets a home have one daemon, which holds it for as long as its process lives. A client
that asks whether a daemon runs tries the lock, and never trusts a pid alone.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uvicorn.config import Config

from .. import __version__
from ..env_host.serving.event_driven import EventDrivenServer
from ..environments.shim.files import remove_if_empty, write_json
from ..schema.settings import FIRST_PORT, PORTS, Given, Paths, Settings
from ..system.files import disk_space, installation
from ..system.net.connection_limit import connections_within
from ..system.net.http_limits import HttpTiming
from ..system.process.proc import raise_fd_limit
from ..system.process.process_identity import ProcessIdentity
from .api.security import ensure_token
from .errors import DaemonError
from .housekeeping import held

# The names that a home may contain before its first database.
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
        """Return whether the locked file is still in its home, which was not removed or moved."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # unknown for the moment
            return True

    def is_anothers(self) -> bool:
        """Return whether the home was replaced, and the lock in it is the next daemon's."""
        return self._path.exists() and not self.is_ours()


@contextmanager
def hold_lock(paths: Paths) -> Iterator[HomeLock]:
    """Make the home's folders, and hold its lock; raises `DaemonError`."""
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
    """Return the error that the state folder cannot be written, with what to do."""
    return DaemonError("state_unwritable", *disk_space.why_unwritable(paths.home, exc))


def _make_folders(paths: Paths) -> None:
    """Make the folders, and close the home to other users if they can read it.

    It holds tokens, logs and variables. If it also holds files that are not ours, the user decides.
    """
    folders = (paths.home, paths.sockets, paths.request_logs, paths.environment_logs, paths.runs)
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(paths.home.stat().st_mode) & 0o077:
        is_ours = paths.database.exists() or {path.name for path in paths.home.iterdir()} <= OURS
        if not is_ours:
            home = shlex.quote(str(paths.home))
            raise DaemonError(
                "state_exposed",
                f"others can read the state folder {paths.home}, which holds more than our state",
                f"chmod 700 {home}, or choose another folder (OPENENV_HOME)",
            )
        paths.home.chmod(0o700)
    if paths.sockets.stat().st_uid != os.getuid():
        raise DaemonError(
            "state_unwritable",
            f"{paths.sockets} belongs to another user",
            "choose a shorter OPENENV_HOME, so that sockets can lie inside it",
        )


LISTEN_BACKLOG = 2048
SHUTDOWN_SECONDS = 2  # for open streams, before their connections are cut


def bind(paths: Paths, settings: Settings) -> tuple[socket.socket, socket.socket]:
    """Bind and listen on the TCP port and the Unix socket; a `DaemonError` says why not."""
    tcp = _listening(settings.port)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with held(paths.sockets):
            paths.socket.unlink(missing_ok=True)  # ours: we hold the home's lock
            unix.bind(str(paths.socket))
            paths.socket.chmod(0o600)
            unix.listen(LISTEN_BACKLOG)
    except OSError as exc:
        unix.close()
        tcp.close()
        raise state_unwritable(paths, exc) from exc
    return tcp, unix


def _listening(port: int | None) -> socket.socket:
    """Listen on this port of the loopback interface; on the first free one, if None is given."""
    candidates = range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else (port,)
    for each in candidates:
        try:
            return socket.create_server(("127.0.0.1", each), backlog=LISTEN_BACKLOG)
        except OSError as exc:
            error = exc
    from ..environments.engines.local.ports import holder_of

    holder = holder_of(candidates[0])
    who = "another process" if holder is None else "pid {} ({})".format(*holder)
    raise DaemonError(
        "port_in_use",
        f"port {candidates[0]} cannot be bound: {who} listens there",
        "choose another: openenv up --port N, or OPENENV_PORT=N (0 picks a free one)",
    ) from error


def identity_of(paths: Paths, tcp: socket.socket, given: Mapping[str, Given]) -> dict[str, Any]:
    """Describe this daemon for `daemon.json`; `given` are settings that are no defaults."""
    port = tcp.getsockname()[1]
    return {
        "pid": os.getpid(),
        "pid_started_at": ProcessIdentity.of(os.getpid()).started_at,  # not by the wall clock
        "version": __version__,
        "installation": installation.mark(),
        "address": f"http://127.0.0.1:{port}",
        "port": port,
        "socket": str(paths.socket),
        "home": str(paths.home),
        "started_at": time.time(),
        "flags": {name: one.value for name, one in given.items() if one.origin.startswith("--")},
        "settings_from": {name: one.origin for name, one in given.items()},
    }


def write_identity(paths: Paths, identity: dict[str, Any]) -> str:
    """Write `daemon.json`, by which clients find the daemon; return the token that they need."""
    try:
        token = ensure_token(paths.token)
        write_json(str(paths.daemon_file), identity)
    except OSError as exc:
        raise state_unwritable(paths, exc) from exc
    return token


def http_server(app: Any, settings: Settings) -> EventDrivenServer:
    """Return uvicorn for `app`, without ticks and signal handlers: the daemon has its own.

    Its two sockets, which are bound already, have a quarter of the descriptors each; half of them
    are for requests that are held (`server/reconcile/held_requests.py`). Every user of the machine
    can open TCP connections; only the owner can open those of the Unix socket, for which there has
    to be room at all times. There is no limit by peer: on loopback an address tells nothing.
    """
    config = Config(
        app,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    # `openenv logs | less` reads no further while its user does not.
    timing = HttpTiming(response_seconds=float("inf"))
    connections = connections_within(raise_fd_limit(), shares=4)
    return EventDrivenServer(config, max_connections=connections, timing=timing)
