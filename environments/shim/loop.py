# SPDX-License-Identifier: Apache-2.0
"""The shim: the small parent of one replica's server, which outlives worker and daemon.

    starter ──run file, sockets──▶ shim ──fork, exec──▶ server (env host) ──▶ its children
                                     ▲  │                    │ notify pipe
    daemon, workers ◀──JSON lines──▶─┘  └── status.json      └── log file (by descriptor)

Started as a program of its own, or forked by the daemon's zygote (`forked.py`); then its server is
forked too, without exec, when the run file names its `entry`.

One thread, one `select`. It starts the server once; whether a server that exited is started again
is the daemon's decision (`{"op": "start"}`). It holds the listening socket open across restarts,
is the subreaper of everything below it, and reports how the server exited.

What happens when

    the server exits        what it left running is killed and reaped, then "exited" is reported
                            with an `ExitReason`; the listening socket stays open
    it forks orphans        they become our children (subreaper); they end with the server
    it cannot be started    "exited" with `failed` and exit code 127; "start" tries again
    a grandchild is killed  for memory, and the server lives: `oom_kills` moves, nothing else
    the shim is SIGKILLed   the kernel kills the server (PDEATHSIG); clients see the end of the
                            connection; `status.json` says which cgroup and session to sweep
                            (`client.clean_up_after_shim`)
    the daemon exits        nothing: no pipe, no session, no cgroup is shared with it
    its home is removed     no client can reach it any more: as `stop`, some seconds later
    the disk is full        clients are sent it all the same; `status.json` is tried again later
    a client leaves         in mid line or not, its half line is dropped with it
    a client does not read  statuses are whole, so only the newest is kept for it
    two clients             both receive every status; either may send requests
    drain                   SIGUSR1 to the server, which exits when its last session has ended, or
                            is stopped when the time is over; it is not started again. It says
                            when it begins none any more ("draining"). One that is starting and
                            has no client yet ends at once; without a server: as "stop"
    stop twice              the earlier deadline wins; a stopped shim is gone
    start while running     nothing
    the server is unused    it says so and exits ("asleep"); its memory is free. When a client
                            connects, or at "start", the next server is started, which accepts what
                            waits in the kernel's queue; a client that connects while it exits too
    we are killed then      a new shim starts its server at once
    two shims               the second finds the lock of the run directory held, and exits
    SIGTERM                 as `stop`; SIGINT and SIGHUP are a terminal's, and ignored

Small on purpose, and so is what it imports (no dataclasses, pathlib or subprocess: each costs every
replica about 1 MB); the explanation of an exit is imported when there is one.
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
GROUPS_NAME = "replicas"  # the cgroup manager's name, where the run file has none
SHIMS = "shims"


def enter_shims_group(manager_name: str = GROUPS_NAME) -> tuple[CgroupManager, Cgroup] | None:
    """Move from the starter's cgroup (a worker's, capped) into that of all shims, without a cap.

    Return it, and the manager that makes the servers' groups; None where there can be none.
    """
    for _ in range(3):  # a shim on its way out may remove an empty group under our feet
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
        """Open what belongs to `run_dir`, whose lock this process holds.

        `is_forked`: by the zygote, with the modules that a server needs imported.
        """
        self._run_dir = run_dir
        self._run = files.read_run_file(run_dir)
        me = ProcessIdentity.of(os.getpid())
        self._identity: Process = {"pid": me.pid, "started_at": me.started_at}
        # What is registered here is called without arguments. It must bear it when an earlier
        # event of the same round closed what it reads.
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
        self._run_dir_watch = files.RunDirectoryWatch()
        self._next_look = 0.0  # monotonic

    def run(self) -> None:
        """Run until the server has been stopped for good."""
        # Before there is anything to be left behind: were we killed before the first status.json,
        # this is what is known of us.
        with contextlib.suppress(OSError):  # status.json says it too
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
            # Its share of the sessions may be another.
            with contextlib.suppress(OSError, ValueError):
                self._run.update(files.read_run_file(self._run_dir))
            self._server.handle(Event.START)
            self._look()

    def _serve(self) -> None:
        """Let the server accept connections; also of the next shim, whatever ends this one."""
        if self._server.process.is_held:
            self._server.process.serve()
            with contextlib.suppress(OSError):  # the daemon says it again to the next shim
                self._write_run_file()
            self._on_change(True)

    def _look(self) -> None:
        """Look at the server; retry the status file; stop when the run directory was removed."""
        seconds = self._server.look()
        is_gone = self._run_dir_watch.look(
            time.monotonic(), is_missing=files.is_missing(self._run_dir)
        )
        if is_gone and self._server.life.state is not State.STOPPING:  # or it would be hastened
            self._server.handle(Event.STOP, DEFAULT_GRACE_SECONDS)
        if self._run_dir_watch.is_missing:
            seconds = min(seconds, files.REMOVED_SECONDS)
        self._next_look = time.monotonic() + seconds
        if not self._status_is_written:
            self._write_status()

    def _clean_up(self) -> None:
        for path in (self._run["socket_path"], self._run.get("door_path", "")):
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
        if self._run_dir_watch.is_missing:  # no daemon will do it
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
        """Send every client the status; what is durable is written to disk first."""
        if (
            self._server.life.state is State.STOPPED
        ):  # first: a client that reads of it finds nothing of us
            self._clean_up()
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
    """Be the shim of the folder that the command line names (`__main__.py`)."""
    with contextlib.suppress(PermissionError):  # we lead a group, as a service manager's child
        os.setsid()
    run_shim(sys.argv[1])


def run_shim(run_dir: str, *, is_forked: bool = False) -> None:
    """Be the shim of `run_dir`, in a session of its own; exits when another shim has its lock."""
    # Raised in the worker that started us, which the kernel is to kill first. A replica without
    # its shim is lost, so the shim goes last.
    set_oom_score_adj(os.getpid(), 0)
    try:
        files.lock(run_dir)
    except BlockingIOError:
        sys.exit(f"shim: another shim owns {run_dir}")
    Shim(run_dir, is_forked=is_forked).run()
