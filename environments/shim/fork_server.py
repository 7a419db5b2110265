# SPDX-License-Identifier: Apache-2.0
"""The fork server: imports shim and server once, and forks shims that share those pages (Linux).

    daemon ──(control socket, log, listeners)──▶ fork server ──fork──▶ shim ──fork──▶ server
                                                   │                 │                │
                                                   └───── pages of what it imported ──┘  shared

Forked processes own only the pages they write: a shim and its server take 8 MB together, not the
33 MB of two programs with their own imports, and are ready in tens of milliseconds. One thread and
no event loop, so that forking is safe. A fork server is started when it is first needed
(`client.py`), for one list of modules and one set of environment variables.

Wire (a Unix SEQPACKET pair with the process that started it), one message each way:

    {"run_dir", "title"} + control socket, log, listeners…               ▶  {"pid": 4711}
    what cannot be done                                                  ▶  {"refused": "why"}

What happens when

    it is not needed           it exits after `idle_seconds` with no shim and no request. With shims
                               it stays: they keep the shared pages in memory anyway
    the daemon exits           it exits, since the socket ends; its shims go on (they are detached)
    it is killed               the same; the next launch starts another
    it hangs                   the shim is started as a program, and the next launch starts another
    a module leaves a thread   it refuses: forking would not be safe
    a module cannot be         it is left to the server that needs it, which reports it
    imported

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
from .files import CONTROL_FD_VARIABLE, LISTEN_FD_VARIABLE
from .loop import enter_shims_group, leave_shims_group
from .server_process import set_title


class ForkServer:
    """Waits for requests and for exits; forks, reaps, and exits when it is not needed."""

    def __init__(self, requests: socket.socket, idle_seconds: float) -> None:
        self._requests = requests
        self._idle_seconds = idle_seconds
        self._shims: set[int] = set()
        self._requested_at = time.monotonic()
        self._must_exit = False
        self._refusal: str | None = None  # why it refuses every request; None: it does not
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ, self._on_message)
        self._signals = SignalPipe((signal.SIGTERM, signal.SIGCHLD), ignored=TERMINAL_SIGNALS)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)

    def serve(self) -> None:
        """Serve requests until asked to exit, or idle."""
        if (threads := forking.thread_count()) > 1:
            self._refusal = f"{threads} threads run after preloading"
        while not self._must_exit:
            for key, _ in self._selector.select(self._idle_seconds):
                key.data()
            silent = time.monotonic() - self._requested_at
            self._must_exit |= is_idle(len(self._shims), silent, self._idle_seconds)

    def _on_signal(self) -> None:
        if signal.SIGTERM in self._signals.take():
            self._must_exit = True
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._shims.discard(ended)

    def _on_message(self) -> None:
        self._requested_at = time.monotonic()
        try:
            message = receive_message(self._requests)
            if message is not None:
                try:
                    send_message(self._requests, Message(self._answer(message.head, message.fds)))
                finally:
                    close_all(message.fds)
        except (EOFError, OSError):
            self._must_exit = True

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


def is_idle(shims: int, silent_seconds: float, idle_seconds: float) -> bool:
    """Whether the fork server may end. While its shims run, it costs almost nothing."""
    return not shims and silent_seconds >= idle_seconds


def _become_shim(
    run_dir: str, title: str, control: int, log: int, listeners: Sequence[int]
) -> NoReturn:
    """Run a shim in the forked child. Never returns to the fork server's loop, whatever happens."""
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
        print(exc, file=sys.stderr, flush=True)  # noqa: T201  why, for the log
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def main() -> NoReturn:
    """Run `python -P -m openenvd.environments.shim.fork_server CONFIG`.

    CONFIG is JSON: `requests` (a descriptor), `preload` (modules), `idle_seconds`.
    """
    config = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir("/")
    # Reset as in a shim, regardless of the score and cgroup of the process that started this one.
    set_oom_score_adj(os.getpid(), 0)
    group = enter_shims_group()
    forking.close_all_but([config["requests"]])
    requests = socket.socket(fileno=config["requests"])
    requests.setblocking(False)
    os.set_inheritable(config["requests"], False)
    fork_server = ForkServer(requests, config["idle_seconds"])
    set_title("openenvd: fork server")
    forking.preload(config["preload"])
    fork_server.serve()
    leave_shims_group(group)
    os._exit(0)


if __name__ == "__main__":
    main()
