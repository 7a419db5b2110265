# SPDX-License-Identifier: Apache-2.0
"""The keeper: the small parent of one replica's server, which outlives worker and daemon.

    starter ──run file, sockets──▶ keeper ──fork, exec──▶ server (env host) ──▶ its children
                                     ▲  │                    │ notify pipe
    daemon, workers ◀──JSON lines──▶─┘  └── status.json      └── log file (by descriptor)

Started as a program of its own, or forked by the nursery (`nursery.py`); then the server is forked
too, without exec, when the run file names its `entry`.

One thread, one `select`. It starts the server once; whether a dead one is started again is the
daemon's decision (`{"op": "start"}`). It holds the listening socket open across restarts, is the
subreaper of everything below it, and says how the server died.

Wire, one JSON object a line. Keeper to client, on connecting and on every change:

    {"event": "status", "replica_id", "state": "starting|ready|exited|stopping|stopped",
     "pid", "pid_started_at", "generation", "restarts", "ready_at", "host", "port", "sessions",
     "info": {ready line}, "capacity": {as the server told last}, "exit": ExitReason,
     "last_exit": ExitReason, "failed": str, "log_tail": [only when exited], "oom_kills": n,
     "keeper": {pid, started_at}, "cgroup",
     "shard_exits": n, "last_shard_exit": {facts of the server's own child, "reason", "at"}}

`exit` is of the server of this generation, null while it runs; `last_exit` stays. Client to keeper:

    {"op": "start"}                          start the server again; ignored while one runs
    {"op": "stop", "grace_seconds": 5.0}     end everything, say "stopped", exit
    {"op": "listener"}                       answered {"event": "listener"} with the descriptor
    anything else                            answered {"event": "error", "message"}

What happens when

    the server dies         what it left running is killed and collected, then "exited" is said
                            with an `ExitReason`; the listening socket stays open
    it forks orphans        they become our children (subreaper); they end with the server
    it cannot be started    "exited" with `failed` and exit code 127; "start" tries again
    a grandchild is killed  for memory, and the server lives: `oom_kills` moves, nothing else
    the keeper is SIGKILLed the kernel kills the server (PDEATHSIG); clients see the end of the
                            connection; `status.json` says which cgroup and session to sweep
                            (`keeper_link.clean_up_after_keeper`)
    the daemon dies         nothing: no pipe, no session, no cgroup is shared with it
    its home is removed     nobody can reach it any more: as `stop`, some seconds later
    the disk is full        clients are told all the same; `status.json` is tried again later
    a client leaves         in mid line or not, its half line is dropped with it
    a client does not read  it owes one line at most: statuses are whole, so only the newest is kept
    two clients             both hear everything, either may ask
    stop twice              the earlier deadline wins; a stopped keeper is gone
    start while running     nothing
    two keepers             the second finds the lock of the run directory held, and exits
    SIGTERM                 as `stop`; SIGINT and SIGHUP are a terminal's, and ignored

Small on purpose (no dataclasses, pathlib or subprocess: each costs every replica about 1 MB); the
explanation of a death is imported when there is one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from .cgroups import Cgroup, CgroupManager
from .identity import ProcessIdentity
from .keeper_clients import Client, ClientGone
from .keeper_files import (
    is_missing,
    listen,
    lock,
    open_control_socket,
    own,
    remove_if_empty,
    write_json,
)
from .keeper_group import enter_keepers_group, leave_keepers_group
from .log_bound import BUSY_LOOK_SECONDS, keep_newest_half, next_look_seconds
from .oom_evidence import OomCounters, read_oom_counters
from .server_child import (
    ForkInto,
    adopted_children,
    become_subreaper,
    set_own_oom_score_adj,
    spawn,
)
from .signal_pipe import watch_signals
from .tail import last_lines

RUN_FILE_NAME = "replica.json"
STATUS_FILE_NAME = "status.json"

CONTROL_FD_VARIABLE = "OPENENVD_CONTROL_FD"  # the control socket, already listening
# As in `env_host.protocol`, which is too heavy to import here; a test holds them together.
LISTEN_FD_VARIABLE = "OPENENVD_LISTEN_FD"
NOTIFY_FD_VARIABLE = "OPENENVD_NOTIFY_FD"

DEFAULT_GRACE_SECONDS = 5.0
CLEAR_SECONDS = 5.0  # for the killed to be collected; longer only for one stuck in the kernel
LINGER_SECONDS = 1.0  # for clients to take in the last word
LOG_TAIL_LINES = 20
GONE_SECONDS = 1.0  # without its run directory, at two looks, until it is held to be removed
EXIT_CANNOT_START = 127  # as a shell says it
MAX_NOTIFY_LINE_BYTES = 256 * 1024


def encode_line(message: dict[str, Any]) -> bytes:
    """One message of the wire."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """The message that `encode_line` wrote.

    Raises:
        ValueError: when it is not a JSON object.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message


class Keeper:
    """One replica's keeper. `run` returns when everything has been stopped."""

    def __init__(self, run_dir: str, *, is_forked: bool = False) -> None:
        """`is_forked`: by the nursery, with the modules that a server needs imported."""
        self._run_dir = run_dir
        self._is_forked = is_forked
        self._lock_fd = lock(run_dir)
        with open(f"{run_dir}/{RUN_FILE_NAME}", "rb") as file:
            self._run: dict[str, Any] = json.loads(file.read())
        me = ProcessIdentity.of(os.getpid())
        self._keeper = {"pid": me.pid, "started_at": me.started_at}

        self._state = "starting"
        self._generation = 0
        self._pid: int | None = None
        self._pid_started_at: float | None = None
        self._ready_at: float | None = None
        self._sessions = 0
        self._capacity: dict[str, Any] | None = None
        self._info: dict[str, Any] | None = None
        self._failed: str | None = None
        self._exit: dict[str, Any] | None = None
        self._last_exit: dict[str, Any] | None = None
        self._log_tail: list[str] | None = None
        self._shard_exits = 0
        self._last_shard_exit: dict[str, Any] | None = None

        self._started = 0.0  # monotonic
        self._ended: tuple[int, int] | None = None  # wait status, most resident bytes
        self._stopping = False
        self._deadline: float | None = None  # then: kill, or stop waiting for the killed
        self._clearing = False
        self._next_look = 0.0
        self._gone_since: float | None = None  # the run directory
        self._log_size = 0
        self._status_is_written = True
        self._counters: list[OomCounters] = []  # the last two looks, while the server lived

        self._selector = selectors.DefaultSelector()
        self._clients: set[Client] = set()
        self._notify_fd: int | None = None
        self._notify_buffer = b""
        self._listener: socket.socket | None = None
        self._manager: CgroupManager | None = None
        self._entered: tuple[CgroupManager, Cgroup] | None = None
        self._cgroup: Cgroup | None = None

    # The agenda

    def run(self) -> None:
        """Keep the server until asked to stop."""
        self._signal_fd = watch_signals()
        self._watch(self._signal_fd, self._on_signal)
        become_subreaper()
        self._control = self._open_control()
        self._enter_groups()
        self._note_in_run_file()
        self._start()
        while self._state != "stopped":
            self._handle_events(self._seconds_to_wait())
            self._look_when_due()
            self._act_on_deadline()
        self._linger()

    def _handle_events(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()  # must bear it when an earlier event of this round closed what it reads

    def _seconds_to_wait(self) -> float:
        due = self._next_look if self._deadline is None else min(self._next_look, self._deadline)
        return max(0.0, due - time.monotonic())

    def _linger(self) -> None:
        """Let clients take in the last word, those who read."""
        deadline = time.monotonic() + LINGER_SECONDS
        self._selector.unregister(self._control)
        while any(client.owes for client in self._clients) and time.monotonic() < deadline:
            self._handle_events(deadline - time.monotonic())
        for client in list(self._clients):
            self._drop(client)

    # Opening

    def _open_control(self) -> socket.socket:
        if inherited := os.environ.pop(CONTROL_FD_VARIABLE, None):
            control = socket.socket(fileno=own(int(inherited)))
        else:
            control = open_control_socket(self._run["socket_path"])
        control.setblocking(False)
        self._watch(control, self._on_connect)
        return control

    def _enter_groups(self) -> None:
        """Leave the starter's cgroup (a worker's, capped) for one of our own."""
        self._entered = enter_keepers_group()
        self._manager = None if self._entered is None else self._entered[0]

    def _leave_groups(self) -> None:
        if self._cgroup is not None:
            self._cgroup.remove_with_children()
        leave_keepers_group(self._entered)

    def _note_in_run_file(self) -> None:
        with contextlib.suppress(OSError):  # status.json says it too
            write_json(f"{self._run_dir}/{RUN_FILE_NAME}", self._run | {"keeper": self._keeper})

    def _open_listener(self) -> socket.socket:
        if self._listener is None:
            if inherited := os.environ.pop(LISTEN_FD_VARIABLE, None):
                self._listener = socket.socket(fileno=own(int(inherited)))
            else:
                self._listener = listen(self._run["host"], self._run["port"])
            self._listener.setblocking(False)
        return self._listener

    # The server's life

    def _start(self) -> None:
        self._generation += 1
        self._state = "starting"
        self._ready_at = self._info = self._failed = self._exit = self._log_tail = None
        self._capacity = None
        self._sessions = 0
        self._ended = None
        self._clearing = False
        self._started = time.monotonic()
        try:
            self._spawn()
        except OSError as exc:
            self._cannot_start(exc)
        self._look()
        self._tell(durable=True)

    def _spawn(self) -> None:
        listener = self._open_listener()
        log_fd = self._open_log()
        self._open_cgroup()
        # Before it starts: with a tight limit it may be killed before `spawn` has returned.
        self._counters = [read_oom_counters(self._cgroup)]
        reading, writing = os.pipe()
        try:
            environ = self._run["env"] | {
                LISTEN_FD_VARIABLE: str(listener.fileno()),
                NOTIFY_FD_VARIABLE: str(writing),
            }
            self._pid = spawn(
                self._run["argv"],
                environ,
                cwd=self._run.get("cwd"),
                log_fd=log_fd,
                keep_fds=(listener.fileno(), writing),
                cgroup=self._cgroup,
                oom_score_adj=self._run.get("oom_score_adj"),
                fork_into=self._fork_into(),
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
            os.close(log_fd)
        self._pid_started_at = ProcessIdentity.of(self._pid).started_at
        self._watch_notify(reading)

    def _fork_into(self) -> ForkInto | None:
        """How the server is forked from what is imported here; None when it must be exec'ed."""
        entry = self._run.get("entry")
        if not (self._is_forked and entry):
            return None
        return ForkInto(entry, f"openenvd: host {self._run['replica_id']}")

    def _cannot_start(self, exc: OSError) -> None:
        self._failed = f"cannot start: {_why_not(exc)}"
        self._exit = self._last_exit = {
            "kind": "exited",
            "pid": 0,
            "exit_code": EXIT_CANNOT_START,
            "evidence": self._failed,
        }
        self._state = "exited"
        self._pid = self._pid_started_at = None
        self._log_tail = last_lines(self._run["log_path"], LOG_TAIL_LINES)

    def _open_log(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._run["log_path"], flags, 0o600)

    def _open_cgroup(self) -> None:
        """A fresh group for each server, so that peak and counters are its own."""
        if self._cgroup is not None:
            self._cgroup.remove_with_children()
            self._cgroup = None
        if self._manager is not None:
            with contextlib.suppress(OSError):
                self._cgroup = self._manager.create(
                    self._run["replica_id"], self._run.get("memory_limit_bytes")
                )

    def _stop(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL at the deadline; a second call can only shorten the grace."""
        deadline = time.monotonic() + max(0.0, grace_seconds)
        if self._stopping:
            self._deadline = min(deadline, self._deadline or deadline)
            return
        self._stopping = True
        if self._pid is None:
            self._settle()
            return
        self._state = "stopping"
        self._deadline = deadline
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGTERM)
        self._tell(durable=True)

    def _act_on_deadline(self) -> None:
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        if self._clearing:  # somebody is stuck in the kernel; do not keep silent about the rest
            self._settle()
        else:
            self._kill_all()

    def _kill_all(self) -> None:
        """SIGKILL everything below us; `_reap` goes on until all of it has been collected."""
        self._clearing = True
        self._deadline = time.monotonic() + CLEAR_SECONDS
        if self._cgroup is not None:
            self._cgroup.kill()
        if self._pid is not None and self._ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        for pid in adopted_children():
            # Safe: a child's pid is not given away before we have collected it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect the dead. The server's death ends whatever it left behind."""
        has_children = True
        while has_children:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                has_children = False
                continue
            if pid == 0:
                break
            if pid == self._pid:
                self._ended = status, usage.ru_maxrss * 1024
        if self._ended is None:
            return
        if has_children:
            self._kill_all()  # their own children come to us next, with another SIGCHLD
        else:
            self._settle()

    def _settle(self) -> None:
        """Nothing of the server is left (or nothing that can be ended): say how it died."""
        self._deadline = None
        self._clearing = False
        if self._pid is not None:
            self._read_notify()
            self._close_notify()
            self._exit = self._last_exit = self._explain()
            self._bound_log()  # nobody will look at it again
            self._log_tail = last_lines(self._run["log_path"], LOG_TAIL_LINES)
            self._pid = self._pid_started_at = self._ended = None
        self._state = "exited"
        if self._stopping:
            self._say_goodbye()
        self._tell(durable=True)

    def _say_goodbye(self) -> None:
        self._state = "stopped"
        with contextlib.suppress(OSError):
            os.unlink(self._run["socket_path"])  # noqa: PTH108
        if self._gone_since is not None:  # no daemon will come and see to it
            remove_if_empty(os.path.dirname(self._run["socket_path"]))  # noqa: PTH120
        self._leave_groups()

    def _explain(self) -> dict[str, Any]:
        """The `ExitReason` as JSON; bare facts when our modules are gone (upgraded meanwhile)."""
        status, most_resident_bytes = self._ended or (None, None)
        pid = self._pid or 0
        peak = self._cgroup.peak_bytes() if self._cgroup is not None else None
        try:
            from .explain import evidence_after, explain_exit

            evidence = evidence_after(
                self._counters[0], self._cgroup, pid, since_monotonic=self._started
            )
            reason = explain_exit(
                status,
                pid=pid,
                stopped_by_us=self._stopping,
                peak_bytes=peak or most_resident_bytes,
                limit_bytes=self._run.get("memory_limit_bytes"),
                memory_error=(self._failed or "").startswith("MemoryError"),
                seconds=time.monotonic() - self._started,
                **evidence,
            )
            return reason.to_json()
        except Exception as exc:  # keeping the replica matters more than explaining its past
            print(f"keeper: cannot explain an exit: {exc!r}", file=sys.stderr)  # noqa: T201
            return _bare_exit(pid, status)

    # Looking round now and then

    def _look_when_due(self) -> None:
        if time.monotonic() >= self._next_look:
            self._look()

    def _look(self) -> None:
        """Bound the log, note the counters, write what could not be written before; and end, when
        the home was removed.
        """
        before, size = self._log_size, self._bound_log()
        seconds = next_look_seconds(size, size - before, self._run["max_log_bytes"])
        if self._state == "starting":  # when most is printed, and what loops prints without end
            seconds = BUSY_LOOK_SECONDS
        self._log_size = size
        if self._stop_if_removed():
            seconds = min(seconds, GONE_SECONDS)
        self._next_look = time.monotonic() + seconds
        if self._pid is not None and self._ended is None:
            self._note_counters()
        if not self._status_is_written:
            self._write_status()

    def _stop_if_removed(self) -> bool:
        """Whether the run directory is missing; when it was so before, nobody will ever ask for us
        again.
        """
        now = time.monotonic()
        if not is_missing(self._run_dir):
            self._gone_since = None
            return False
        if self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since >= GONE_SECONDS and not self._stopping:
            self._stop(DEFAULT_GRACE_SECONDS)
        return True

    def _note_counters(self) -> None:
        """What had happened before the server died must not be held to be its death.

        The last but one look is kept too: a kill is counted before its victim is dead.
        """
        counters = read_oom_counters(self._cgroup)
        moved = bool(self._counters) and counters.oom_kills != self._counters[-1].oom_kills
        self._counters = [*self._counters[-1:], counters]
        if moved:
            self._tell()

    def _bound_log(self) -> int:
        path, limit = self._run["log_path"], self._run["max_log_bytes"]
        try:
            size = os.stat(path).st_size  # noqa: PTH116
            return keep_newest_half(path, limit) if size > limit else size
        except OSError:
            return 0

    # Events

    def _on_signal(self) -> None:
        numbers = os.read(self._signal_fd, 4096)
        if signal.SIGTERM in numbers:
            self._stop(DEFAULT_GRACE_SECONDS)
        if signal.SIGCHLD in numbers:
            self._reap()

    def _on_connect(self) -> None:
        try:
            connection, _ = self._control.accept()
        except OSError:
            return  # it left before it was let in
        client = Client(connection, self._status_line)
        self._clients.add(client)
        self._watch(connection, lambda: self._serve(client))
        client.owe_status()
        self._flush(client)

    def _serve(self, client: Client) -> None:
        if client not in self._clients:
            return  # dropped earlier in this round
        try:
            for line in client.read_lines():
                self._answer(client, line)
        except ClientGone:
            self._drop(client)
            return
        self._flush(client)

    def _answer(self, client: Client, line: bytes) -> None:
        try:
            message = decode_line(line)
            op, grace = message.get("op"), float(message.get("grace_seconds", 0.0))
        except (ValueError, TypeError) as exc:
            client.owe(encode_line({"event": "error", "message": f"not a message: {exc}"}))
            return
        match op:
            case "start":
                if self._state == "exited" and not self._stopping:
                    self._start()
            case "stop":
                self._stop(grace if "grace_seconds" in message else DEFAULT_GRACE_SECONDS)
            case "listener":
                fd = None if self._listener is None else self._listener.fileno()
                client.owe(encode_line({"event": "listener"}), fd)
            case _:
                client.owe(encode_line({"event": "error", "message": f"unknown op: {op!r}"}))

    def _watch_notify(self, fd: int) -> None:
        self._close_notify()
        os.set_blocking(fd, False)
        self._notify_fd, self._notify_buffer = fd, b""
        self._watch(fd, self._on_notify)

    def _on_notify(self) -> None:
        state = self._state
        if not self._read_notify():
            self._close_notify()
        self._tell(durable=self._state != state or self._failed is not None)

    def _read_notify(self) -> bool:
        """Take in what the server has said; False at the end of it."""
        while self._notify_fd is not None:
            try:
                data = os.read(self._notify_fd, 65536)
            except BlockingIOError:
                return True
            *lines, rest = (self._notify_buffer + data).split(b"\n")
            self._notify_buffer = rest if len(rest) <= MAX_NOTIFY_LINE_BYTES else b""
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._note(decode_line(line))
            if not data:
                return False
        return False

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("ready"):
            self._info = message
            self._ready_at = time.time()
            if self._state == "starting":
                self._state = "ready"
        if "sessions" in message:
            self._sessions = message["sessions"]
        if "failed" in message:
            self._failed = str(message["failed"])
        if "capacity" in message:
            self._capacity = message["capacity"]
        if "shard_exit" in message:
            self._note_shard_exit(message["shard_exit"])

    def _note_shard_exit(self, facts: dict[str, Any]) -> None:
        self._shard_exits += 1
        self._last_shard_exit = facts
        before, limit = self._counters[0], self._run.get("memory_limit_bytes")
        try:
            from .shard_exits import told_of_shard

            told = told_of_shard(facts, before, self._cgroup, limit, self._started)
            self._last_shard_exit = told
        except Exception as exc:
            print(f"keeper: cannot explain a shard's exit: {exc!r}", file=sys.stderr)  # noqa: T201
        self._counters = [read_oom_counters(self._cgroup)]  # what it died of is no later one's

    def _close_notify(self) -> None:
        if self._notify_fd is not None:
            self._selector.unregister(self._notify_fd)
            os.close(self._notify_fd)
            self._notify_fd = None

    # Telling

    def _tell(self, *, durable: bool = False) -> None:
        """Tell every client; `durable` writes the status file as well."""
        if durable:
            self._write_status()
        for client in list(self._clients):
            client.owe_status()
            self._flush(client)

    def _flush(self, client: Client) -> None:
        if client not in self._clients:
            return
        try:
            client.send()
        except ClientGone:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.owes else 0)
        key = self._selector.get_key(client.connection)
        if key.events != events:
            self._selector.modify(client.connection, events, key.data)

    def _drop(self, client: Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()

    def _write_status(self) -> None:
        try:
            write_json(f"{self._run_dir}/{STATUS_FILE_NAME}", self._status())
            self._status_is_written = True
        except OSError:
            self._status_is_written = False

    def _status_line(self) -> bytes:
        return encode_line(self._status())

    def _status(self) -> dict[str, Any]:
        host, port = self._address()
        status = {
            "event": "status",
            "replica_id": self._run["replica_id"],
            "state": self._state,
            "pid": self._pid,
            "pid_started_at": self._pid_started_at,
            "generation": self._generation,
            "restarts": max(0, self._generation - 1),
            "ready_at": self._ready_at,
            "host": host,
            "port": port,
            "sessions": self._sessions if self._pid is not None else 0,
            "info": self._info,
            "capacity": self._capacity if self._pid is not None else None,
            "exit": self._exit,
            "last_exit": self._last_exit,
            "failed": self._failed,
            "oom_kills": self._counters[-1].oom_kills if self._counters else None,
            "shard_exits": self._shard_exits,
            "last_shard_exit": self._last_shard_exit,
            "keeper": self._keeper,
            "cgroup": None if self._cgroup is None else self._cgroup.to_json(),
        }
        if self._log_tail is not None:
            status["log_tail"] = self._log_tail
        return status

    def _address(self) -> tuple[str, int]:
        """The port that was really bound, when the run file asked for any (0)."""
        host, port = self._run["host"], self._run["port"]
        if not port and self._listener is not None:
            port = self._listener.getsockname()[1]
        return host, port

    def _watch(self, what: int | socket.socket, callback: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, callback)


def _why_not(exc: OSError) -> str:
    if exc.errno == errno.EAGAIN:
        with contextlib.suppress(Exception):  # our modules may be gone, or no descriptor left
            from .process_room import no_room_text

            return no_room_text()
    where = f": {exc.filename}" if exc.filename else ""
    return f"{exc.strerror}{where}"


def _bare_exit(pid: int, status: int | None) -> dict[str, Any]:
    if status is None:
        return {"kind": "lost", "pid": pid}
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return {"kind": "signaled", "pid": pid, "signal_number": -code}
    return {"kind": "exited", "pid": pid, "exit_code": code}


def main() -> None:
    """`python -m openenvd.processes.keeper <run_dir>` (`run_keeper.py` is the lighter way in)."""
    with contextlib.suppress(PermissionError):  # we lead a group, as a service manager's child
        os.setsid()
    keep(sys.argv[1])


def keep(run_dir: str, *, is_forked: bool = False) -> None:
    """Be the keeper of `run_dir`, in a session of our own."""
    # Raised in the worker that started us, which the kernel is to kill first. A replica without
    # its keeper is lost, so the keeper goes last.
    set_own_oom_score_adj(0)
    try:
        keeper = Keeper(run_dir, is_forked=is_forked)
    except BlockingIOError:
        sys.exit(f"keeper: another keeper has {run_dir}")
    keeper.run()


if __name__ == "__main__":
    main()
