# SPDX-License-Identifier: Apache-2.0
"""A WebSocket client that sends the bytes it is told to, over a real socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.frames import Frame, Opcode

from .hosts import WAIT_SECONDS, Host

HEAD = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Raw:
    """A client that sends raw bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def text(self, text: str) -> None:
        self.send(frame(Opcode.TEXT, text.encode()))

    def head(self) -> bytes:
        """The head of the answer to a request."""
        return b"".join(iter(lambda: self._file.readline().strip(b"\r\n"), b""))

    def receive(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame."""
        first, size = self._read(2)
        if size >= 126:
            size = int.from_bytes(self._read(2 if size == 126 else 8), "big")
        return first & 0xF, self._read(size)

    def answer(self) -> Any:
        opcode, payload = self.receive()
        assert opcode == Opcode.TEXT, payload
        return json.loads(payload)

    def close(self) -> None:
        self._file.close()  # it keeps the connection open otherwise

    def is_over(self) -> bool:
        try:
            return not self._file.read(1)
        except ConnectionResetError:
            return True

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        assert len(data) == size, "the connection has ended"
        return data


def frame(opcode: Opcode, payload: bytes, *, fin: bool = True, mask: bool = True) -> bytes:
    return Frame(opcode, payload, fin).serialize(mask=mask)


@contextmanager
def raw(host: Host) -> Iterator[Raw]:
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as connection:
        client = Raw(connection)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def opened(host: Host, path: str = "/ws") -> Iterator[Raw]:
    with raw(host) as client:
        client.send(HEAD.replace(b"/ws", path.encode(), 1))
        assert b"101" in client.head()
        yield client
