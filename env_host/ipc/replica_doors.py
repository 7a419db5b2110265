# SPDX-License-Identifier: Apache-2.0
"""`ReplicaDoors`: passes connections between the replicas of one address.

All replicas of an environment accept from the same sockets, so a connection for a session may be
accepted by a replica that does not have it. A session's id names its replica
(`shard/request_head.py`), and each replica has a *door*, a Unix socket in a private folder:

    shard of replica a ──descriptor, and the bytes read──▶ door of b ──▶ lobby of b

    b has exited or is starting    nothing listens at its door: its sessions are unknown
    b exits before it has looked   the connection is reset
    b is slow                      few messages fit into a door (`net.unix.max_dgram_qlen`): a tries
                                   again until they do
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from ...system.descriptors import Message, close_all, send_message
from .fd_messages import connection_message

RETRY_SECONDS = 0.005  # until a message that did not fit is sent again


class ReplicaDoors:
    """The doors of all replicas of one address; none where there is one replica."""

    def __init__(self, folder: str, names: Sequence[str], own: int) -> None:
        self._paths = [Path(folder) / name for name in names]
        self._own = own

    def open(self) -> socket.socket | None:
        """Open the door of this replica; None when it needs none. Raises `OSError`."""
        if not self._paths:
            return None
        path = self._paths[self._own]
        path.unlink(missing_ok=True)  # of a server that was killed
        door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        door.bind(os.fspath(path))
        path.chmod(0o600)
        door.setblocking(False)
        return door

    def has(self, replica: int) -> bool:
        """Tell whether another replica can be passed a connection."""
        if replica == self._own or replica >= len(self._paths):
            return False
        end = self._connect(replica)
        if end is not None:
            end.close()
        return end is not None

    def pass_on(self, replica: int, fd: int, since: int, data: bytes = b"") -> None:
        """Pass a connection to another replica, and close it here. Within a running loop.

        Args:
            replica: The number of the other one.
            fd: The descriptor of the connection.
            since: When it began to wait, on the scoreboard's clock.
            data: What has been read of it.
        """
        try:
            message = connection_message({"since": since}, (fd,), data)
        except OSError:
            os.close(fd)
        else:
            self._send(replica, message)

    def _send(self, replica: int, message: Message) -> None:
        end = self._connect(replica)
        if end is not None and not _is_sent(end, message):
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._send, replica, message)
        else:
            close_all(message.fds)

    def _connect(self, replica: int) -> socket.socket | None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        end.setblocking(False)
        try:
            end.connect(os.fspath(self._paths[replica]))
        except OSError:
            end.close()
            return None
        return end


def _is_sent(end: socket.socket, message: Message) -> bool:
    """Send and close; False when it does not fit now. That nobody listens any more is no matter."""
    with end:
        try:
            return send_message(end, message)
        except OSError:
            return True
