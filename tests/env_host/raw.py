# SPDX-License-Identifier: Apache-2.0
"""A WebSocket client that sends the bytes it is told to, over a real socket."""

import contextlib
import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from websockets.frames import Opcode
from websockets.utils import apply_mask

from .hosts import WAIT_SECONDS, Host

HEAD = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
KEY = b"\x01\xa2\x3c\xff"


class Raw:
    """A client that sends raw bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def send_what_is_taken(self, pieces: Iterable[bytes]) -> None:
        """Send these, each by itself; the peer may close meanwhile."""
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            for piece in pieces:
                self.send(piece)

    def text(self, text: str) -> None:
        self.send(frame(Opcode.TEXT, text.encode()))

    def head(self) -> bytes:
        return b"".join(iter(lambda: self._file.readline().strip(b"\r\n"), b""))

    def receive(self) -> tuple[int, bytes]:
        first, size = self.read(2)
        if size >= 126:
            size = int.from_bytes(self.read(2 if size == 126 else 8), "big")
        return first & 0xF, self.read(size)

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

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        assert len(data) == size, "the connection has ended"
        return data


@dataclass(frozen=True)
class FrameSpec:
    """One frame as a client may send it."""

    opcode: int
    payload: bytes
    fin: bool = True
    reserved: int = 0
    masked: bool = True
    length_bytes: int = 0  # 0: as short as it can be
    announced: int | None = None  # another length than that of its payload

    @property
    def size(self) -> int:
        return len(self.payload) if self.announced is None else self.announced

    def encode(self) -> bytes:
        first = self.fin << 7 | self.reserved << 4 | self.opcode
        return bytes((first,)) + self._length() + self._masked_payload()

    @property
    def is_minimal(self) -> bool:
        return self._length_bytes() == _least_length_bytes(self.size) and self.size < 1 << 63

    def _length_bytes(self) -> int:
        return max(self.length_bytes, _least_length_bytes(self.size))

    def _length(self) -> bytes:
        bit, count = self.masked << 7, self._length_bytes()
        if not count:
            return bytes((bit | self.size,))
        return bytes((bit | (126 if count == 2 else 127),)) + self.size.to_bytes(count, "big")

    def _masked_payload(self) -> bytes:
        return KEY + apply_mask(self.payload, KEY) if self.masked else self.payload


def _least_length_bytes(size: int) -> int:
    return 0 if size < 126 else 2 if size < 1 << 16 else 8


def frame(opcode: int, payload: bytes, **spec: Any) -> bytes:
    """A frame that may be wrong; `spec`: see `FrameSpec`."""
    return FrameSpec(opcode, payload, **spec).encode()


@contextmanager
def raw(host: Host) -> Iterator[Raw]:
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as connection:
        client = Raw(connection)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def upgraded(host: Host) -> Iterator[Raw]:
    """A WebSocket on a connection that has served HTTP, so that uvicorn reads its head."""
    with raw(host) as client:
        client.send(HEALTH)
        assert b"200" in client.head()
        client.read(len(b'{"status":"healthy"}'))
        client.send(HEAD)
        assert b"101" in client.head()
        yield client


@contextmanager
def opened(host: Host, path: str = "/ws") -> Iterator[Raw]:
    with raw(host) as client:
        client.send(HEAD.replace(b"/ws", path.encode(), 1))
        assert b"101" in client.head()
        yield client
