# SPDX-License-Identifier: Apache-2.0
"""A shim's clients: start a shim, talk to it, clean up after one that was killed.

`connections.py` has the protocol; the daemon speaks it by asyncio streams (`replica_watch.py`).

A shim and its server are two programs of 33 MB each, or forks of one process that has imported all
that both need (`forked.py`). As forks they take 8 MB, the pages that they write, and are ready in
tens of milliseconds. The daemon passes the function that forks, which is its executor's.

A shim is started as a program in these cases:

    there is no such function  outside of the daemon (an agent, a test), and on systems where
                               forking is not safe (macOS)
    the server cannot be       it runs another Python, or a program that is not ours; or variables
    forked (`may_fork`)        that only a program's start reads differ from the daemon's:
                               `--env PYTHONHASHSEED=7`, or a `PYTHONPATH` of the daemon
    the function returns       the forking process was killed or replaced, hangs, cannot import a
    False                      module, has found threads in itself, or no process is left. If it
                               hangs and forks late, the late shim finds the run directory locked
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...system.memory.cgroups import Cgroup
from ...system.net.listening_sockets import descriptors_text
from ...system.process.descriptors import MAX_FDS, descriptors_of, space_for
from ...system.process.process_identity import ProcessIdentity
from ...system.process.tree import stop_tree, wait_until_dead
from ...system.text.json_lines import Json, LineBuffer, decode_line, encode_line
from ...system.text.units import MB
from . import files

if TYPE_CHECKING:
    from ...schema.replica import RunFileData, StatusLine

_RUN_SHIM = Path(__file__).with_name("__main__.py")
_REPLY_TIMEOUT_SECONDS = 10.0
MAX_STATUS_BYTES = 16 * MB
_LINGER_SECONDS = 2.0  # for a shim to exit after its last status
_POLL_SECONDS = 0.01  # between two attempts to remove a cgroup whose processes are exiting
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG")
# `forking.set_environment` applies the first two. An env host flushes each line in any case.
_READ_LATER = ("PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED")
_FORKED_SHIM = f"{__package__}.forked:become_shim"
# The shell starts the program in the background and exits, as the starter may be a short-lived
# worker, or have threads.
_DETACH = '"$@" &'

# Forks a process that calls an entry (`module:function`) with a payload and descriptors; returns
# False when it cannot.
Fork = Callable[[str, Json, Sequence[int]], bool]


class ShimGone(ConnectionError):
    """The connection to a shim ended: it was stopped, or killed."""


def start_shim(
    run_dir: str | os.PathLike[str],
    run_file: RunFileData,
    *,
    listen_fds: Sequence[int] = (),
    fork: Fork | None = None,
) -> None:
    """Write the run file, and start a shim that outlives this process.

    On return the control socket accepts connections, although the shim itself may still be
    starting: the socket is made here and passed on, so no caller waits for a file to appear. The
    caller closes `listen_fds`, the listening sockets, which replicas share. The shim is forked by
    `fork`, if that is possible, and is a program otherwise. Raises `OSError` when a file or the
    socket cannot be made; then nothing has been started.
    """
    folder = Path(run_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The socket first: a reader of the run file that cannot connect takes the shim for dead.
    with files.open_control_socket(run_file["socket_path"]) as control:
        try:
            files.write_json(str(folder / files.RUN_FILE_NAME), run_file, sync=True)
        except BaseException:
            Path(run_file["socket_path"]).unlink(missing_ok=True)
            raise
        fds = [control.fileno(), *listen_fds]
        if fork is not None and may_fork(run_file):
            title = f"openenvd: shim {run_file['replica_id']}"
            log_fd = _open_log(run_file["log_path"])
            try:
                if fork(_FORKED_SHIM, {"run_dir": str(folder), "title": title}, [log_fd, *fds]):
                    return
            finally:
                os.close(log_fd)
        environ = dict(os.environ) | {files.CONTROL_FD_VARIABLE: str(control.fileno())}
        environ[files.LISTEN_FD_VARIABLE] = descriptors_text(listen_fds)  # empty: none
        # Without site-packages it is lighter; elsewhere than on Linux it needs psutil.
        flags = ["-I", "-S"] if sys.platform == "linux" else ["-I"]
        argv = [sys.executable, *flags, str(_RUN_SHIM), str(folder)]
        spawn_detached(argv, environ, pass_fds=fds, log_path=run_file["log_path"])


class ShimClient:
    """A blocking connection to one shim. Used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lines = LineBuffer(MAX_STATUS_BYTES)
        self._unread: deque[bytes] = deque()  # lines that have arrived
        self._fds: list[int] = []
        self._status: StatusLine | None = None
        self._listeners_replies = 0

    @classmethod
    def connect(cls, socket_path: str, timeout: float = 5.0) -> ShimClient:
        """Connect; the shim then sends its status. Raises `ShimGone` when no shim listens."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Not `settimeout`: that makes `connect` fail at once while the shim's backlog is full.
        seconds, fraction = divmod(timeout, 1.0)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            connection.connect(socket_path)
        except OSError as exc:
            connection.close()
            raise ShimGone(f"no shim answers at {socket_path}: {exc.strerror}") from exc
        return cls(connection)

    @property
    def status(self) -> StatusLine:
        """Return the newest status that has arrived; raises `ShimGone` when none arrives."""
        with contextlib.suppress(TimeoutError, ShimGone):
            while True:
                self._receive(0.0 if self._status is not None else _REPLY_TIMEOUT_SECONDS)
        if self._status is None:
            raise ShimGone("the shim sent no status")
        return self._status

    def wait(
        self, predicate: Callable[[StatusLine], bool], timeout: float | None = None
    ) -> StatusLine:
        """Wait for a status for which `predicate` holds, which may be the newest known one.

        Raises `TimeoutError` when none arrives in time, and `ShimGone` when the connection ends.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._status is None or not predicate(self._status):
            self._receive(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._status

    def send(self, op: str, **fields: Any) -> None:
        """Send a request, such as `send("stop", grace_seconds=2.0)`; raises `ShimGone`."""
        try:
            self._socket.settimeout(_REPLY_TIMEOUT_SECONDS)
            self._socket.sendall(encode_line({"op": op, **fields}))
        except OSError as exc:
            raise ShimGone(f"the shim is gone: {exc}") from exc

    def request_listeners(self) -> list[int]:
        """Return descriptors of the server's listening sockets; the caller closes them.

        Raises as `wait` does, and `LookupError` when the shim has none.
        """
        asked, deadline = self._listeners_replies, time.monotonic() + _REPLY_TIMEOUT_SECONDS
        self.send("listeners")
        while self._listeners_replies == asked:
            self._receive(max(0.0, deadline - time.monotonic()))
        if not self._fds:
            raise LookupError("the shim has no listening sockets")
        fds, self._fds = self._fds, []
        return fds

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a message arrives."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> ShimClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, timeout: float | None) -> None:
        """Record the next event, reading from the socket only if none is buffered."""
        if not self._unread:
            self._read(timeout)
        if self._unread:
            event = decode_line(self._unread.popleft())
            if event.get("event") == "status":
                self._status = cast("StatusLine", event)
            elif event.get("event") == "listeners":
                self._listeners_replies += 1

    def _read(self, timeout: float | None) -> None:
        self._socket.settimeout(timeout)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(65536, space_for(MAX_FDS))
        except (BlockingIOError, TimeoutError):
            raise TimeoutError("nothing from the shim in time") from None
        except OSError as exc:
            raise ShimGone(f"the shim is gone: {exc}") from exc
        self._fds += descriptors_of(ancillary)
        if not data:
            raise ShimGone("the shim closed the connection")
        self._unread += self._lines.feed(data)


def read_run_file(run_dir: str | os.PathLike[str]) -> RunFileData | None:
    """Return the replica's run file; None: there is none, or it cannot be read."""
    return cast("RunFileData | None", files.read_json(Path(run_dir) / files.RUN_FILE_NAME))


def read_status_file(run_dir: str | os.PathLike[str]) -> StatusLine | None:
    """Return the last status that the shim wrote; None: it has not written any."""
    return cast("StatusLine | None", files.read_json(Path(run_dir) / files.STATUS_FILE_NAME))


def is_alive(status: StatusLine) -> bool:
    """Return whether the shim that wrote a status is alive."""
    shim = status.get("shim")
    return shim is not None and ProcessIdentity(shim["pid"], shim["started_at"]).is_alive()


def clean_up_after_shim(run_dir: str | os.PathLike[str]) -> None:
    """End the shim and the server of a run directory at once.

    If the shim was killed, the kernel ended its server with it, but perhaps not the processes that
    the server had started. If the shim does not answer, it is ended, too. If it ended in order,
    nothing is left: it had reaped all processes below it before it reported that.
    """
    status = read_status_file(run_dir) or {}
    run = read_run_file(run_dir) or {}
    if "agent" in status or run.get("provider", "local") != "local":
        files.unlink_sockets(run)
        return  # it is on an engine, and has no process that we end
    shim = status.get("shim") or run.get("shim")
    if shim:
        identity = ProcessIdentity(shim["pid"], shim["started_at"])
        if status.get("state") == "stopped" and wait_until_dead([identity], _LINGER_SECONDS):
            return
        stop_tree(identity, grace_seconds=0.0)
    group = status.get("cgroup") or run.get("cgroup")
    cgroup = Cgroup.from_json(group) if group else None
    pid, started_at = status.get("pid"), status.get("pid_started_at")
    if pid is not None and started_at is not None:
        identity = ProcessIdentity(pid, started_at)
        stop_tree(identity, grace_seconds=0.0, cgroup=cgroup)
    if cgroup is not None:
        end_group(cgroup)
    files.unlink_sockets(run)


def end_group(cgroup: Cgroup) -> None:
    """Kill all processes of a cgroup, and remove it, which is possible once they have exited."""
    deadline = time.monotonic() + _LINGER_SECONDS
    cgroup.kill()
    while not cgroup.remove_with_children() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        cgroup.kill()


def spawn_detached(
    argv: Sequence[str], environ: Mapping[str, str], *, pass_fds: Iterable[int], log_path: str
) -> None:
    """Start `argv` in a session of its own, its output appended to `log_path`.

    Raises `OSError` if it cannot be started, and `BlockingIOError` if there is no room for another
    process. An end of the program at once is not noticed here.
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
        # The shell can fail only here, since it does not wait for the program to start.
        why = f"the shell could not fork (exit code {exc.returncode})"
        raise BlockingIOError(errno.EAGAIN, why, argv[0]) from exc
    finally:
        os.close(log_fd)


def _open_log(path: str) -> int:
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return files.open_log(path)


def may_fork(run: RunFileData) -> bool:
    """Return whether a server can be forked: it is a function in our Python, started as we were."""
    return (
        bool(run.get("entry"))
        and run["argv"][0] == sys.executable
        and read_at_start(run["env"]) == read_at_start(os.environ)
    )


def read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only a program's start reads, which a fork cannot change."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_START) and name not in _READ_LATER
    }
