# SPDX-License-Identifier: Apache-2.0
"""The program that becomes Envoy: `start_envoy.py ENVOY BOOTSTRAP ADMIN_SOCKET THREADS`.

    shim ──fork, exec──▶ this program ──exec──▶ Envoy
                              └─fork twice─▶ announcer ──"is the listener there?"──▶ Envoy
                                                 └──{"ready": true}──▶ the shim's notify pipe

Envoy does not write to notify pipes, and a process between Envoy and the shim would cost memory as
long as Envoy runs. So a short-lived process waits for the listener; the shim adopts and reaps it.

It imports the standard library alone, as a program of its own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time

READY_SECONDS = 30.0
POLL_SECONDS = 0.01
LISTENER = b"gateway::"


def main(envoy: str, bootstrap: str, admin_socket: str, threads: str) -> None:
    """Replace this process by Envoy."""
    notify_fd = int(os.environ.pop("OPENENVD_NOTIFY_FD"))
    # The inherited sockets only reserve the port; Envoy opens its own.
    for fd in (os.environ.pop("OPENENVD_LISTEN_FD", "")).split(","):
        if fd:
            os.close(int(fd))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # two descriptors a session
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError):
        os.unlink(admin_socket)  # noqa: PTH108  of an Envoy that was killed
    pid = os.getpid()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            _announce(pid, notify_fd, admin_socket)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(notify_fd)
    options = ["--concurrency", threads, "--log-level", "warning", "--disable-hot-restart"]
    os.execv(envoy, ["openenvd: gateway", "-c", bootstrap, *options])  # noqa: S606  no shell is the point


def _announce(pid: int, notify_fd: int, admin_socket: str) -> None:
    """Report to the shim when Envoy listens; end Envoy if it does not in time."""
    deadline = time.monotonic() + READY_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)  # raises once Envoy has ended
            if _listens(admin_socket):
                os.write(notify_fd, b'{"ready": true}\n')
                return
            time.sleep(POLL_SECONDS)
        os.write(notify_fd, b'{"failed": "Envoy does not listen; its log says why"}\n')
        os.kill(pid, signal.SIGTERM)


def _listens(admin_socket: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(admin_socket)
        connection.sendall(b"GET /listeners HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n")
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return LISTENER in answer
    return False


if __name__ == "__main__":
    main(*sys.argv[1:5])
