# SPDX-License-Identifier: Apache-2.0
"""Frames survive any cutting, and what is no frame is refused."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from openenvd.env_host.shared_state import frames as wire
from openenvd.env_host.shared_state.frames import BodyTooLarge, Kind


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


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n" + bytes(40),
        bytes(40),
        b"\xff" * 40,
        wire.HEADER.pack(99, False, 1, 1, 3, 0, 1) + b"abc",
        wire.HEADER.pack(Kind.CALL, True, 1, 1, 0, wire.MAX_BODY_BYTES + 1, 1),
        wire.HEADER.pack(Kind.CALL, False, 1, 1, wire.MAX_VALUE_BYTES + 1, 0, 1),
        wire.HEADER.pack(Kind.CALL, False, 1, 1, 3, 0, 1) + b"{x}",
    ],
)
def test_invalid_frames_are_refused(data: bytes) -> None:
    reader = Reader()
    reader.data_received(call(1, None) + data)
    assert reader.fault is not None
    assert len(reader.frames) == 1


def test_an_announced_body_takes_no_memory_before_it_arrives() -> None:
    size = wire.MAX_BODY_BYTES
    reader = Reader()
    before = psutil.Process().memory_info().rss
    reader.data_received(wire.HEADER.pack(Kind.CALL, True, 3, 7, 0, size, 1) + bytes(100_000))
    assert psutil.Process().memory_info().rss - before < size / 10


def test_large_data_does_not_go_as_json() -> None:
    with pytest.raises(BodyTooLarge, match="as bytes"):
        wire.encode_value("x" * wire.MAX_VALUE_BYTES)
