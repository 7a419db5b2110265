# SPDX-License-Identifier: Apache-2.0
"""The zygote is a small, single-threaded process that imports what operations need, and forks.

It imports nothing of the daemon, and nothing it does can harm a worker: they share no file and no
lock, and a worker outlives it. What it does:

    on its control socket (one message each, SOCK_SEQPACKET, JSON):
        ◀ {"fork": name}            ▶ {"forked": name, "pid"} + the pipe and a pidfd
                                    ▶ {"refused": name, "error"}      the system will not fork
        ◀ {"call": "module:function", "payload"} + a socket, descriptors
                                    ▶ on that socket: "forked", or why not
        ◀ its end                   exits; the daemon is gone or has replaced it
    when a worker ended:            ▶ {"exited": pid, "status", "peak_bytes", "was_alone"}
                                    ▶ {"unsafe": threads}   or it ends: something that was imported,
                                                            or starts with every Python, has left
                                                            threads, and what they lock stays locked
                                                            in a fork

A process that is forked for a call is no worker. It has a session of its own, holds none of the
zygote's descriptors, and outlives zygote and daemon. The module of the call is imported here at its
first call, so an idle daemon does not pay for it, and the pages of what it imports are shared.

Its memory is frozen (`gc.freeze`) before the first fork, so that workers share its pages for as
long as they do not write them. It is a subreaper: what an operation left behind is reaped here when
it ends, also in a container whose pid 1 reaps nothing.

There are two ways into it. The first zygote of a daemon is forked from it (`prefork_zygote`)
while the daemon has one thread, only its own descriptors, and has imported only what operations
need: both share the pages of these imports, most of a zygote's memory, and the zygote is ready
before the daemon is. A daemon that fails to start closes its end of the control socket by exiting,
which ends this zygote too. One that has to be replaced is run as
`python -P -m openenvd.executor.spawning.zygote CONFIG`, since a daemon with threads must not fork;
CONFIG is JSON: `control` and `death_pipe` (descriptors), `home`, `preload` (modules).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import setproctitle

from ...system.memory.cgroup_tree import read_text
from ...system.process import forking
from ...system.process.descriptors import Message, close_all, receive_message, send_message
from ...system.process.prctl import adopt_orphans
from ...system.process.proc import children_of, prefer_own_session
from ...system.process.signal_pipe import SignalPipe
from ...system.text.json_lines import Json
from ..worker import run_worker
from .source import worker_environment

# Of its session, as of the daemon's: on a busy machine, every start waits for the zygote.
ZYGOTE_NICE = -10


class Zygote:
    """Waits on its control socket and on SIGCHLD; forks, reaps, reports."""

    def __init__(self, control: socket.socket, *, death_pipe: int, home: str) -> None:
        self._control = control
        self._death_pipe = death_pipe
        self._home = home
        self._workers: set[int] = set()  # those that were not reaped yet
        self._called: set[int] = set()  # those that were forked for a call, likewise
        self._signals = SignalPipe((signal.SIGCHLD,))

    def serve(self) -> None:
        """Handle requests until the control socket ends."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._signals, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._signals.fileno() in ready:
                self._reap()
            if self._control.fileno() in ready and not self._handle_request():
                return

    def send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send one message to the daemon; an `OSError` if it cannot be sent."""
        if not send_message(self._control, Message(message, fds=descriptors)):
            raise OSError(errno.ENOBUFS, "no buffer for a message to the daemon")

    def _handle_request(self) -> bool:
        """Handle one message; False at the end of the socket."""
        try:
            request = receive_message(self._control)
        except EOFError:
            return False
        if request is None:
            return True
        if "call" in request.head:
            self._handle_call(request)
            return True
        name = request.head["fork"]
        try:
            self._fork(name)
        except OSError as exc:
            from ...system.memory.limits import why_not_started

            self.send({"refused": name, "error": why_not_started(exc)})
        return True

    def _fork(self, name: str) -> None:
        ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, workers:
            pid = os.fork()
            if pid == 0:
                self._become_worker(name, ours, workers)
            self._workers.add(pid)
            # Before it can be reaped, and so before its pid can be another's.
            pidfd = os.pidfd_open(pid)
            try:
                self.send({"forked": name, "pid": pid}, (ours.fileno(), pidfd))
            finally:
                os.close(pidfd)

    def _handle_call(self, request: Message) -> None:
        """Fork a process that is no worker, and answer on the socket that came along."""
        answer_fd, *fds = request.fds
        answer = "forked"
        try:
            self._fork_for_call(request.head["call"], request.head["payload"], fds)
        except Exception as exc:  # of the system, or of a module that cannot be imported
            answer = f"{type(exc).__name__}: {exc}"
        with contextlib.suppress(OSError):  # the caller no longer waits
            os.write(answer_fd, answer.encode())
        close_all(request.fds)

    def _fork_for_call(self, entry: str, payload: Json, fds: Sequence[int]) -> None:
        module = entry.partition(":")[0]
        if module not in sys.modules:
            forking.preload([module])
            self.end_if_unsafe()
            importlib.import_module(module)  # raises what `preload` has printed
        pid = os.fork()
        if pid == 0:
            _become_called(entry, payload, fds)
        self._called.add(pid)

    def end_if_unsafe(self) -> None:
        """End this process if it has threads, with which it must not fork."""
        if (threads := forking.thread_count()) > 1:
            with contextlib.suppress(OSError):  # then its end says so
                self.send({"unsafe": threads})
            os._exit(0)

    def _become_worker(
        self, name: str, daemons_end: socket.socket, pipe: socket.socket
    ) -> NoReturn:
        try:
            forking.reset_handlers()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            daemons_end.close()
            self._control.close()
            close_all(self._signals.fds)
            gc.enable()
            run_worker(name, pipe, death_pipe=self._death_pipe, home=self._home)
        finally:
            # Never return into the zygote's loop, whatever happened.
            os._exit(70)

    def _reap(self) -> None:
        self._signals.take()
        with contextlib.suppress(ChildProcessError):
            while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                was_alone = exited.si_status == signal.SIGKILL and self._was_alone(exited.si_pid)
                pid, status, usage = os.wait4(exited.si_pid, 0)
                self._called.discard(pid)
                if pid in self._workers:
                    self._workers.remove(pid)
                    report = {"exited": pid, "status": status, "peak_bytes": usage.ru_maxrss * 1024}
                    self.send({**report, "was_alone": was_alone})

    def _was_alone(self, pid: int) -> bool:
        """Return whether a worker that waits to be reaped never had a child.

        Then a kill for memory in its cgroup was its own. Children that it had not reaped are
        children of the zygote by now.
        """
        orphans = set(children_of(os.getpid())) - self._workers - self._called
        fields = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        # No process runs without a page fault, and those of its children would be added to its own:
        # cminflt and cmajflt of proc_pid_stat(5).
        return not orphans and len(fields) > 10 and int(fields[8]) + int(fields[10]) == 0


def _become_called(entry: str, payload: Json, fds: Sequence[int]) -> NoReturn:
    """Call `entry` in the forked child, as a program of its own would be started."""
    try:
        os.setsid()
        forking.reset_signals()
        forking.close_all_but(fds)
        os.chdir("/")
        forking.run_and_exit(entry, payload, fds)
    finally:
        # Never return into the zygote's loop, whatever happened.
        os._exit(70)


def become_zygote(control: socket.socket, *, death_pipe: int, home: str) -> NoReturn:
    """Fork workers from what has been imported so far, until the control socket ends."""
    setproctitle.setproctitle("openenvd: zygote")
    prefer_own_session(ZYGOTE_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker starts with SIGTERM blocked and unblocks it when it can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    adopt_orphans()  # what an exited worker leaves behind is reaped here
    zygote = Zygote(control, death_pipe=death_pipe, home=home)
    with contextlib.suppress(OSError):  # the daemon may be gone at any moment
        zygote.end_if_unsafe()
        zygote.serve()
    os._exit(0)


@dataclass(frozen=True, slots=True)
class PreforkedZygote:
    """A zygote that has not been used yet, and the death pipe that its workers will hold."""

    pid: int
    control: socket.socket
    death_pipe: tuple[int, int]  # the reading end, which workers hold, and ours, never written


def prefork_zygote(modules: Sequence[str], home: str) -> PreforkedZygote | None:
    """Import `modules`, then fork; None when there are threads by then.

    Raises `OSError`: the system will not fork.
    """
    forking.preload(modules, collect=False)  # the daemon is being waited for
    if forking.thread_count() > 1:
        return None
    ours, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    death_pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # Ctrl-C at `up --foreground` is the daemon's to handle
            ours.close()
            os.close(death_pipe[1])
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            forking.close_all_but({zygotes.fileno(), death_pipe[0]})
            sys.stdout.flush()  # into /dev/null: no worker is to print what the daemon began
            os.environ.update(worker_environment(os.environ))
            os.chdir(home)
            become_zygote(zygotes, death_pipe=death_pipe[0], home=home)
        finally:
            # Never return into the daemon's code, whatever happened.
            os._exit(70)
    zygotes.close()
    return PreforkedZygote(pid, ours, death_pipe)


def main() -> NoReturn:
    """Preload, freeze, serve."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=config["control"])
    for descriptor in (config["control"], config["death_pipe"]):
        os.set_inheritable(descriptor, False)
    forking.preload(config["preload"])
    become_zygote(control, death_pipe=config["death_pipe"], home=config["home"])


if __name__ == "__main__":
    main()
