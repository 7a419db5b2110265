# SPDX-License-Identifier: Apache-2.0
"""`ReplicaDoors`: passes connections between the replicas of one address.

All replicas of an environment accept from the same sockets, so a connection for a session may be
accepted by a replica that does not have it. A session's id names its replica
(`shard/arrivals.py`), and each replica has a *door*, a Unix socket in a private folder, which
is found by the replica's number:

    shard of replica a ──descriptor, and the bytes read──▶ door of b ──▶ lobby of b
    whoever scales ──how many sessions are its share──▶ door of b

    b has exited or is starting    nothing listens at its door: its sessions are unknown
    b exits before it has looked   the connection is reset
    b is slow                      few messages fit into a door (`net.unix.max_dgram_qlen`): a tries
                                   again until they do
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from pathlib import Path

from ...schema.protocol import door_path
from ...system.process.descriptors import Message, close_all, send_message
from .fd_messages import connection_message

RETRY_SECONDS = 0.005  # until a message that did not fit is sent again


class ReplicaDoors:
    """The doors of all replicas of one address; none of a server that nobody launched."""

    def __init__(self, prefix: str, own: int) -> None:
        self._prefix = prefix
        self._own = own

    def open(self) -> socket.socket | None:
        """Open the door of this replica; None when it needs none. Raises `OSError`."""
        if not self._prefix:
            return None
        path = Path(door_path(self._prefix, self._own))
        path.unlink(missing_ok=True)  # of a server that was killed
        door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        door.bind(os.fspath(path))
        path.chmod(0o600)
        door.setblocking(False)
        return door

    def has(self, replica: int) -> bool:
        """Tell whether another replica can be passed a connection."""
        end = self._connect(replica) if self._prefix and replica != self._own else None
        if end is not None:
            end.close()
        return end is not None

    def are_several(self) -> bool:
        """Tell whether this address has, or had until now, other replicas."""
        prefix = Path(self._prefix)
        found = prefix.parent.glob(f"{prefix.name}*.door")
        return len(list(itertools.islice(found, 2))) > 1

    def pass_on(self, replica: int, fd: int, since: int, data: bytes = b"") -> None:
        """Pass a connection to another replica, and close it here. Within a running loop.

        It has waited since `since`, on the scoreboard's clock; `data` has been read of it.
        """
        try:
            message = connection_message({"since": since}, (fd,), data)
        except OSError:
            os.close(fd)
        else:
            self._send(replica, message)

    def _send(self, replica: int, message: Message) -> None:
        if (end := self._connect(replica)) is not None:
            with end, contextlib.suppress(OSError):  # that nobody listens any more is no matter
                if not send_message(end, message):
                    loop = asyncio.get_running_loop()
                    loop.call_later(RETRY_SECONDS, self._send, replica, message)
                    return
        close_all(message.fds)

    def _connect(self, replica: int) -> socket.socket | None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        end.setblocking(False)
        try:
            end.connect(door_path(self._prefix, replica))
        except OSError:
            end.close()
            return None
        return end
