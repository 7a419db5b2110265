# SPDX-License-Identifier: Apache-2.0
"""The sources of workers, as the daemon sees them: the zygote, and its fallback.

Workers are requested of a source, which reports through one readable descriptor that they have
started and exited. It is used by the supervisor thread alone, and never blocks it for longer than
starting a program.

`ZygoteClient` is used once: when its zygote is lost, the supervisor makes another. The messages are
described in `zygote.py`, as is the first zygote of a daemon.

`SubprocessSource` starts each worker as a program of its own, slower and larger. On macOS a forked
process must not touch much of the system's frameworks, so nothing may be preloaded and forked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ...system.memory.limits import why_not_started
from ...system.process.descriptors import Message, receive_message, send_message
from ...system.process.proc import lower_fd_limit
from ...system.text.json_lines import Json

if TYPE_CHECKING:
    from .zygote import PreforkedZygote

log = logging.getLogger(__name__)

FORK_IS_SAFE = sys.platform == "linux"

# Numeric libraries start a thread per core in every process that imports them: forty workers were
# seen to make 1,805 threads. Read when a library is loaded, so set before the first import.
THREAD_CAPS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Names the caps that we set and the user did not, so that an operation can take them out of the
# environment of what it starts for good (a replica may use all cores).
THREAD_CAPS_VARIABLE = "OPENENVD_THREAD_CAPS"

_PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2  # linux/pidfd.h, since 6.9


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker has started. Its `sentinel`, if the system has one, is readable once it exits."""

    name: str
    pid: int
    pipe: socket.socket
    sentinel: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The system would not start a worker."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker was reaped; `status` as of wait(2)."""

    pid: int
    status: int
    peak_bytes: int | None
    was_alone: bool = False  # it certainly had no child that a kill could have hit instead


@dataclass(frozen=True, slots=True)
class Unsafe:
    """The source has more threads than one, and must not fork; it ends."""

    threads: int


SourceEvent = Forked | Refused | Exited | Unsafe


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the thread caps that it does not set itself."""
    added = {name: value for name, value in THREAD_CAPS.items() if name not in environ}
    return {**environ, **added, THREAD_CAPS_VARIABLE: ",".join(added)}


def signal_group(leader: int, sentinel: int | None, number: signal.Signals) -> bool:
    """Signal a worker's whole process group; False when no process of it is left.

    By pidfd the signal can only reach that very group, even after the leader was reaped.
    """
    try:
        _signal_group(leader, sentinel, number)
    except ProcessLookupError:
        try:  # it has exited, or has just started and leads no group yet
            if sentinel is not None and sys.platform == "linux":
                signal.pidfd_send_signal(sentinel, number)
            else:
                os.kill(leader, number)
        except ProcessLookupError:
            return False
    return True


def _signal_group(leader: int, sentinel: int | None, number: signal.Signals) -> None:
    if sentinel is None or sys.platform != "linux":
        os.killpg(leader, number)
        return
    try:
        signal.pidfd_send_signal(sentinel, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except ProcessLookupError:
        raise
    except OSError:  # an older kernel: make sure of the leader, then signal its group by number
        signal.pidfd_send_signal(sentinel, 0)
        os.killpg(leader, number)


_DESCRIPTORS_OF_A_FORK = 2  # the pipe and the pidfd


class ZygoteClient:
    """A running zygote."""

    def __init__(
        self, process: subprocess.Popen[bytes] | psutil.Process, control: socket.socket
    ) -> None:
        control.setblocking(False)
        self._process = process
        self._socket = control
        self._lock = threading.Lock()  # over sending and closing, which other threads do too

    @classmethod
    def start(cls, *, death_pipe: int, home: str, preload: Sequence[str]) -> ZygoteClient:
        """Start a zygote as a fresh program."""
        ours, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "control": zygotes.fileno(),
            "death_pipe": death_pipe,
            "home": home,
            "preload": list(preload),
        }
        with zygotes:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}.zygote", json.dumps(config)],
                pass_fds=(zygotes.fileno(), death_pipe),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=worker_environment(os.environ),
                cwd=home,
                start_new_session=True,  # Ctrl-C at `up --foreground` is the daemon's to handle
            )
        lower_fd_limit(process.pid)
        return cls(process, ours)

    @classmethod
    def adopt(cls, zygote: PreforkedZygote) -> ZygoteClient:
        """Take over the zygote that was forked before there was an executor."""
        return cls(psutil.Process(zygote.pid), zygote.control)

    @property
    def pid(self) -> int:
        """Return the zygote's pid."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` has events."""
        return self._socket.fileno()

    def request(self, name: str) -> None:
        """Request a worker; `Forked` or `Refused` follows, unless the zygote is lost."""
        # A zygote that is gone is noticed by the end of its socket, and only there.
        with contextlib.suppress(OSError):
            send_message(self._socket, Message({"fork": name}))

    def fork(self, entry: str, payload: Json, fds: Sequence[int], timeout: float) -> bool:
        """Fork a process that calls `entry`; False when that was not possible. Any thread.

        A zygote that is silent for `timeout` seconds is killed, which the supervisor notices.
        """
        ours, zygotes = socket.socketpair()
        with ours:
            try:
                with zygotes, self._lock:
                    head = {"call": entry, "payload": payload}
                    send_message(self._socket, Message(head, fds=(zygotes.fileno(), *fds)))
                ours.settimeout(timeout)
                answer = ours.recv(4096).decode() or "the zygote has ended, or reads nothing"
            except TimeoutError:
                answer = f"the zygote has not answered for {timeout:.0f} s"
                with contextlib.suppress(psutil.Error):  # it has ended
                    self._process.kill()
            except OSError as exc:  # it has ended
                answer = str(exc)
        if answer != "forked":
            log.warning("no process was forked for %s: %s", entry, answer)
        return answer == "forked"

    def read(self) -> list[SourceEvent] | None:
        """Return what the zygote reported; None when it is gone."""
        events: list[SourceEvent] = []
        while True:
            try:
                message = receive_message(self._socket, most_fds=_DESCRIPTORS_OF_A_FORK)
            except EOFError:
                return events or None  # the end is read again next time
            if message is None:
                return events
            events.append(_parse(message.head, message.fds))

    def noticed_exit(self, pid: int) -> None:
        """Do nothing: the zygote reaps its children and reports by itself."""

    def close(self, grace_seconds: float) -> None:
        """End the zygote; its workers continue."""
        with self._lock:
            self._socket.close()
        try:
            self._process.wait(grace_seconds)
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def _parse(message: Json, descriptors: Sequence[int]) -> SourceEvent:
    if "forked" in message:
        pipe = socket.socket(fileno=descriptors[0])
        pipe.setblocking(False)
        return Forked(message["forked"], message["pid"], pipe, descriptors[1])
    if "refused" in message:
        return Refused(message["refused"], message["error"])
    if "exited" in message:
        return Exited(
            message["exited"], message["status"], message["peak_bytes"], message["was_alone"]
        )
    return Unsafe(message["unsafe"])


_EXIT_SECONDS = 1.0  # from the end of a process's files to its exit


class SubprocessSource:
    """Starts workers as children of the daemon."""

    def __init__(self, *, death_pipe: int, home: str) -> None:
        self._death_pipe = death_pipe
        self._home = home
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._events: deque[SourceEvent] = deque()
        self._wake_reading, self._wake_writing = socket.socketpair()
        self._wake_reading.setblocking(False)

    @property
    def pid(self) -> None:
        """Return None: there is no zygote."""
        return None

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` has events."""
        return self._wake_reading.fileno()

    def request(self, name: str) -> None:
        """Start a worker."""
        try:
            self._report(self._start(name))
        except OSError as exc:
            self._report(Refused(name, why_not_started(exc)))

    def fork(self, entry: str, payload: Json, fds: Sequence[int], timeout: float) -> bool:
        """Return False: there is no process that may fork."""
        return False

    def read(self) -> list[SourceEvent] | None:
        """Return what has happened since."""
        self._wake_reading.recv(4096)
        events = list(self._events)
        self._events.clear()
        return events

    def noticed_exit(self, pid: int) -> None:
        """Reap the worker, and report its status."""
        child = self._children.get(pid)
        if child is None:
            return
        try:
            code = child.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its pipe and lives
            return
        del self._children[pid]
        self._report(Exited(pid, -code if code < 0 else code << 8, None))

    def close(self, grace_seconds: float) -> None:
        """Kill the workers that are left."""
        for child in self._children.values():
            child.kill()
            child.wait()
        self._children.clear()
        for event in self._events:  # workers that were started, whose event was not read
            if isinstance(event, Forked):
                event.pipe.close()
                if event.sentinel is not None:
                    os.close(event.sentinel)
        self._events.clear()
        self._wake_reading.close()
        self._wake_writing.close()

    def _start(self, name: str) -> Forked:
        ours, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        config = {
            "name": name,
            "pipe": workers.fileno(),
            "death_pipe": self._death_pipe,
            "home": self._home,
        }
        with workers:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "openenvd.executor.worker", json.dumps(config)],
                pass_fds=(workers.fileno(), self._death_pipe),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=worker_environment(os.environ),
                cwd=self._home,
            )
        lower_fd_limit(child.pid)
        self._children[child.pid] = child
        ours.setblocking(False)
        sentinel = os.pidfd_open(child.pid) if sys.platform == "linux" else None
        return Forked(name, child.pid, ours, sentinel)

    def _report(self, event: SourceEvent) -> None:
        self._events.append(event)
        self._wake_writing.send(b"!")


WorkerSource = ZygoteClient | SubprocessSource
SourceFactory = Callable[[bool, bool], WorkerSource]  # called with may_preload, may_fork
