# SPDX-License-Identifier: Apache-2.0
"""The server of a shim as a process: its listening sockets, cgroup, log, pid, and notify pipe.

`server.py` calls the methods when the state machine says so. `schema/protocol.py` lists the
messages of the server's pipe, one JSON object a line.

The module calls `fork` and `exec` itself: `subprocess` costs a shim 1.1 MB, and cannot make a child
die with its parent, or enter a cgroup. That is safe because the shim has one thread. Shims import
this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Never, cast

from ...system.memory.cgroups import Cgroup, CgroupManager
from ...system.net.listening_sockets import descriptors_text, listening, open_listening_sockets
from ...system.process.prctl import die_with_parent
from ...system.process.proc import children_of, set_oom_score_adj
from ...system.process.process_identity import ProcessIdentity
from ...system.text.json_lines import LineBuffer, decode_line
from . import files

if TYPE_CHECKING:
    from ...schema.replica import RunFileData, ServerReport, StatusLine

# Wait statuses of drained servers; one that has not begun to accept connections ends by the signal.
DRAINED = (0, signal.SIGUSR1, signal.SIGUSR2)
MAX_NOTIFY_BYTES = 256 * 1024  # of one line
_READ_BYTES = 65536


class ServerProcess:
    """One server process at a time, or none."""

    def __init__(self, run: RunFileData, groups: CgroupManager | None, *, is_forked: bool) -> None:
        """Begin without a process; `is_forked`: the shim itself was forked (`forked.py`)."""
        self._run = run
        self._groups = groups
        self._is_forked = is_forked
        self.pid: int | None = None
        self._started_at: float | None = None
        self.ended: tuple[int, int] | None = None  # wait status, peak resident bytes
        self.cgroup: Cgroup | None = None
        self._listeners: list[socket.socket] = []
        self._gate_fd: int | None = None  # the start barrier's writing end, while it is closed

    @property
    def runs(self) -> bool:
        """Return whether it was started and has not been reaped."""
        return self.pid is not None and self.ended is None

    @property
    def listener_fds(self) -> tuple[int, ...]:
        """Return the listening sockets; none: they have not been opened."""
        return tuple(one.fileno() for one in self._listeners)

    @property
    def listening_fds(self) -> tuple[int, ...]:
        """Return the sockets that accept clients, without those that only reserve the port."""
        return tuple(one.fileno() for one in listening(self._listeners))

    def to_json(self) -> StatusLine:
        """Return its part of the status that clients are sent (`connections.py`)."""
        host, port = self._run["host"], self._run["port"]
        if not port and self._listeners:
            port = self._listeners[0].getsockname()[1]  # any port was requested; this is the one
        return {
            "pid": self.pid,
            "pid_started_at": self._started_at,
            "host": host,
            "port": port,
            "cgroup": None if self.cgroup is None else self.cgroup.to_json(),
            "held": self.is_held,
        }

    def prepare(self) -> None:
        """Open the sockets, which stay open across restarts; make a cgroup; raises `OSError`."""
        if not self._listeners:
            inherited = files.inherited_sockets(files.LISTEN_FD_VARIABLE)
            address = self._run["host"], self._run["port"]
            self._listeners = inherited or open_listening_sockets(*address)
            for one in self._listeners:
                one.setblocking(False)
        self.remove_cgroup()  # each server has a new one, with its own peak and counters
        self.cgroup = None
        if self._groups is not None:
            with contextlib.suppress(OSError):
                self.cgroup = self._groups.create(
                    self._run["replica_id"], self._run.get("memory_limit_bytes")
                )

    def start(self, *, is_tried: bool) -> int:
        """Start the server; return the reading end of its notify pipe, which the caller closes.

        A server that `is_tried` first checks whether an environment can be created. Raises
        `OSError` if it cannot be started.
        """
        with contextlib.ExitStack() as passed:  # descriptors that only the server keeps
            log_fd = files.open_log(self._run["log_path"])
            passed.callback(os.close, log_fd)
            reading, writing = os.pipe()
            passed.callback(os.close, writing)
            variables = {files.NOTIFY_FD_VARIABLE: writing}
            try:
                if self.is_held:
                    self._close_gate()
                    variables[files.GATE_FD_VARIABLE], self._gate_fd = os.pipe()
                    passed.callback(os.close, variables[files.GATE_FD_VARIABLE])
                self.pid = self._spawn(log_fd, variables, is_tried=is_tried)
            except OSError:
                os.close(reading)
                raise
        self._started_at = ProcessIdentity.of(self.pid).started_at
        return reading

    @property
    def is_held(self) -> bool:
        """Return whether the server is on standby: it must not accept connections yet."""
        return bool(self._run.get("held"))

    def serve(self) -> None:
        """Open the start barrier: this server, and every later one, may accept connections."""
        self._run["held"] = False
        self._close_gate()

    def _close_gate(self) -> None:
        if self._gate_fd is not None:
            os.close(self._gate_fd)
            self._gate_fd = None

    def _spawn(self, log_fd: int, variables: dict[str, int], *, is_tried: bool) -> int:
        """Start the server; `variables` name descriptors that it inherits besides its sockets."""
        assert self._listeners  # prepared
        environ = self._run["env"] | {name: str(fd) for name, fd in variables.items()}
        environ[files.LISTEN_FD_VARIABLE] = descriptors_text(self.listener_fds)
        if is_tried and not self._run.get("ordinal"):  # only a launch's first replica is tried
            environ[files.TRIAL_VARIABLE] = "1"
        is_called = self._is_forked and self._run.get("entry")
        title = f"openenvd: host {self._run['replica_id']}" if is_called else None
        fds = (*self.listener_fds, *variables.values())
        return spawn(self._run, environ, log_fd, fds, self.cgroup, title)

    def drain(self, *, is_replaced: bool) -> None:
        """Ask the server alone to begin no sessions, and to exit when the last one has ended."""
        if self.runs:
            assert self.pid is not None
            os.kill(self.pid, signal.SIGUSR2 if is_replaced else signal.SIGUSR1)

    def terminate(self) -> None:
        """Ask the server, and the process group that it leads, to end."""
        self._signal_group(signal.SIGTERM)

    def kill_all(self) -> None:
        """Send SIGKILL to all processes below the shim: group, cgroup, orphans there are by now."""
        if self.cgroup is not None:
            self.cgroup.kill()
        if self.runs:
            self._signal_group(signal.SIGKILL)
        for pid in children_of(os.getpid()):
            # Safe: a child's pid is not reused before we have reaped it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> bool:
        """Reap children that have exited, and set `ended`; return whether any children are left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.ended = status, usage.ru_maxrss * 1024

    def forget(self) -> None:
        """Drop the facts about a process whose exit has been reported."""
        self.pid = self._started_at = self.ended = None

    def remove_cgroup(self) -> None:
        """Remove the cgroup, if no process is left there."""
        if self.cgroup is not None:
            self.cgroup.remove_with_children()


class NotifyPipe:
    """The reading end of a server's notify pipe; each generation has a pipe. Never blocks.

    A line that is not a message, or too long, is dropped.
    """

    def __init__(self, selector: selectors.BaseSelector, on_message: Callable[[], None]) -> None:
        self._selector = selector
        self._on_message = on_message
        self._fd: int | None = None
        self._lines = LineBuffer(MAX_NOTIFY_BYTES)

    def watch(self, fd: int) -> None:
        """Read from a new server's pipe, and own it; close the last server's."""
        self.close()
        os.set_blocking(fd, False)
        self._fd, self._lines = fd, LineBuffer(MAX_NOTIFY_BYTES)
        self._selector.register(fd, selectors.EVENT_READ, self._on_message)

    def messages(self) -> Iterator[ServerReport]:
        """Yield the messages that have arrived; close the pipe at its end."""
        while self._fd is not None:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            for line in self._lines.feed(data):
                try:
                    message = decode_line(line)
                except ValueError:
                    continue
                yield cast("ServerReport", message)
            if not data:
                self.close()

    def close(self) -> None:
        """Close the pipe."""
        if self._fd is not None:
            self._selector.unregister(self._fd)
            os.close(self._fd)
            self._fd = None


def spawn(
    run: RunFileData,
    environ: Mapping[str, str],
    log_fd: int,
    keep_fds: Sequence[int] = (),
    cgroup: Cgroup | None = None,
    title: str | None = None,
) -> int:
    """Start a server in its own session, which is killed when this process exits; return its pid.

    It first enters `cgroup`. If there is a `title`, which `ps` shows, the server's modules are
    imported already: its entry is called, and no program is loaded. The function returns once the
    program has been loaded, or the entry is about to be called. Raises `OSError` with the reason
    of the step that failed.
    """
    argv, cwd, oom_score_adj = run["argv"], run.get("cwd"), run.get("oom_score_adj")
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            die_with_parent(parent)
            if cgroup is not None:
                cgroup.add(os.getpid())
            if oom_score_adj is not None:
                set_oom_score_adj(os.getpid(), oom_score_adj)
            if cwd is not None:
                os.chdir(cwd)
            null = os.open(os.devnull, os.O_RDONLY)
            for fd, standard in ((null, 0), (log_fd, 1), (log_fd, 2)):
                os.dup2(fd, standard)
            for fd in keep_fds:
                os.set_inheritable(fd, True)
            if title is not None:
                _call(run, title, environ, keep_fds)
            _reset_handlers_for_exec()
            os.execvpe(argv[0], argv, dict(environ))  # noqa: S606 (no shell is the point)
        except BaseException as exc:
            _report(writing, exc, argv[0])
        finally:
            os._exit(127)
    os.close(writing)
    try:
        # The pipe ends at `exec`, which closes its writing end.
        failure = os.read(reading, 4096).decode(errors="replace")
    finally:
        os.close(reading)
    if failure:
        os.waitpid(pid, 0)
        number, _, where = failure.partition(" ")
        raise OSError(int(number), os.strerror(int(number)), where)
    return pid


def _reset_handlers_for_exec() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # `exec` would keep a signal ignored


def _call(
    run: RunFileData, title: str, environ: Mapping[str, str], keep_fds: Sequence[int]
) -> Never:
    """Do as `exec` would, and close the pipe on which a failed start is reported."""
    from ...system.process import forking

    forking.reset_signals()
    forking.set_environment(environ, run["argv"])
    set_title(title)
    forking.close_all_but(keep_fds)
    forking.run_and_exit(str(run["entry"]))


def set_title(title: str) -> None:
    """Set the title that `ps` shows; a shim that is a program has no library for that."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title)


def _report(fd: int, exc: BaseException, program: str) -> Never:
    number, where = getattr(exc, "errno", None), getattr(exc, "filename", None)
    os.write(fd, f"{number or errno.EIO} {where or program}".encode()[:4096])
    os._exit(127)
