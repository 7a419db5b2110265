# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to a trainer: in order, once, and never more of them than there is room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.errors import OutputFull, PeerLost, SenderClosed, SendError
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.sending.frames import Batch, decode_head, decode_prefix, encode_batch
from openenvd.rollouts.sending.receivers import FolderReceiver, SocketReceiver
from openenvd.rollouts.sending.senders import FolderSender, SocketSender

KB = 1024
HERE = ("127.0.0.1", 0)


def batch(number: int, size: int = 100) -> Batch:
    """Its buffers say which it is."""
    return Batch({"number": number}, (bytes([number % 256]) * size, b"", b"tail"))


def number_of(found: Batch) -> int:
    """Which it is; all of it is what was sent."""
    number: int = found.content["number"]
    first, empty, tail = (bytes(buffer) for buffer in found.buffers)
    assert (set(first), empty, tail) == ({number % 256}, b"", b"tail")
    return number


async def take(receiver: SocketReceiver | FolderReceiver, count: int) -> list[int]:
    """The numbers of so many batches, in the order in which they came."""
    found = [number_of(await anext(receiver)) for _ in range(count)]
    await receiver.acknowledge()
    return found


async def send_all(sender: SocketSender | FolderSender, count: int, size: int = 100) -> None:
    async with sender:
        for number in range(count):
            await sender.send(batch(number, size))


@pytest.mark.parametrize("size", [10, 5_000_000])
async def test_batches_arrive_in_order_through_a_socket(size: int) -> None:
    async with await SocketReceiver.listen(HERE) as receiver:
        sender = SocketSender(("127.0.0.1", receiver.port))
        sending = asyncio.create_task(send_all(sender, 5, size))
        assert await take(receiver, 5) == [0, 1, 2, 3, 4]
        await sending
    assert (sender.budget.used_bytes, receiver.budget.used_bytes) == (0, 0)


async def test_a_unix_socket_does_as_well(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with await SocketReceiver.listen(path) as receiver:
        sending = asyncio.create_task(send_all(SocketSender(path), 3))
        assert await take(receiver, 3) == [0, 1, 2]
        await sending


async def test_several_senders_are_told_apart() -> None:
    async with await SocketReceiver.listen(HERE) as receiver:
        address = ("127.0.0.1", receiver.port)
        sending = [asyncio.create_task(send_all(SocketSender(address), 5)) for _ in range(4)]
        assert sorted(await take(receiver, 20)) == sorted([0, 1, 2, 3, 4] * 4)
        await asyncio.gather(*sending)


async def test_buffers_are_aligned() -> None:
    async with await SocketReceiver.listen(HERE) as receiver:
        sending = asyncio.create_task(send_all(SocketSender(("127.0.0.1", receiver.port)), 1))
        found = await anext(receiver)
        base = memoryview(found.buffers[0]).obj
        assert all(memoryview(buffer).obj is base for buffer in found.buffers)
        await receiver.acknowledge()
        await sending


async def test_sending_waits_while_the_trainer_is_busy() -> None:
    """Both buffers fill up, and then `send` does not return: memory stays flat."""
    async with await SocketReceiver.listen(HERE, buffer_bytes=50 * KB) as receiver:
        sender = SocketSender(("127.0.0.1", receiver.port), buffer_bytes=100 * KB)
        sending = asyncio.create_task(send_all(sender, 20, 40 * KB))
        while receiver.budget.waiting == 0 or sender.budget.waiting == 0:
            await asyncio.sleep(0)
        assert sender.budget.used_bytes <= 100 * KB
        assert not sending.done()
        assert await take(receiver, 20) == list(range(20))
        await sending
        assert receiver.budget.peak_bytes <= 50 * KB


class Breaking:
    """A wire between a sender and a receiver that is cut after so many bytes, again and again."""

    def __init__(self, port: int, after_bytes: int) -> None:
        self._port = port
        self._after_bytes = after_bytes
        self.cuts = 0

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._carry, *HERE)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._after_bytes += 1000  # so that it gets through in the end
        budget = [self._after_bytes]
        ways = [self._way(reader, far_writer, budget), self._way(far_reader, writer, budget)]
        tasks = [asyncio.create_task(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        self.cuts += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, far_writer):
            end.transport.abort()

    async def _way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: list[int]
    ) -> None:
        while budget[0] > 0 and (piece := await reader.read(min(700, budget[0]))):
            budget[0] -= len(piece)
            writer.write(piece)
            await writer.drain()


async def test_what_a_lost_connection_swallowed_is_sent_again_and_arrives_once() -> None:
    async with await SocketReceiver.listen(HERE) as receiver:
        wire = Breaking(receiver.port, after_bytes=100)
        server = await wire.serve()
        sender = SocketSender(("127.0.0.1", server.sockets[0].getsockname()[1]))
        sending = asyncio.create_task(send_all(sender, 10, 500))
        assert await take(receiver, 10) == list(range(10))
        await sending
        server.close()
        await server.wait_closed()
    assert wire.cuts > 2
    assert sender.reconnections > 2


async def test_another_receiver_gets_what_the_first_had_not_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = await SocketReceiver.listen(path)
    sending = asyncio.create_task(send_all(SocketSender(path), 6))
    await take(first, 2)
    await anext(first)  # number 2, which is not dealt with when the trainer dies
    await first.close()
    path.unlink(missing_ok=True)
    async with await SocketReceiver.listen(path) as second:
        assert await take(second, 4) == [2, 3, 4, 5]
        await sending


async def test_sending_begins_before_anybody_listens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sending = asyncio.create_task(send_all(SocketSender(path), 2))
    await asyncio.sleep(0.1)
    async with await SocketReceiver.listen(path) as receiver:
        assert await take(receiver, 2) == [0, 1]
        await sending


async def test_patience_ends(tmp_path: Path) -> None:
    sender = SocketSender(tmp_path / "nobody", patience_seconds=0.1, buffer_bytes=KB)
    await sender.send(batch(0, KB))
    with pytest.raises(PeerLost, match="nobody"):
        await sender.send(batch(1, KB))
    with pytest.raises(PeerLost):
        await sender.close()


async def test_one_who_is_connected_and_says_nothing_is_lost() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, *HERE)
    port = server.sockets[0].getsockname()[1]
    sender = SocketSender(("127.0.0.1", port), patience_seconds=0.1)
    await sender.send(batch(0))
    with pytest.raises(PeerLost):
        await sender.close()
    server.close()
    await server.wait_closed()


async def test_a_stranger_does_not_disturb_the_receiver() -> None:
    async with await SocketReceiver.listen(HERE) as receiver:
        reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        sending = asyncio.create_task(send_all(SocketSender(("127.0.0.1", receiver.port)), 1))
        assert await take(receiver, 1) == [0]
        await sending


async def test_a_closed_sender_takes_nothing(tmp_path: Path) -> None:
    for sender in (SocketSender(tmp_path / "s"), FolderSender(tmp_path)):
        await sender.close()
        with pytest.raises(SenderClosed):
            await sender.send(batch(0))
        assert sender.budget.used_bytes == 0


async def test_batches_arrive_in_order_through_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    await send_all(FolderSender(folder), 3)
    assert [path.name for path in sorted(folder.iterdir())] == [f"00000{n}.batch" for n in range(3)]
    async with FolderReceiver(folder) as receiver:
        assert await take(receiver, 3) == [0, 1, 2]
    assert list(folder.iterdir()) == []


async def test_a_folder_receiver_waits_for_what_comes(tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    receiving = asyncio.create_task(take(FolderReceiver(folder), 2))
    await send_all(FolderSender(folder), 2)
    assert await receiving == [0, 1]


async def test_what_was_not_dealt_with_stays_in_the_folder(tmp_path: Path) -> None:
    await send_all(FolderSender(tmp_path), 2)
    await anext(FolderReceiver(tmp_path))
    assert await take(FolderReceiver(tmp_path), 2) == [0, 1]


async def test_a_folder_sender_goes_on_counting(tmp_path: Path) -> None:
    for _ in range(2):
        await send_all(FolderSender(tmp_path), 2)
    assert len(list(tmp_path.iterdir())) == 4


class Full(Disk):
    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        raise OSError(28, "No space left on device")


async def test_a_full_disk_is_told_to_who_sends(tmp_path: Path) -> None:
    sender = FolderSender(tmp_path, disk=Full(), buffer_bytes=KB)
    await sender.send(batch(0, KB))
    with pytest.raises(OutputFull):
        await sender.send(batch(1, KB))
    with pytest.raises(OutputFull):
        await sender.close()
    assert sender.budget.used_bytes == 0


def test_frames_are_aligned_in_a_file() -> None:
    pieces = encode_batch(1, batch(3))
    content = b"".join(bytes(piece) for piece in pieces)
    head_bytes, body_bytes = decode_prefix(content[:16])
    assert ((16 + head_bytes) % 64, len(content)) == (0, 16 + head_bytes + body_bytes)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff"])
def test_a_head_that_is_none_is_told(text: bytes) -> None:
    with pytest.raises(SendError):
        decode_head(text)


def test_a_prefix_of_anything_else_is_told() -> None:
    with pytest.raises(SendError, match="no frame"):
        decode_prefix(b"GET / HTTP/1.1\r\n")
