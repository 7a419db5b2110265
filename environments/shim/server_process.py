# SPDX-License-Identifier: Apache-2.0
"""The server of a shim as a process: its listening sockets, cgroup, log, pid, and notify pipe.

    prepare    its sockets (kept open across restarts) and a fresh cgroup
    start      forked, with the sockets and the writing end of its notify pipe
    drain      SIGUSR1 to it alone; SIGUSR2 when an update has replaced it
    terminate  SIGTERM to its group
    kill_all   SIGKILL to all that is below the shim: its group, its cgroup, adopted orphans
    reap       all children that have exited

`server.py` calls each when the state machine says so. What the server reports through its pipe, one
JSON object a line, is listed in `schema/protocol.py`.

`fork` and `exec` by hand rather than `subprocess`: that module costs a shim 1.1 MB, and between the
two the child must do more than it offers (die with its parent, enter its cgroup). Safe because the
shim has one thread. Light: a shim imports it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Never, cast

from ...system.memory.cgroups import Cgroup, CgroupManager
from ...system.net.listening_sockets import descriptors_text, listening, open_listening_sockets
from ...system.process.prctl import die_with_parent
from ...system.process.proc import children_of, set_oom_score_adj
from ...system.process.process_identity import ProcessIdentity
from ...system.text.json_lines import LineBuffer, decode_line
from . import files

if TYPE_CHECKING:
    from ...schema.replica import RunFileData, ServerReport, StatusLine

_ENDS_OF_DRAINED = (0, signal.SIGUSR1, signal.SIGUSR2)  # wait statuses
MAX_NOTIFY_BYTES = 256 * 1024  # of one line
_READ_BYTES = 65536


class ServerProcess:
    """One server process at a time, or none."""

    def __init__(self, run: RunFileData, groups: CgroupManager | None, *, is_forked: bool) -> None:
        """`run` is the run file; `is_forked` tells whether the shim was (`forked.py`)."""
        self._run = run
        self._groups = groups
        self._is_forked = is_forked
        self.pid: int | None = None
        self._started_at: float | None = None
        self.ended: tuple[int, int] | None = None  # wait status, most resident bytes
        self.cgroup: Cgroup | None = None
        self._listeners: list[socket.socket] = []
        self._gate_fd: int | None = None  # the writing end; open while the server is to wait

    @property
    def runs(self) -> bool:
        """Whether it was started and has not been reaped."""
        return self.pid is not None and self.ended is None

    @property
    def listener_fds(self) -> tuple[int, ...]:
        """The listening sockets; none when they could not be opened yet."""
        return tuple(one.fileno() for one in self._listeners)

    @property
    def listening_fds(self) -> tuple[int, ...]:
        """Of these, those that a client's connection makes readable: not what guards the port."""
        return tuple(one.fileno() for one in listening(self._listeners))

    def to_json(self) -> StatusLine:
        """Return its part of the status that clients are sent (`connections.py`)."""
        host, port = self._run["host"], self._run["port"]
        if not port and self._listeners:
            port = self._listeners[0].getsockname()[1]  # asked for any; this one was bound
        return {
            "pid": self.pid,
            "pid_started_at": self._started_at,
            "host": host,
            "port": port,
            "cgroup": None if self.cgroup is None else self.cgroup.to_json(),
            "held": self.is_held,
        }

    def prepare(self) -> None:
        """Open its sockets, if need be, and make a cgroup; raises `OSError` if it cannot listen."""
        if not self._listeners:
            inherited = files.inherited_sockets(files.LISTEN_FD_VARIABLE)
            address = self._run["host"], self._run["port"]
            self._listeners = inherited or open_listening_sockets(*address)
            for one in self._listeners:
                one.setblocking(False)
        self.remove_cgroup()  # a fresh one for each server: peak and counters are its own
        self.cgroup = None
        if self._groups is not None:
            with contextlib.suppress(OSError):
                self.cgroup = self._groups.create(
                    self._run["replica_id"], self._run.get("memory_limit_bytes")
                )

    def start(self, *, is_tried: bool) -> int:
        """Start it; return the reading end of its notify pipe, which is the caller's to close.

        When it `is_tried`, it first sees whether an environment can be created at all. Raises
        `OSError` when it could not be started.
        """
        with contextlib.ExitStack() as passed:  # descriptors that are the server's alone
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
        """Whether the server is to accept no connection yet."""
        return bool(self._run.get("held"))

    def serve(self) -> None:
        """Let the server accept connections, and every later one."""
        self._run["held"] = False
        self._close_gate()

    def _close_gate(self) -> None:
        if self._gate_fd is not None:
            os.close(self._gate_fd)
            self._gate_fd = None

    def _spawn(self, log_fd: int, variables: dict[str, int], *, is_tried: bool) -> int:
        """Start it; `variables` name descriptors that it inherits besides its sockets."""
        assert self._listeners  # prepared
        environ = self._run["env"] | {name: str(fd) for name, fd in variables.items()}
        environ[files.LISTEN_FD_VARIABLE] = descriptors_text(self.listener_fds)
        if is_tried and not self._run.get("ordinal"):  # one replica of a launch is enough
            environ[files.TRIAL_VARIABLE] = "1"
        entry = self._run.get("entry") if self._is_forked else None  # else it must be exec'ed
        title = f"openenvd: host {self._run['replica_id']}"
        return spawn(
            self._run["argv"],
            environ,
            cwd=self._run.get("cwd"),
            log_fd=log_fd,
            keep_fds=(*self.listener_fds, *variables.values()),
            cgroup=self.cgroup,
            oom_score_adj=self._run.get("oom_score_adj"),
            fork_into=ForkInto(entry, title) if entry else None,
        )

    @property
    def has_ended_as_drained(self) -> bool:
        """Whether it has exited in order, or by the signal that asks it to let its sessions end.

        The signal ends one that has not begun to accept connections.
        """
        return self.ended is not None and self.ended[0] in _ENDS_OF_DRAINED

    def drain(self, *, is_replaced: bool) -> None:
        """Ask it to begin no session, and to exit when the last has ended."""
        if self.runs:
            assert self.pid is not None
            os.kill(self.pid, signal.SIGUSR2 if is_replaced else signal.SIGUSR1)

    def terminate(self) -> None:
        """Ask it to end; it leads a process group."""
        self._signal_group(signal.SIGTERM)

    def kill_all(self) -> None:
        """Send SIGKILL to everything below us; orphans adopted afterwards need another call."""
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
        """Reap children that have exited; whether any are left. `ended` is set for the server."""
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
        """Forget the process, when all is reported that its pid was needed for."""
        self.pid = self._started_at = self.ended = None

    def remove_cgroup(self) -> None:
        """Remove its cgroup, if no process is left there."""
        if self.cgroup is not None:
            self.cgroup.remove_with_children()


class NotifyPipe:
    """The reading end of a server's notify pipe, one a generation; never blocks.

    A line that is no message, or has no end, is dropped.
    """

    def __init__(self, selector: selectors.BaseSelector, on_message: Callable[[], None]) -> None:
        self._selector = selector
        self._on_message = on_message
        self._fd: int | None = None
        self._lines = LineBuffer(MAX_NOTIFY_BYTES)

    def watch(self, fd: int) -> None:
        """Read from a new server's pipe, which is closed here; the last one's is closed."""
        self.close()
        os.set_blocking(fd, False)
        self._fd, self._lines = fd, LineBuffer(MAX_NOTIFY_BYTES)
        self._selector.register(fd, selectors.EVENT_READ, self._on_message)

    def messages(self) -> Iterator[ServerReport]:
        """Return what has arrived; the end of the pipe closes it."""
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
        """Read no more of this server."""
        if self._fd is not None:
            self._selector.unregister(self._fd)
            os.close(self._fd)
            self._fd = None


class ForkInto(NamedTuple):
    """How a server is called instead of exec'ed: its modules are imported here already."""

    entry: str  # module:function
    title: str  # in `ps`


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: str | None,
    log_fd: int,
    keep_fds: Iterable[int],
    cgroup: Cgroup | None,
    oom_score_adj: int | None,
    fork_into: ForkInto | None = None,
) -> int:
    """Start a program in its own session, which is killed when this process exits.

    It enters `cgroup` first; `fork_into` is called instead of loading the program. Returns its pid,
    once the program has been loaded or is about to be called. Raises `OSError` when it could not be
    started, with the reason of the step that failed.
    """
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
            if fork_into is not None:
                _call(fork_into, argv, environ, keep_fds)
            _reset_handlers_for_exec()
            os.execvpe(argv[0], list(argv), dict(environ))  # noqa: S606 (no shell is the point)
        except BaseException as exc:
            _report(writing, exc, argv[0])
        finally:
            os._exit(127)
    os.close(writing)
    try:
        # The end of the pipe is the moment of `exec`: its writing end closes itself there.
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
        signal.signal(number, signal.SIG_DFL)  # ignoring would survive `exec`


def _call(
    fork_into: ForkInto, argv: Sequence[str], environ: Mapping[str, str], keep_fds: Iterable[int]
) -> Never:
    """Do what `exec` would have done; closes the pipe on which a failed start is reported."""
    from ...system.process import forking

    forking.reset_signals()
    forking.set_environment(environ, argv)
    set_title(fork_into.title)
    forking.close_all_but(keep_fds)
    forking.run_and_exit(fork_into.entry)


def set_title(title: str) -> None:
    """Set what `ps` shows of this process; a shim of its own Python has no library for it."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title)


def _report(fd: int, exc: BaseException, program: str) -> Never:
    number, where = getattr(exc, "errno", None), getattr(exc, "filename", None)
    os.write(fd, f"{number or errno.EIO} {where or program}".encode()[:4096])
    os._exit(127)
