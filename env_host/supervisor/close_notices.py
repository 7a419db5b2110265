# SPDX-License-Identifier: Apache-2.0
"""Notifies clients whose process has crashed: one error in their protocol, then the close.

    a session begins in a child ──link──▶ `SocketCopies` keeps a copy of its descriptor
    it ends                     ──link──▶ the copy is closed
    the child exits             ────────▶ each client is sent a notice, and its copy is closed

The supervisor writes to the bare socket. If the dead process has left half a frame there, the
notice lands inside it, and the client sees a broken connection, as it would have anyway.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ...system.net import websocket
from ...system.process.descriptors import Message
from ..environment.upstream_types import RpcCode, rpc_error
from ..errors import WSErrorCode
from ..serving import messages
from .children import Child, Children

NOTICES_AT_ONCE = 256
_MAX_UNREAD_BYTES = 64 * 1024
_UNASKED = (websocket.PING, websocket.PONG, websocket.CLOSE)


@dataclass(eq=False, slots=True)
class SocketCopies:
    """Copies of the children's session sockets, by the tokens that the children gave them.

    Without a copy a client sees only the end of its connection. At most `most` descriptors are
    used; of these, some may be reserved for connections that wait.
    """

    _most: int
    _children: Children
    _reserved: int = 0
    _count: int = 0

    def reserve(self, count: int) -> None:
        """Leave `count` descriptors to others: close the oldest copies if need be."""
        self._reserved = count
        surplus = self._count + count - self._most
        for child in self._children.shards if surplus > 0 else ():
            while child.socket_copies and surplus > 0:
                self._close(child, next(iter(child.socket_copies)))
                surplus -= 1

    def update(self, child: Child, message: Message) -> None:
        """Keep copies for sessions that have begun, close those of sessions that have ended."""
        begun = message.head.get("begun", ())
        for (token, path), fd in zip(begun, message.fds, strict=False):
            if self._count + self._reserved >= self._most:
                os.close(fd)
                continue
            self._count += 1
            child.socket_copies[token] = fd, path
        for token in message.head.get("ended", ()):
            if token in child.socket_copies:
                self._close(child, token)

    def _close(self, child: Child, token: int) -> None:
        fd, _ = child.socket_copies.pop(token)
        self._count -= 1
        os.close(fd)

    def count_left(self, child: Child) -> tuple[int, int]:
        """Count the clients of a child that have left, and those whose requests are not read."""
        fds = {fd for fd, _ in child.socket_copies.values()}
        poll = select.poll()
        for fd in fds:
            poll.register(fd, getattr(select, "POLLRDHUP", select.POLLHUP))
        left = {fd for fd, _ in poll.poll(0)}
        return len(left), sum(map(_has_request, fds - left))

    def notify_clients(self, child: Child, text: str, accept: Callable[[], None]) -> None:
        """Send all clients of a child why their sessions have ended, and close the copies.

        Clients reconnect at once, so `accept` is called in between, before the queue is full.
        """
        close = websocket.close_payload(websocket.INTERNAL_ERROR_CLOSE, text)
        for number, (fd, path) in enumerate(child.socket_copies.values(), 1):
            message = _message(path, text)
            error = websocket.frame_head(len(message)) + message
            write_last(fd, error + websocket.frame_head(len(close), websocket.CLOSE) + close)
            close_unread(fd)
            if number % NOTICES_AT_ONCE == 0:
                accept()
        self._count -= len(child.socket_copies)
        child.socket_copies.clear()


def close_unread(fd: int) -> None:
    """Close a connection after `write_last`, reading what its client has sent first.

    Otherwise the kernel would reset the connection, and the client may lose what was written.
    """
    with contextlib.suppress(OSError):
        os.read(fd, _MAX_UNREAD_BYTES)
    os.close(fd)


def _has_request(fd: int) -> bool:
    """Return whether a connection has unread frames that are neither a ping, a pong nor a close."""
    connection = socket.socket(fileno=fd)
    data = b""
    with contextlib.suppress(OSError):
        data = connection.recv(_MAX_UNREAD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    connection.detach()
    while len(data) > 1 and data[0] & websocket.OPCODE in _UNASKED[:2]:
        data = data[6 + (data[1] & 0x7F) :]
    return bool(data) and data[0] & websocket.OPCODE not in _UNASKED


def _message(path: str, text: str) -> bytes:
    if path == "/mcp":
        return messages.encode_error(rpc_error(RpcCode.SERVER_ERROR, text))
    return messages.error_frame(text, WSErrorCode.SESSION_ERROR)


def write_last(fd: int, data: bytes) -> None:
    """Write and end our side of a connection; a client that does not read may miss it."""
    connection = socket.socket(fileno=fd)
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(data)
        connection.shutdown(socket.SHUT_WR)
    connection.detach()
