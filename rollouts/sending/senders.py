# SPDX-License-Identifier: Apache-2.0
"""Hands batches to a trainer, through a folder or a socket, without ever holding the loop up.

    send ──reserve──▶ ByteBudget        returns when there is room; waits while there is none
      └──▶ unacknowledged batches ──▶ one task (socket) or one thread (folder)
                    ▲                          │
                    └────── acknowledged ◀─────┘   only then is a batch's room given back

A batch is acknowledged when the trainer has come back for the next one (socket), or when it is on
the medium (folder). A lost connection is made again, and what was not received is sent again; the
receiver counts, so that nothing arrives twice. `close` returns when all is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from ..buffers import ByteBudget, Hold
from ..errors import PeerLost, RolloutError, SenderClosed, SendError
from ..folder.disk import Disk, typed
from .frames import ACK, HELLO, WELCOME, Batch, encode_batch, encode_head
from .streams import Address, connect, read_frame, write_pieces

BUFFER_BYTES = 256 << 20
PATIENCE_SECONDS = 300.0  # without any acknowledgement while something waits for one
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 2.0  # between attempts to connect
FILE_SUFFIX = ".batch"


class Sender(Protocol):
    """Where batches go."""

    async def send(self, batch: Batch) -> None:
        """Returns when there is room for it."""
        ...

    async def close(self) -> None:
        """Returns when all of them have arrived."""
        ...


@dataclass(eq=False, slots=True)
class _Pending:
    number: int
    batch: Batch
    hold: Hold


class FolderSender:
    """Each batch is a file, which has its name only when it is whole: `000042.batch`.

    Numbers go on where an earlier sender stopped.
    """

    def __init__(
        self, folder: Path, *, buffer_bytes: int = BUFFER_BYTES, disk: Disk | None = None
    ) -> None:
        self.folder = folder
        self.budget = ByteBudget(buffer_bytes)
        self._disk = disk or Disk()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="folder-sender")
        self._number: int | None = None  # found by the thread
        self._failure: RolloutError | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, batch: Batch) -> None:
        """Returns when there is room; the thread writes.

        Raises:
            OutputError: an earlier batch could not be written.
            SenderClosed: after `close`.
        """
        hold = await self.budget.reserve(batch.size_bytes)
        if self._closed:
            hold.release()
            raise SenderClosed("the sender is closed")
        self._pool.submit(self._write, batch, hold)

    async def close(self) -> None:
        """Returns when every batch is on the medium.

        Raises:
            OutputError: one could not be written.
        """
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown)
        if self._failure is not None:
            raise self._failure

    def _write(self, batch: Batch, hold: Hold) -> None:
        try:
            if self._failure is None:
                self._write_file(batch)
        except RolloutError as exc:
            self._fail(exc)
        except Exception as exc:
            self._fail(SendError(f"a batch could not be written: {exc!r}"))
        finally:
            hold.release()

    def _write_file(self, batch: Batch) -> None:
        number = self._next_number()
        path = self.folder / f"{number:06}{FILE_SUFFIX}"
        fresh = path.with_suffix(".partial")
        with typed(path):
            fresh.unlink(missing_ok=True)
        self._disk.append(fresh, encode_batch(number, batch))
        self._disk.sync(fresh)
        self._disk.rename(fresh, path)
        self._disk.sync(self.folder)
        self._number = number

    def _next_number(self) -> int:
        if self._number is None:
            with typed(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                found = [int(path.stem) for path in self.folder.glob(f"*{FILE_SUFFIX}")]
            self._number = max(found, default=-1)
        return self._number + 1

    def _fail(self, error: RolloutError) -> None:
        self._failure = error
        self.budget.fail(error)


class SocketSender:
    """Sends to a `SocketReceiver` at an address: `(host, port)`, or the path of a Unix socket."""

    def __init__(
        self,
        address: Address,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.address = address
        self.budget = ByteBudget(buffer_bytes)
        self.reconnections = 0
        self._patience_seconds = patience_seconds
        self._name = uuid.uuid4().hex
        self._pending: deque[_Pending] = deque()  # in order of their numbers, from the oldest
        self._last = 0  # number of the newest
        self._news = asyncio.Event()  # something to send, or all is acknowledged
        self._heard_at = time.monotonic()
        self._failure: SendError | None = None
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, batch: Batch) -> None:
        """Returns when there is room; the task sends.

        Raises:
            PeerLost: nobody has acknowledged for too long.
            SenderClosed: after `close`.
        """
        hold = await self.budget.reserve(batch.size_bytes)
        if self._closed or self._failure is not None:
            hold.release()
            raise self._failure or SenderClosed("the sender is closed")
        if not self._pending:
            self._heard_at = time.monotonic()
        self._last += 1
        self._pending.append(_Pending(self._last, batch, hold))
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="socket-sender")

    async def close(self) -> None:
        """Returns when all is acknowledged.

        Raises:
            PeerLost: it never was.
        """
        self._closed = True
        self._news.set()
        if self._task is not None:
            await asyncio.shield(self._task)
        if self._failure is not None:
            raise self._failure

    @property
    def _is_done(self) -> bool:
        return self._closed and not self._pending

    async def _run(self) -> None:
        """Connect, send, and again, until all is acknowledged or patience has ended."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while not self._is_done and self._failure is None:
            before = self._heard_at
            try:
                await self._connected()
            except (OSError, EOFError, SendError) as exc:
                self._lose_patience(exc)
            self.reconnections += 1
            heard = self._heard_at != before
            pause_seconds = FIRST_PAUSE_SECONDS if heard else pause_seconds * 2
            if not self._is_done:
                await asyncio.sleep(min(pause_seconds, LONGEST_PAUSE_SECONDS))

    def _lose_patience(self, exc: Exception) -> None:
        seconds = time.monotonic() - self._heard_at
        if self._pending and seconds > self._patience_seconds:
            self._failure = PeerLost(
                f"nothing was acknowledged by {self.address} for {seconds:.0f} s: {exc}"
            )
            self.budget.fail(self._failure)

    async def _connected(self) -> None:
        """One connection, until it breaks or nothing is left to do."""
        reader, writer = await connect(self.address)
        try:
            received = await self._greet(reader, writer)
            await self._exchange(reader, writer, received)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Say who we are; what the receiver has got already, on connections before this one."""
        oldest = self._pending[0].number if self._pending else self._last + 1
        async with asyncio.timeout(self._patience_seconds):
            hello = {"kind": HELLO, "sender": self._name, "oldest": oldest}
            await write_pieces(writer, encode_head(hello))
            head, _ = await read_frame(reader)
        if head["kind"] != WELCOME:
            raise SendError(f"{self.address} is no receiver of batches")
        self._acknowledged(head["acknowledged"])
        received: int = head["received"]
        return received

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: int
    ) -> None:
        """Send and hear at once; the first of the two that ends, ends both."""
        tasks = [
            asyncio.create_task(self._hear(reader)),
            asyncio.create_task(self._send_pending(writer, received)),
        ]
        try:
            done: set[asyncio.Task[None]] = set()
            while not done:
                done, _ = await asyncio.wait(
                    tasks, timeout=self._patience_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                self._lose_patience(SendError("it is connected, and says nothing"))
                if self._failure is not None:
                    return
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Acknowledgements: each gives the room of all batches up to its number back."""
        while not self._is_done:
            head, _ = await read_frame(reader)
            if head["kind"] == ACK:
                self._acknowledged(head["number"])

    def _acknowledged(self, number: int) -> None:
        if self._pending and self._pending[0].number <= number:
            self._heard_at = time.monotonic()
        while self._pending and self._pending[0].number <= number:
            self._pending.popleft().hold.release()
        self._news.set()

    async def _send_pending(self, writer: asyncio.StreamWriter, received: int) -> None:
        """Everything that the receiver has not got, in order, and what comes."""
        while not self._is_done:
            self._news.clear()
            ahead = [pending for pending in self._pending if pending.number > received]
            for pending in ahead:
                await write_pieces(writer, encode_batch(pending.number, pending.batch))
                received = pending.number
            if not ahead:
                await self._news.wait()
