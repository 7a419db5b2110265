# SPDX-License-Identifier: Apache-2.0
"""Forks env hosts from one process that has imported them, as shims of the daemon's zygote do.

    fork ──(variables, folder, descriptors)──▶ zygote ──fork──▶ ──fork──▶ host
     ◀──────────────── the host's pid ────────────┘        exits

The import takes nine tenths of the processor time of a host's start. As the process between exits,
the host becomes a child of the process that asked for it.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from openenvd.system.process import forking
from openenvd.system.process.descriptors import Message, receive_message, send_message
from openenvd.system.process.prctl import adopt_orphans

_ENVIRON = dict(os.environ)  # a test's home would count the process among those that it has to end


class Child(subprocess.Popen[bytes]):
    """A child that `subprocess` has not started."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args, self.returncode = pid, "a forked host", None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


class Zygote:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turns = threading.Lock()
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=_ENVIRON, pass_fds=(theirs.fileno(),))

    def fork(
        self, argv: Sequence[str], environ: Mapping[str, str], doors: Mapping[str, int],
        log: BinaryIO, folder: Path,
    ) -> Child:  # fmt: skip
        """Start a host; `doors` are its descriptors, each by the variable that names it."""
        head = {"argv": argv, "environ": environ, "doors": [*doors], "folder": str(folder)}
        with self._turns, contextlib.ExitStack() as stack:
            adopt_orphans()
            stack.callback(adopt_orphans, False)
            send_message(self._control, Message(head, fds=(log.fileno(), *doors.values())))
            pid = int(self._control.recv(64))
            self._control.recv(64)  # the process between has exited
        return Child(pid)


@cache
def zygote() -> Zygote:
    return Zygote()


def _serve(control: socket.socket) -> None:
    """Fork until the other process has ended, which raises `EOFError`."""
    while (request := receive_message(control)) is not None:
        if os.fork() == 0:
            if (pid := os.fork()) == 0:
                _become_host(request.head, *request.fds)
            control.send(str(pid).encode())
            os._exit(0)
        os.wait()
        for fd in request.fds:
            os.close(fd)
        control.send(b"exited")


def _become_host(asked: dict[str, Any], log_fd: int, *fds: int) -> None:
    os.chdir(asked["folder"])
    forking.write_output_to(log_fd)
    forking.close_all_but(fds)
    forking.tell_libraries()
    doors = dict(zip(asked["doors"], map(str, fds), strict=True))
    forking.set_environment(asked["environ"] | doors, asked["argv"])
    forking.reset_signals()
    forking.run_and_exit("openenvd.env_host.main:main")


if __name__ == "__main__":
    forking.preload(["openenvd.environments.shim.forked"])
    with contextlib.suppress(EOFError):
        _serve(socket.socket(fileno=int(sys.argv[1])))
