# SPDX-License-Identifier: Apache-2.0
"""The daemon's end of the zygote: starts it, requests workers, reads of their exits.

A client is used once: when its zygote is lost, the supervisor makes another. The messages are
described in `zygote.py`, as is the first zygote of a daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...system.process.descriptors import Message, receive_message, send_message
from ...system.process.proc import lower_fd_limit
from ...system.text.json_lines import Json
from .source import Exited, Forked, Ready, Refused, SourceEvent, Unsafe, worker_environment

if TYPE_CHECKING:
    from .zygote import PreforkedZygote

_DESCRIPTORS_OF_A_FORK = 2  # the pipe and the pidfd


class ZygoteClient:
    """A running zygote, as a `WorkerSource`."""

    def __init__(
        self, process: subprocess.Popen[bytes] | _ForkedProcess, control: socket.socket
    ) -> None:
        control.setblocking(False)
        self._process = process
        self._socket = control

    @classmethod
    def start(cls, *, death_pipe: int, home: str, preload: Sequence[str]) -> ZygoteClient:
        """Start a zygote as a fresh program.

        Raises:
            OSError: it cannot be started.
        """
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
        return cls(_ForkedProcess(zygote.pid), zygote.control)

    @property
    def pid(self) -> int:
        """Return the zygote's pid."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` has events."""
        return self._socket.fileno()

    def request(self, name: str) -> None:
        """Request a worker."""
        # A zygote that is gone is noticed by the end of its socket, and only there.
        with contextlib.suppress(OSError):
            send_message(self._socket, Message({"fork": name}))

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
        self._socket.close()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _ForkedProcess:
    """A child that `os.fork` made, as `subprocess.Popen` shows one; nothing else reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises:
            subprocess.TimeoutExpired: it lives on.
        """
        ended = os.pidfd_open(self.pid)
        try:
            readable, _, _ = select.select([ended], [], [], timeout)
        finally:
            os.close(ended)
        if not readable:
            raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
        return os.waitpid(self.pid, 0)[1]

    def kill(self) -> None:
        """Send SIGKILL; the pid is its own until it has been waited for."""
        os.kill(self.pid, signal.SIGKILL)


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
    if "unsafe" in message:
        return Unsafe(message["unsafe"])
    return Ready(message["ready"])
