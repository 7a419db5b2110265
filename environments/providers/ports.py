# SPDX-License-Identifier: Apache-2.0
"""The listening sockets of an environment: bound once, shared by all of its replicas.

A socket that listens *is* the reservation of its port: two launches at once cannot get the same.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from ...system.listening_sockets import open_listening_sockets
from ..errors import PortInUse

if TYPE_CHECKING:
    import psutil  # 1 MB, and only for naming who is in the way

# Below the ephemeral ranges of Linux (32768) and macOS (49152), so that no outgoing connection
# ever takes one of them.
FIRST_PORT = 21000
LAST_PORT = 24999


def open_listeners(host: str, port: int | None) -> list[socket.socket]:
    """Listening TCP sockets on `port`, or on the first free one of the range.

    Raises:
        PortInUse: naming who has it.
        OSError: the address is not this machine's.
    """
    if port is not None:
        listeners = _try_listen(host, port)
        if listeners is None:
            raise _port_in_use(port)
        return listeners
    for candidate in range(FIRST_PORT, LAST_PORT + 1):
        listeners = _try_listen(host, candidate)
        if listeners is not None:
            return listeners
    raise PortInUse(
        f"all ports from {FIRST_PORT} to {LAST_PORT} are in use",
        "take some environments down (openenv down NAME), or choose a port: --port 25000",
    )


def holder_of(port: int) -> psutil.Process | None:
    """The process that listens on a port; None when there is none, or the system does not say."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    for item in connections:
        if item.pid and item.status == psutil.CONN_LISTEN and port in item.laddr[1:2]:
            return _process(item.pid)
    return None


def _try_listen(host: str, port: int) -> list[socket.socket] | None:
    try:
        return open_listening_sockets(host, port)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            return None
        raise


def name_of(process: psutil.Process) -> str:
    """What people know it by."""
    import psutil

    try:
        return process.name()
    except psutil.Error:
        return "a process that has just ended"


def _process(pid: int) -> psutil.Process | None:
    import psutil

    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _port_in_use(port: int) -> PortInUse:
    process = holder_of(port)
    hint = "choose another --port, or leave it out to get a free one"
    if process is None:
        return PortInUse(f"port {port} is in use by a process of another user", hint)
    holder = f"{name_of(process)} (pid {process.pid})"
    return PortInUse(f"port {port} is in use by {holder}", hint, process.pid)
