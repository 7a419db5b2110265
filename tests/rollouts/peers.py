# SPDX-License-Identifier: Apache-2.0
"""Servers that do as no library would: what they send is written by hand."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

from websockets.frames import Frame, Opcode
from websockets.utils import accept_key

_LONG_HEADS = {126: 2, 127: 8}


class Peer:
    """One connection, from the server's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def shake_hands(self, and_then: bytes = b"") -> None:
        """Accept; `and_then` leaves in the same segment."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.splitlines()[1:-1])
        key = accept_key(fields[b"Sec-WebSocket-Key"].decode())
        self.writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n\r\n%b" % (key.encode(), and_then)
        )

    async def question(self) -> int:
        """Read what it is asked, or a control frame; return the opcode."""
        first, length = await self.reader.readexactly(2)
        size_bytes = length & 0x7F
        if size_bytes in _LONG_HEADS:
            size = await self.reader.readexactly(_LONG_HEADS[size_bytes])
            size_bytes = int.from_bytes(size, "big")
        await self.reader.readexactly(4 + size_bytes)
        return first & 0x0F

    async def answer(self, *frames: bytes) -> None:
        await self.shake_hands()
        await self.question()
        self.writer.write(b"".join(frames))
        await self.writer.drain()

    async def until_it_leaves(self) -> None:
        while await self.reader.read(65536):
            pass


@contextlib.asynccontextmanager
async def serving(
    play: Callable[[Peer], Awaitable[None]], secure: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """The address of a server that plays so with each connection."""
    playing: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        playing.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await play(Peer(reader, writer))
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=secure)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"https://localhost:{port}" if secure else f"http://127.0.0.1:{port}"
    finally:
        server.close()
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing)


def framed(text: bytes, opcode: Opcode = Opcode.TEXT) -> bytes:
    return Frame(opcode, text).serialize(mask=False)


def observed(size_bytes: int = 1, *, done: bool = True) -> bytes:
    end = b"true" if done else b"false"
    text = b'{"type":"observation","data":{"observation":"%b","done":%b}}'
    return framed(text % (b"x" * size_bytes, end))


def refused(message: bytes, code: bytes = b"SESSION_ERROR") -> bytes:
    return framed(b'{"type":"error","data":{"message":"%b","code":"%b"}}' % (message, code))
