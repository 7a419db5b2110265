# SPDX-License-Identifier: Apache-2.0
"""Starts workers without a zygote: each is a program of its own, slower and larger.

On macOS a forked process must not touch much of the system's frameworks, so nothing may be
preloaded and forked there. The interface is the zygote's.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import deque

from ...system.memory.pids_limit import why_not_started
from ...system.process.proc import lower_fd_limit
from .source import Exited, Forked, Refused, SourceEvent, worker_environment

_EXIT_SECONDS = 1.0  # from the end of a process's files to its exit


class SubprocessSource:
    """Starts workers as children of the daemon, as a `WorkerSource`."""

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
        for event in self._events:  # started, and never read of
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
                [sys.executable, "-P", "-m", "openenvd.executor.worker.main", json.dumps(config)],
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
