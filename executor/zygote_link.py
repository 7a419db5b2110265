# SPDX-License-Identifier: Apache-2.0
"""The daemon's end of the zygote: starts it, asks it for workers, hears of their deaths.

A link is used once: when its zygote is lost, the supervisor makes another. What the messages say
stands in `zygote.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from .sources import Exited, Forked, Ready, Refused, SourceEvent, worker_environment

_MOST_MESSAGE_BYTES = 65_536
_DESCRIPTORS_OF_A_FORK = 2  # the pipe and the pidfd


class ZygoteLink:
    """A running zygote, as a `WorkerSource`."""

    def __init__(self, *, lifeline: int, home: str, preload: Sequence[str]) -> None:
        self._socket, zygotes_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        config = {
            "control": zygotes_end.fileno(),
            "lifeline": lifeline,
            "home": home,
            "preload": list(preload),
        }
        with zygotes_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "openenvd.executor.zygote", json.dumps(config)],
                pass_fds=(zygotes_end.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=worker_environment(os.environ),
                cwd=home,
                start_new_session=True,  # Ctrl-C at `up --foreground` is the daemon's to handle
            )

    @property
    def pid(self) -> int:
        """The zygote's."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when `read` has something to say."""
        return self._socket.fileno()

    def ask(self, name: str) -> None:
        """Ask for a worker."""
        # A zygote that is gone is noticed by the end of its socket, and only there.
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"fork": name}).encode())

    def read(self) -> list[SourceEvent] | None:
        """What the zygote said; None when it is gone."""
        events: list[SourceEvent] = []
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket,
                    _MOST_MESSAGE_BYTES,
                    _DESCRIPTORS_OF_A_FORK,
                    getattr(socket, "MSG_CMSG_CLOEXEC", 0),
                )
            except BlockingIOError:
                return events
            except OSError:
                data = b""
            if not data:
                return events or None  # the end is read again next time
            events.append(_understand(data, descriptors))

    def noticed_death(self, pid: int) -> None:
        """The zygote reaps its children and tells, unasked."""

    def close(self, grace_seconds: float) -> None:
        """End the zygote; its workers are not its concern."""
        self._socket.close()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _understand(data: bytes, descriptors: list[int]) -> SourceEvent:
    message = json.loads(data)
    if "forked" in message:
        pipe = socket.socket(fileno=descriptors[0])
        pipe.setblocking(False)
        return Forked(message["forked"], message["pid"], pipe, descriptors[1])
    if "refused" in message:
        return Refused(message["refused"], message["error"])
    if "exited" in message:
        return Exited(message["exited"], message["status"], message["peak_bytes"])
    return Ready(message["ready"])
