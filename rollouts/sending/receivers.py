# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of `senders`: batches as an asynchronous iterator.

    async with await SocketReceiver.listen(("127.0.0.1", 0)) as receiver:
        async for batch in receiver:     # the one before is acknowledged when this one is asked for

One task per connection reads, for as long as the connection lives; a batch is read from the socket
only when there is room for it. Numbers are counted per sender, so what a sender sends again after a
lost connection arrives once.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..buffers import ByteBudget, Hold
from ..errors import SendError
from .frames import (
    ACK,
    BATCH,
    HELLO,
    PREFIX,
    WELCOME,
    Batch,
    decode_batch,
    decode_head,
    decode_prefix,
    encode_head,
)
from .senders import BUFFER_BYTES, FILE_SUFFIX
from .streams import PIECE_BYTES, Address, Streams, read_body, read_frame, read_head, write_pieces

LOOK_SECONDS = 0.05  # how often a folder is looked at


@dataclass(eq=False, slots=True)
class _Peer:
    """A sender, over all of its connections."""

    received: int  # number of the newest batch that has been read
    acknowledged: int  # and of the newest that the trainer has dealt with
    writer: asyncio.StreamWriter | None = None


@dataclass(frozen=True, slots=True)
class _Arrived:
    batch: Batch
    number: int
    peer: _Peer
    hold: Hold


class SocketReceiver:
    """Listens for any number of `SocketSender`s."""

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.budget = ByteBudget(buffer_bytes)
        self._server: asyncio.Server | None = None
        self._peers: dict[str, _Peer] = {}
        self._arrived: asyncio.Queue[_Arrived] = asyncio.Queue()  # bounded by the budget
        self._current: _Arrived | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def listen(cls, address: Address, *, buffer_bytes: int = BUFFER_BYTES) -> Self:
        """At `(host, port)`, port 0 for any; or at the path of a Unix socket."""
        receiver = cls(buffer_bytes)
        serve = receiver._serve
        if isinstance(address, Path):
            server = await asyncio.start_unix_server(serve, address, limit=PIECE_BYTES)
        else:
            server = await asyncio.start_server(serve, *address, limit=PIECE_BYTES)
        receiver._server = server
        return receiver

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.acknowledge()
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        await self.acknowledge()
        self._current = await self._arrived.get()
        return self._current.batch

    async def acknowledge(self) -> None:
        """The batch that was last given is dealt with."""
        current, self._current = self._current, None
        if current is not None:
            current.hold.release()
            current.peer.acknowledged = current.number
            await _acknowledge(current)

    async def close(self) -> None:
        """Hang up. What was not acknowledged stays with its sender."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, EOFError, SendError):  # it will come again
                await self._welcome((reader, writer))
        except asyncio.CancelledError:
            pass  # `close`; nobody awaits this task's outcome but the streams, which would log it
        finally:
            self._connections.discard(task)
            writer.close()

    async def _welcome(self, streams: Streams) -> None:
        """A sender says who it is, and is told what of it has arrived."""
        reader, writer = streams
        head, _ = await read_frame(reader)
        if head["kind"] != HELLO:
            raise SendError("a stranger")
        before = head["oldest"] - 1  # an earlier receiver at this address had those
        peer = self._peers.setdefault(head["sender"], _Peer(before, before))
        if peer.writer is not None:
            peer.writer.close()  # a connection of which we have not heard that it broke
        peer.writer = writer
        welcome = {"received": peer.received, "acknowledged": peer.acknowledged}
        await write_pieces(writer, encode_head({"kind": WELCOME, **welcome}))
        await self._read(reader, peer)

    async def _read(self, reader: asyncio.StreamReader, peer: _Peer) -> None:
        while True:
            head, body_bytes = await read_head(reader)
            hold = await self.budget.reserve(body_bytes)
            try:
                body = await read_body(reader, body_bytes)
                self._arrive(head, body, peer, hold)
            except BaseException:
                hold.release()
                raise

    def _arrive(self, head: dict[str, Any], body: memoryview, peer: _Peer, hold: Hold) -> None:
        if head["kind"] == BATCH and head["number"] == peer.received + 1:
            peer.received += 1
            arrived = _Arrived(decode_batch(head, body), peer.received, peer, hold)
            self._arrived.put_nowait(arrived)
        else:  # sent again after a lost connection, and here already
            hold.release()


class FolderReceiver:
    """Batches of a `FolderSender`, in order, mapped instead of read; each file is removed when the
    next batch is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._current: Path | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.acknowledge()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        await self.acknowledge()
        self._current = found = await self._oldest()
        return await asyncio.to_thread(_map, found)

    async def acknowledge(self) -> None:
        """The batch that was last given is dealt with: its file goes."""
        current, self._current = self._current, None
        if current is not None:
            await asyncio.to_thread(current.unlink)

    async def _oldest(self) -> Path:
        """Another process may be the sender: nothing but looking tells."""
        while (found := await asyncio.to_thread(self._look)) is None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        return found

    def _look(self) -> Path | None:
        """The oldest."""
        found = self.folder.glob(f"*{FILE_SUFFIX}")
        return min(found, key=lambda path: int(path.stem), default=None)


async def _acknowledge(arrived: _Arrived) -> None:
    """On the sender's present connection. If that breaks, the next one's welcome says it."""
    writer = arrived.peer.writer
    if writer is not None:
        with contextlib.suppress(OSError):
            await write_pieces(writer, encode_head({"kind": ACK, "number": arrived.number}))


def _map(path: Path) -> Batch:
    with path.open("rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    head_bytes, body_bytes = decode_prefix(content[: PREFIX.size])
    body_at = PREFIX.size + head_bytes
    head = decode_head(content[PREFIX.size : body_at])
    return decode_batch(head, content[body_at : body_at + body_bytes])
