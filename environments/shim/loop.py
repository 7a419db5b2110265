# SPDX-License-Identifier: Apache-2.0
"""The shim: the small parent of one replica's server. It outlives the worker and the daemon.

    starter ──run file, sockets──▶ shim ──fork, exec──▶ server (env host) ──▶ its children
                                     ▲  │                    │ notify pipe
    daemon, workers ◀──JSON lines──▶─┘  └── status.json      └── log file (by descriptor)

A shim is a program, or a fork of the daemon's zygote (`forked.py`), which forks its server as well,
without exec, if the run file names the server's `entry`.

The shim has one thread and one `select`. It starts the server once; the daemon decides whether a
server that exited is started again (`{"op": "start"}`). The shim holds the listening socket open
across restarts, is the subreaper of all processes below it, and reports how the server exited.

What happens when

    the server exits        the processes that it left are killed and reaped, then "exited" is
                            reported with an `ExitReason`; the listening socket stays open
    it forks orphans        they become children of the shim (subreaper), and end with the server
    it cannot be started    "exited" with `failed` and exit code 127; "start" tries again
    a grandchild is killed  for memory, and the server lives: `oom_kills` changes, nothing else
    the shim is SIGKILLed   the kernel kills the server (PDEATHSIG); clients see the end of the
                            connection; `status.json` names the cgroup and session to clean up
                            (`client.clean_up_after_shim`)
    the daemon exits        nothing: it shares no pipe, session or cgroup with the shim
    its home is removed     no client can reach it any more: as `stop`, some seconds later
    the disk is full        clients are sent statuses all the same; `status.json` is written later
    a client leaves         also in the middle of a line, which is dropped
    a client does not read  it is sent only the newest status, since each status is complete
    two clients             both receive every status; either may send requests
    drain                   SIGUSR1 to the server, which exits when its last session has ended, or
                            is stopped when the time is over; it is not started again. The server
                            reports when it begins no sessions any more ("draining"). If it is
                            starting and has no client yet, it ends at once; without a server: as
                            "stop"
    stop twice              the earlier deadline counts; a stopped shim is gone
    start while running     nothing
    the server is unused    it reports that and exits ("asleep"), which frees its memory. When a
                            client connects, or at "start", the next server is started, and accepts
                            the connections in the kernel's queue, also those from before its exit
    we are killed then      a new shim starts its server at once
    two shims               the second finds the lock of the run directory held, and exits
    SIGTERM                 as `stop`; SIGINT and SIGHUP come from terminals, and are ignored

The module is small on purpose, and so are its imports (no dataclasses, pathlib or subprocess, each
of which costs every replica about 1 MB); the code that explains an exit is imported at an exit.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from typing import TYPE_CHECKING, cast

from ...system.memory.cgroups import Cgroup, CgroupManager
from ...system.process.prctl import adopt_orphans
from ...system.process.proc import set_oom_score_adj
from ...system.process.process_identity import ProcessIdentity
from ...system.process.signal_pipe import TERMINAL_SIGNALS, SignalPipe
from ...system.text.json_lines import encode_line
from ..replica_state import Event, State
from . import files
from .connections import DEFAULT_GRACE_SECONDS, Connection, Connections, error_line, read_operation
from .server import Server

if TYPE_CHECKING:
    from ...schema.replica import Process, StatusLine

LINGER_SECONDS = 1.0  # for clients to read the last status
GROUPS_NAME = "replicas"  # the cgroup manager's name, if the run file has none
SHIMS = "shims"


def enter_shims_group(manager_name: str = GROUPS_NAME) -> tuple[CgroupManager, Cgroup] | None:
    """Move this process from its starter's cgroup, a worker's, into that of all shims.

    Return the manager that makes the servers' groups, and the group of shims, which has no memory
    limit; None if there are no cgroups.
    """
    for _ in range(3):  # a shim that exits may remove the group while it is empty
        manager = CgroupManager(manager_name)
        if not manager.available:
            return None
        with contextlib.suppress(OSError):
            group = manager.create(SHIMS)
            group.add(os.getpid())
            return manager, group
    return None


def leave_shims_group(entered: tuple[CgroupManager, Cgroup] | None) -> None:
    """Leave the group again; the last process to leave removes it."""
    if entered is not None:
        manager, group = entered
        manager.leave(group)


class Shim:
    """One replica's shim. `run` returns when everything has been stopped."""

    def __init__(self, run_dir: str, *, is_forked: bool = False) -> None:
        """Open socket and files of `run_dir`, whose lock this process holds.

        A shim that `is_forked` has the modules imported that a server needs.
        """
        self._run_dir = run_dir
        self._run = files.read_run_file(run_dir)
        me = ProcessIdentity.of(os.getpid())
        self._identity: Process = {"pid": me.pid, "started_at": me.started_at}
        # Callbacks are registered here, and called without arguments. An earlier event of the same
        # round may have closed the file that a callback reads.
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe((signal.SIGTERM, signal.SIGCHLD), ignored=TERMINAL_SIGNALS)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        adopt_orphans()
        path = self._run["socket_path"]
        inherited = files.inherited_sockets(files.CONTROL_FD_VARIABLE)
        control = inherited[0] if inherited else files.open_control_socket(path)
        self._clients = Connections(
            control, self._selector, lambda: encode_line(self._to_json()), self._answer
        )
        self._group = enter_shims_group(self._run.get("cgroups") or GROUPS_NAME)
        groups = None if self._group is None else self._group[0]
        self._server = Server(
            self._run,
            groups,
            self._selector,
            self._on_change,
            self._start_anew,
            is_forked=is_forked,
            earlier=cast(
                "StatusLine | None", files.read_json(f"{run_dir}/{files.STATUS_FILE_NAME}")
            ),
        )
        self._status_is_written = True
        self._missing_since: float | None = None  # the run directory; monotonic
        self._next_look = 0.0  # monotonic

    def run(self) -> None:
        """Run until the server has been stopped for good."""
        # Before any process is started: if the shim is killed before its first status.json, the run
        # file alone names it.
        with contextlib.suppress(OSError):  # status.json names it, too
            self._write_run_file()
        self._server.begin()
        while self._server.life.state is not State.STOPPED:
            deadline = self._server.life.deadline
            self._handle_events(min(self._next_look, deadline or self._next_look))
            if time.monotonic() >= self._next_look:
                self._look()
            self._server.handle(Event.TIME)
        # Clients that read are given time for the last status.
        deadline = time.monotonic() + LINGER_SECONDS
        self._clients.admit_no_more()
        while self._clients.have_unsent and time.monotonic() < deadline:
            self._handle_events(deadline)
        self._clients.drop_all()

    def _handle_events(self, until: float) -> None:
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            key.data()

    def _start_anew(self) -> None:
        """Start the server again, when there is none."""
        if self._server.life.is_at_rest:
            # Its share of the sessions may have changed.
            with contextlib.suppress(OSError, ValueError):
                self._run.update(files.read_run_file(self._run_dir))
            self._server.handle(Event.START)
            self._look()

    def _serve(self) -> None:
        """Open the start barrier: the server may accept connections, also under the next shim."""
        if self._server.process.is_held:
            self._server.process.serve()
            with contextlib.suppress(OSError):  # the daemon tells the next shim, too
                self._write_run_file()
            self._on_change(True)

    def _look(self) -> None:
        """Look at the server; retry the status file; stop if the run directory was removed.

        Without its directory, no client can ever find this shim again.
        """
        seconds, now = self._server.look(), time.monotonic()
        self._missing_since = files.missing_since(self._run_dir, self._missing_since, now)
        if self._missing_since is not None:
            seconds = min(seconds, files.REMOVED_SECONDS)
            is_gone = now - self._missing_since >= files.REMOVED_SECONDS
            if is_gone and self._server.life.state is not State.STOPPING:  # a stop is not hastened
                self._server.handle(Event.STOP, DEFAULT_GRACE_SECONDS)
        self._next_look = time.monotonic() + seconds
        if not self._status_is_written:
            self._write_status()

    def _clean_up(self) -> None:
        files.unlink_sockets(self._run)
        if self._missing_since is not None:  # no daemon will do it
            files.remove_if_empty(os.path.dirname(self._run["socket_path"]))  # noqa: PTH120
        leave_shims_group(self._group)
        self._group = None

    def _write_run_file(self) -> None:
        group = None if self._group is None else self._group[0].group(self._run["replica_id"])
        known = {"shim": self._identity, "cgroup": None if group is None else group.to_json()}
        files.write_json(f"{self._run_dir}/{files.RUN_FILE_NAME}", self._run | known, sync=True)

    def _on_signal(self) -> None:
        numbers = self._signals.take()
        if signal.SIGTERM in numbers:
            self._server.handle(Event.STOP, DEFAULT_GRACE_SECONDS)
        if signal.SIGCHLD in numbers:
            self._server.reap()

    def _answer(self, client: Connection, line: bytes) -> None:
        try:
            op, seconds = read_operation(line)
        except ValueError as exc:
            client.queue_reply(error_line(f"not a message: {exc}"))
            return
        match op:
            case "start":
                self._start_anew()
            case "serve":
                self._serve()
            case "stop":
                self._server.handle(Event.STOP, seconds)
            case "drain" | "leave":
                self._server.drain(seconds, is_replaced=op == "leave")
            case "listeners":
                fds = self._server.process.listener_fds
                client.queue_reply(encode_line({"event": "listeners"}), fds)
            case _:
                client.queue_reply(error_line(f"unknown op: {op!r}"))

    def _on_change(self, is_durable: bool) -> None:
        """Send every client the status, which is written to the disk first if it is durable."""
        if self._server.life.state is State.STOPPED:
            self._clean_up()  # first: a client that reads the status finds no file of the shim
        if is_durable:
            self._write_status()
        self._clients.send_status()

    def _to_json(self) -> StatusLine:
        return {
            "event": "status",
            "replica_id": self._run["replica_id"],
            "shim": self._identity,
            **self._server.to_json(),
        }

    def _write_status(self) -> None:
        try:
            files.write_json(f"{self._run_dir}/{files.STATUS_FILE_NAME}", self._to_json())
            self._status_is_written = True
        except OSError:
            self._status_is_written = False


def main() -> None:
    """Run as the shim of the folder that the command line names (`__main__.py`)."""
    with contextlib.suppress(PermissionError):  # it leads a group, as a service manager's child
        os.setsid()
    run_shim(sys.argv[1])


def run_shim(run_dir: str, *, is_forked: bool = False) -> None:
    """Run as the shim of `run_dir`, in a session of its own; exit if another shim has its lock."""
    # A worker's score, which the shim inherits, is high, so that the kernel kills workers first. A
    # replica without its shim is lost, so the shim must go last.
    set_oom_score_adj(os.getpid(), 0)
    try:
        files.lock(run_dir)
    except BlockingIOError:
        sys.exit(f"shim: another shim owns {run_dir}")
    Shim(run_dir, is_forked=is_forked).run()
