# SPDX-License-Identifier: Apache-2.0
"""A fork server's clients: ask for a shim, start a fork server when there is none, stop all.

One fork server per kind: the same Python, the same version of ours, the same modules, the same
variables that only a program's start obeys. Its socket is named by a digest of these, so an
upgrade finds none and starts its own, and the old one exits when its shims have.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...system.process.descriptors import Message, receive_message, send_message
from ...system.text.json_lines import Json
from .files import file_identity, locked_folder, open_log
from .fork_server import LISTEN_BACKLOG

if TYPE_CHECKING:
    from ...schema.replica import RunFileData

IDLE_SECONDS = 15.0
# For it to import everything with half a CPU, thirty launches waiting. Then a shim is started as
# a program; were the fork server's still to come, it would find the run directory taken.
REPLY_SECONDS = 60.0
STOP_SECONDS = 5.0  # it may still be importing
_ATTEMPTS = 2  # one may be exiting while we connect
_PACKAGE = Path(__file__).resolve().parents[2]
_READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_", "LC_", "LANG")
# The shell starts the program in the background and is gone: the starter may be a short-lived
# worker, or have threads.
_DETACH = '"$@" &'
_PASSED_ON = ("PATH", "OPENENV_HOME")  # the latter tells whose process it is


def fork_shim(
    fork_server: Json, run: RunFileData, *, run_dir: str, control_fd: int, listen_fds: Sequence[int]
) -> bool:
    """Ask for a shim from the fork server of `fork_server`: `{"folder", "preload", "log_path"}`.

    False: none can be forked here, or it was refused; then start the shim as a program.
    """
    if not may_fork(run):
        return False
    environ = start_environment(run["env"])
    path = Path(fork_server["folder"]) / f"fork-{_digest(fork_server['preload'], environ)}.sock"
    message = {"run_dir": run_dir, "title": f"openenvd: shim {run['replica_id']}"}
    log_fd = _open_log(run["log_path"])
    fds = [control_fd, log_fd, *listen_fds]
    try:
        for _ in range(_ATTEMPTS):
            found = _start_unless_running(path, fork_server, environ)
            try:
                if answer := _ask(path, message, fds, REPLY_SECONDS):
                    return "pid" in answer
            except TimeoutError:  # it hangs: let the next launch start another
                with locked_folder(str(path.parent), waits=True):
                    if file_identity(str(path)) == found:  # it is not another's
                        path.unlink()
                return False
    except OSError:  # no socket, no lock, no program: another way remains
        return False
    finally:
        os.close(log_fd)
    return False


def spawn_detached(
    argv: Sequence[str], environ: Mapping[str, str], *, pass_fds: Iterable[int], log_path: str
) -> None:
    """Start `argv` in a session of its own, its output appended to `log_path`.

    Raises `OSError`: it cannot be started (`BlockingIOError`: there is no room for another
    process). That it ends at once is not seen here.
    """
    log_fd = _open_log(log_path)
    try:
        subprocess.run(
            ["/bin/sh", "-c", _DETACH, argv[0], *argv],
            env=dict(environ),
            pass_fds=tuple(pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
            check=True,
        )
    except subprocess.CalledProcessError as exc:
        # All that a shell can fail in here: whether the program starts is not its concern.
        why = f"the shell could not fork (exit code {exc.returncode})"
        raise BlockingIOError(errno.EAGAIN, why, argv[0]) from exc
    finally:
        os.close(log_fd)


def _open_log(path: str) -> int:
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open_log(path)


def may_fork(run: RunFileData) -> bool:
    """Whether this server can be forked: it names its entry, and runs in our own Python."""
    return sys.platform == "linux" and bool(run.get("entry")) and run["argv"][0] == sys.executable


def start_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of a server's environment its fork server must have been started with."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_START) or name in _PASSED_ON
    }


def stop_fork_servers(folder: Path) -> None:
    """Stop every fork server of a home, if there are any; their shims continue."""
    for path in folder.glob("fork-*.sock"):
        with contextlib.suppress(TimeoutError):
            _ask(path, {"end": True}, [], STOP_SECONDS)
        with contextlib.suppress(OSError):
            path.unlink()  # it was killed, or does not answer


def _digest(preload: list[str], environ: Mapping[str, str]) -> str:
    """Return a digest of what two servers must have in common to be forked by one fork server."""
    kind = [sys.executable, sys.version, str(_PACKAGE), _PACKAGE.stat().st_mtime_ns]
    described = json.dumps([*kind, preload, sorted(environ.items())])
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _start_unless_running(
    path: Path, fork_server: Json, environ: Mapping[str, str]
) -> tuple[int, int]:
    """Start a fork server at `path` if none listens there; it may still be importing on return."""
    with locked_folder(str(path.parent), waits=True):
        if not _listens(path):
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(path))
                path.chmod(0o600)
                listener.listen(LISTEN_BACKLOG)
                _spawn(listener.fileno(), fork_server, environ)
        return file_identity(str(path))


def _spawn(listen_fd: int, fork_server: Json, environ: Mapping[str, str]) -> None:
    config = {
        "listen": listen_fd,
        "lock": fork_server["folder"],
        "preload": fork_server["preload"],
        "idle_seconds": IDLE_SECONDS,
    }
    argv = [
        sys.executable,
        "-P",
        "-m",
        "openenvd.environments.shim.fork_server",
        json.dumps(config),
    ]
    # Otherwise a new title is written over the environment that `ps e` shows.
    spawn_detached(
        argv, {**environ, "SPT_NOENV": "1"}, pass_fds=[listen_fd], log_path=fork_server["log_path"]
    )


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(REPLY_SECONDS)
        return probe.connect_ex(str(path)) == 0


def _ask(path: Path, message: Json, fds: list[int], seconds: float) -> Json | None:
    """Return its answer, or None when it has exited; raises `TimeoutError` when it is silent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(str(path))
            if not send_message(connection, Message(message, fds=tuple(fds))):
                raise TimeoutError
            answer = receive_message(connection)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            return None
    return None if answer is None else answer.head
