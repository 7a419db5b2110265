# SPDX-License-Identifier: Apache-2.0
"""The fork server: imports shim and server once, and forks shims that share those pages (Linux).

    launch ──(control socket, log, listeners)──▶ fork server ──fork──▶ shim ──fork──▶ server
                                                   │                 │                │
                                                   └───── pages of what it imported ──┘  shared

What it forks owns only the pages that it writes: a shim and its server together 8 MB instead of
the 33 MB of two programs that import everything for themselves, and are ready in tens of
milliseconds. One thread and no event loop, so that forking is safe. Started when it is first
needed (`fork_server_client.py`), of one Python, one version of ours and one list of modules.

Wire (Unix SEQPACKET, its owner's alone), one message each way and connection:

    {"run_dir", "log_path", "title"} + control socket, log, listeners…   ▶  {"pid": 4711}
    {"end": true}                                                        ▶  the connection's end
    what cannot be done                                                  ▶  {"refused": "why"}

What happens when

    it is not needed           no shim of its own and no request for `idle_seconds`: it exits. With
                               shims it stays, for the pages are held anyway
    the daemon stops           the daemon stops it; its shims go on
    the daemon exits           nothing; it exits when it is idle
    it is killed               shims go on (they are detached); the next launch starts another
    it hangs                   the client whose request timed out unlinks its socket and starts the
                               shim as a program; the next launch starts another fork server
    it exits while a client    it unlinks its socket under the lock that a starter holds, so the
    connects                   client is served, or finds no socket and starts another
    a module leaves a thread   it refuses: forking would not be safe
    a module cannot be         it is left to the server that needs it, which reports it
    imported
    a client connects and      only that client waits: no connection is read before it is readable
    sends nothing

A forked shim has its own session, signals, descriptors, log and name (`forking.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from ...system.net.listening_sockets import descriptors_text
from ...system.process import (
    diagnose,  # noqa: F401  every shim needs it when its server exits
    forking,
)
from ...system.process.descriptors import Message, close_all, receive_message, send_message
from ...system.process.proc import set_oom_score_adj
from ...system.process.signal_pipe import TERMINAL_SIGNALS, SignalPipe
from ...system.text.json_lines import Json
from . import loop
from .files import CONTROL_FD_VARIABLE, LISTEN_FD_VARIABLE, file_identity, locked_folder
from .loop import enter_shims_group, leave_shims_group
from .server_child import set_title

LISTEN_BACKLOG = 1024
RETRY_SECONDS = 0.02  # asked to exit, while a client looks whether we are there


class ForkServer:
    """Waits for requests and for exits; forks, reaps, and exits when it is not needed."""

    def __init__(self, listener: socket.socket, folder: str, idle_seconds: float) -> None:
        self._listener = listener
        self._name = listener.getsockname()
        self._socket_identity = file_identity(self._name)
        self._folder = folder
        self._idle_seconds = idle_seconds
        self._shims: set[int] = set()
        self._requested_at = time.monotonic()
        self._must_exit = False
        self._has_exited = False
        self._stop_requests: list[socket.socket] = []  # closed by our exit, which they wait for
        self._refusal: str | None = None  # why it forks nothing
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._on_connect)
        self._signals = SignalPipe((signal.SIGTERM, signal.SIGCHLD), ignored=TERMINAL_SIGNALS)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)

    def serve(self) -> None:
        """Serve requests until asked to exit, or idle."""
        if (threads := forking.thread_count()) > 1:
            self._refusal = f"{threads} threads run after preloading"
        while not self._has_exited:
            timeout = RETRY_SECONDS if self._must_exit else self._idle_seconds
            for key, _ in self._selector.select(timeout):
                key.data()
            silent = time.monotonic() - self._requested_at
            if self._must_exit or is_idle(len(self._shims), silent, self._idle_seconds):
                self._exit_unless_wanted()

    def _on_signal(self) -> None:
        if signal.SIGTERM in self._signals.take():
            self._must_exit = True
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._shims.discard(ended)

    def _on_connect(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it left before it was let in
        connection.setblocking(False)
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._on_message(connection)
        )

    def _on_message(self, connection: socket.socket) -> None:
        self._requested_at = time.monotonic()
        self._selector.unregister(connection)
        with contextlib.suppress(EOFError, OSError, ValueError):  # it has left, or sent no message
            message = receive_message(connection)
            if message is not None and message.head.get("end"):
                self._must_exit = True
                self._stop_requests.append(connection)
                return
            if message is not None:
                try:
                    send_message(connection, Message(self._answer(message.head, message.fds)))
                finally:
                    close_all(message.fds)
        connection.close()

    def _answer(self, message: Json, fds: Sequence[int]) -> Json:
        try:
            if self._refusal is not None:
                return {"refused": self._refusal}
            control, log, *listeners = fds
            run_dir, title = str(message["run_dir"]), str(message["title"])
            pid = os.fork()
            if pid == 0:
                _become_shim(run_dir, title, control, log, listeners)
            self._shims.add(pid)
            return {"pid": pid}
        except (OSError, ValueError, KeyError) as exc:
            return {"refused": f"{type(exc).__name__}: {exc}"}

    def _exit_unless_wanted(self) -> None:
        """Unlink the socket first: a client that connects afterwards starts another fork server.

        A client that holds the lock is looking whether we are there: we exit later.
        """
        try:
            with locked_folder(self._folder, waits=False):
                if file_identity(self._name) == self._socket_identity:
                    os.unlink(self._name)  # noqa: PTH108
        except BlockingIOError:
            self._requested_at = time.monotonic()
            return
        except OSError:  # the home is gone, and with it our socket
            pass
        self._has_exited = True


def is_idle(shims: int, silent_seconds: float, idle_seconds: float) -> bool:
    """Whether it is not needed. Beside its shims it costs next to nothing."""
    return not shims and silent_seconds >= idle_seconds


def _become_shim(
    run_dir: str, title: str, control: int, log: int, listeners: Sequence[int]
) -> NoReturn:
    """Be a shim, in the child: never back into the fork server's loop, whatever happens."""
    try:
        os.setsid()
        forking.reset_signals()
        forking.write_output_to(log)
        forking.close_all_but([control, *listeners])
        os.environ[CONTROL_FD_VARIABLE] = str(control)
        os.environ[LISTEN_FD_VARIABLE] = descriptors_text(listeners)  # empty: none
        set_title(title)
        loop.run_shim(run_dir, is_forked=True)
        os._exit(0)
    except SystemExit as exc:
        print(exc, file=sys.stderr, flush=True)  # noqa: T201  another shim has it
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def main() -> NoReturn:
    """Run `python -P -m openenvd.environments.shim.fork_server CONFIG`.

    CONFIG is JSON: `listen` (a descriptor), `lock` (the socket's folder), `preload` (modules),
    `idle_seconds`.
    """
    config = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir("/")
    # As a shim does: its starter may be a worker, which is capped and to be killed first.
    set_oom_score_adj(os.getpid(), 0)
    group = enter_shims_group()
    forking.close_all_but([config["listen"]])
    listener = socket.socket(fileno=config["listen"])
    listener.setblocking(False)
    os.set_inheritable(config["listen"], False)
    fork_server = ForkServer(listener, config["lock"], config["idle_seconds"])
    set_title("openenvd: fork server")
    forking.preload(config["preload"])
    fork_server.serve()
    leave_shims_group(group)
    os._exit(0)


if __name__ == "__main__":
    main()
