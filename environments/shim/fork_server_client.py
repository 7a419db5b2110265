# SPDX-License-Identifier: Apache-2.0
"""A fork server's starter: ask for a shim, start a fork server when there is none.

The daemon alone forks shims. It has one fork server for each list of modules and each set of the
variables that only a program's start reads; they end with it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...system.process.descriptors import Message, receive_message, send_message
from ...system.text.json_lines import Json
from .files import open_log

if TYPE_CHECKING:
    from ...schema.replica import RunFileData

IDLE_SECONDS = 15.0
# For it to import everything with half a CPU, thirty launches waiting. Then a shim is started as
# a program; were the fork server's still to come, it would find the run directory taken.
REPLY_SECONDS = 60.0
_ATTEMPTS = 2  # one may be exiting while it is asked
_READ_AT_START = ("PYTHON", "LD_", "DYLD_", "MALLOC_", "GLIBC_", "LC_", "LANG")
# The shell starts the program in the background and is gone: the starter may be a short-lived
# worker, or have threads.
_DETACH = '"$@" &'
_PASSED_ON = ("PATH", "OPENENV_HOME")  # the latter tells whose process it is


_servers: dict[str, socket.socket] = {}  # by what they were started with
_asking = threading.Lock()  # they answer one request after another


def fork_shim(
    fork_server: Json, run: RunFileData, *, run_dir: str, control_fd: int, listen_fds: Sequence[int]
) -> bool:
    """Ask for a shim from the fork server of `fork_server`: `{"preload", "log_path"}`.

    False: none can be forked here, or it was refused; then start the shim as a program.
    """
    if not may_fork(run):
        return False
    environ = start_environment(run["env"])
    kind = json.dumps([fork_server, sorted(environ.items())])
    log_fd = _open_log(run["log_path"])
    head = {"run_dir": run_dir, "title": f"openenvd: shim {run['replica_id']}"}
    message = Message(head, fds=(control_fd, log_fd, *listen_fds))
    try:
        with _asking:
            for _ in range(_ATTEMPTS):
                if kind not in _servers:
                    _servers[kind] = _start(fork_server, environ)
                answer = _ask(_servers[kind], message)
                if answer is not None:
                    return "pid" in answer
                _servers.pop(kind).close()
    except TimeoutError:  # it hangs: the next request starts another
        _servers.pop(kind).close()
    except OSError:  # no socket, no program: another way remains
        pass
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


def stop_fork_servers() -> None:
    """Stop all fork servers; their shims continue."""
    with _asking:
        while _servers:
            with _servers.popitem()[1] as server, contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)
                server.recv(1)  # the end, when it has exited


def _start(fork_server: Json, environ: Mapping[str, str]) -> socket.socket:
    """Start a fork server; it may still be importing on return."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        config = {"requests": theirs.fileno(), "preload": fork_server["preload"]}
        config["idle_seconds"] = IDLE_SECONDS
        module = "openenvd.environments.shim.fork_server"
        argv = [sys.executable, "-P", "-m", module, json.dumps(config)]
        # Otherwise a new title is written over the environment that `ps e` shows.
        environ = {**environ, "SPT_NOENV": "1"}
        try:
            log_path = fork_server["log_path"]
            spawn_detached(argv, environ, pass_fds=[theirs.fileno()], log_path=log_path)
        except OSError:
            ours.close()
            raise
    return ours


def _ask(server: socket.socket, message: Message) -> Json | None:
    """Return its answer, or None when it has exited; raises `TimeoutError` when it is silent."""
    server.settimeout(REPLY_SECONDS)
    try:
        answer = receive_message(server) if send_message(server, message) else None
    except (EOFError, ConnectionError):
        return None
    if answer is None:
        raise TimeoutError
    return answer.head
