# SPDX-License-Identifier: Apache-2.0
"""Peers that break the protocol: each loses its own connection, and nobody gets wrong data."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from openenvd.env_host.shared_state import frames as wire
from openenvd.env_host.shared_state.connection import StateLink, StateProxy, socket_name
from openenvd.env_host.shared_state.frames import BodyTooLarge, Kind, WorldError, WorldLost
from openenvd.env_host.shared_state.process import StateProcess

CALL = wire.encode_value(["note", time.monotonic() + 3600, {"entry": 1}])


def talk(address: str, *pieces: bytes) -> bytes:
    """Everything a state process answers until it closes."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(socket_name(address))
        found = b""
        try:
            for piece in pieces:
                peer.sendall(piece)
            while data := peer.recv(65536):
                found += data
        except ConnectionError:
            pass
        return found


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nAccept: */*\r\n\r\n",),
        (os.urandom(100_000),),
        (wire.encode(Kind.CALL, 2, value=CALL),),
        (wire.encode(Kind.CALL, 0, value=CALL),),
        (wire.encode(Kind.CALL, 1, value=b"[1]"),),
        (wire.encode(Kind.CALL, 1, value=b'["note", 9e9, [1]]'),),
        (wire.encode(Kind.CALL, 1),),
        (wire.encode(Kind.REPLY, 1),),
        (wire.encode(Kind.WELCOME, 1),),
        (wire.encode(Kind.LEAVE, 1), b"\0" * 40),
        (bytes(40),),
        (b"\xff" * 40,),
        (wire.HEADER.pack(99, False, 1, 1, 3, 0, 1) + b"abc",),
        (wire.HEADER.pack(Kind.CALL, True, 1, 1, 0, wire.MAX_BODY_BYTES + 1, 1),),
        (wire.HEADER.pack(Kind.CALL, False, 1, 1, wire.MAX_VALUE_BYTES + 1, 0, 1),),
        (wire.HEADER.pack(Kind.CALL, False, 1, 1, 3, 0, 1) + b"{x}",),
    ],
)
async def test_a_shard_that_sends_garbage_loses_its_own_connection(
    state: StateProcess, world: StateProxy, pieces: tuple[bytes, ...]
) -> None:
    await asyncio.to_thread(talk, state.address, *pieces)
    assert await world.entries() == []


async def test_a_shard_killed_in_the_middle_of_a_frame_harms_no_other(
    state: StateProcess, world: StateProxy
) -> None:
    call = wire.encode(Kind.CALL, 1, value=CALL, body=bytes(1000))
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(socket_name(state.address))
        peer.sendall(call[:-1])
    assert await world.entries() == []


class Impostor:
    """A state process that answers the first call with whatever it is told to."""

    def __init__(self, folder: Path, *answer: bytes) -> None:
        self.address = str(folder / "s")
        self._answer = b"".join(answer)
        self._over = asyncio.Event()

    async def __aenter__(self) -> Impostor:
        self._server = await asyncio.start_unix_server(self._serve, self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._over.wait()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.encode(Kind.WELCOME, 5, value=b"1"))
        if await reader.read(1):
            writer.write(self._answer)
            await reader.read()
        writer.close()
        await writer.wait_closed()
        self._over.set()


@pytest.mark.parametrize(
    "answer",
    [
        wire.encode(Kind.REPLY, epoch=4, session=1, request_id=1, body=b"of an earlier epoch"),
        wire.encode(Kind.REPLY, epoch=5, session=1, request_id=2, body=b"to another call"),
        wire.encode(Kind.REPLY, epoch=5, session=2, request_id=1, body=b"to another session"),
        wire.encode(Kind.CALL, epoch=5, session=1, request_id=1, body=b"not a reply"),
        b"garbage" * 100,
    ],
)
async def test_a_reply_that_is_not_the_callers_is_never_delivered(
    tmp_path: Path, answer: bytes
) -> None:
    async with Impostor(tmp_path, answer) as impostor:
        link = StateLink(impostor.address)
        with pytest.raises(WorldLost):
            await StateProxy(link).anything()
        await link.close()


async def test_a_reply_that_comes_twice_is_delivered_once(tmp_path: Path) -> None:
    reply = wire.encode(Kind.REPLY, epoch=5, session=1, request_id=1, body=b"mine")
    async with Impostor(tmp_path, reply, reply) as impostor:
        link = StateLink(impostor.address)
        world = StateProxy(link)
        assert await world.first() == b"mine"
        with pytest.raises(WorldLost):
            await world.second()
        await link.close()


async def test_a_socket_that_does_not_greet_is_no_state_process(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        link = StateLink(str(tmp_path / "silent"))
        with pytest.raises(WorldError, match="cannot be reached"):
            await link.current(time.monotonic() + 0.1)
        await link.close()


# Frames survive any cutting


class Reader(wire.WireProtocol):
    """Keeps the frames that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[wire.Frame] = []
        self.connection_made(asyncio.Transport())

    def _handle(self, frame: wire.Frame) -> None:
        self.frames.append(frame)

    def close(self) -> None:
        self._transport = None


def call(number: int, body: bytes | None) -> bytes:
    return wire.encode(Kind.CALL, 3, 7, number, wire.encode_value({"n": number}), body)


@pytest.mark.parametrize("piece", [1, 7, 40, 100_000])
def test_frames_are_the_same_however_the_stream_is_cut(piece: int) -> None:
    sizes = [None, 0, 1, 5000, 40_000]
    stream = b"".join(call(n, None if s is None else os.urandom(s)) for n, s in enumerate(sizes))
    reader = Reader()
    for start in range(0, len(stream), piece):
        reader.data_received(stream[start : start + piece])
    found = reader.frames
    assert [frame.request_id for frame in found] == [0, 1, 2, 3, 4]
    assert [None if f.body is None else len(f.body) for f in found] == sizes
    assert {(f.kind, f.epoch, f.session) for f in found} == {(Kind.CALL, 3, 7)}
    assert [frame.value for frame in found] == [{"n": n} for n in range(5)]


def test_a_body_takes_no_memory_before_it_arrives_and_is_no_json() -> None:
    size = wire.MAX_BODY_BYTES
    reader = Reader()
    before = psutil.Process().memory_info().rss
    reader.data_received(wire.HEADER.pack(Kind.CALL, True, 3, 7, 0, size, 1) + bytes(100_000))
    assert psutil.Process().memory_info().rss - before < size / 10
    with pytest.raises(BodyTooLarge, match="as bytes"):
        wire.encode_value("x" * wire.MAX_VALUE_BYTES)
