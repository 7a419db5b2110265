# SPDX-License-Identifier: Apache-2.0
"""Frames survive any cutting, and what is no frame is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from openenvd.env_host.shared_state import frames as wire
from openenvd.env_host.shared_state.errors import BodyTooLarge, WireError
from openenvd.env_host.shared_state.frames import Incoming, Kind, Limits


def feed(incoming: Incoming, data: bytes) -> Iterator[wire.Frame]:
    """The frames that are complete with this data."""
    incoming.room()[: len(data)] = data
    return incoming.frames(len(data))


def call(number: int, body: bytes | None) -> bytes:
    value = wire.encode_value({"n": number})
    return wire.encode(
        Kind.CALL, epoch=3, session=7, request_id=number, name=b"mix", value=value, body=body
    )


@pytest.mark.parametrize("piece", [1, 7, 40, 100_000])
def test_frames_are_the_same_however_the_stream_is_cut(piece: int) -> None:
    sizes = [None, 0, 1, 5000, 40_000]
    stream = b"".join(call(n, None if s is None else os.urandom(s)) for n, s in enumerate(sizes))
    incoming = Incoming()
    found = [
        frame
        for start in range(0, len(stream), piece)
        for frame in feed(incoming, stream[start : start + piece])
    ]
    assert [frame.request_id for frame in found] == [0, 1, 2, 3, 4]
    assert [None if f.body is None else len(f.body) for f in found] == sizes
    assert {(f.epoch, f.session, f.name) for f in found} == {(3, 7, "mix")}
    assert [frame.value for frame in found] == [{"n": n} for n in range(5)]


def test_a_body_larger_than_the_buffer_arrives_whole() -> None:
    body = os.urandom(3 * wire.READ_BYTES)
    stream, incoming = call(1, body) + call(2, b"x"), Incoming()
    found: list[wire.Frame] = []
    for start in range(0, len(stream), 1000):
        found += feed(incoming, stream[start : start + 1000])
    assert [frame.body for frame in found] == [body, b"x"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n" + bytes(40),
        bytes(40),
        b"\xff" * 40,
        wire.HEADER.pack(10, Kind.CALL, 0, 3, 1, 1, 3, 3, 1, 0),  # 3 + 3 + 3 is not 10
        wire.HEADER.pack(9, 99, 0, 3, 1, 1, 3, 3, 1, 0),
        wire.HEADER.pack(2**31, Kind.CALL, 0, 0, 1, 1, 0, 2**31, 1, 0),
        wire.HEADER.pack(6, Kind.CALL, 0, 3, 1, 1, 3, 0, 1, 0) + b"abc{x}",
        wire.HEADER.pack(1, Kind.CALL, 0, 1, 1, 1, 0, 0, 1, 0) + b"\xff",
    ],
)
def test_invalid_frames_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        list(feed(Incoming(), data))


def test_an_announced_body_takes_no_memory_before_it_arrives() -> None:
    size = wire.MAX_BODY_BYTES
    header = wire.HEADER.pack(size, Kind.CALL, wire.HAS_BODY, 0, 3, 7, 0, size, 1, 0)
    before = psutil.Process().memory_info().rss
    incoming = Incoming()
    for _ in range(3):  # the buffer is made as large as the frame will be
        assert not list(feed(incoming, header + bytes(wire.READ_BYTES // 2)))
        header = b""
    assert psutil.Process().memory_info().rss - before < size / 10


def test_large_data_does_not_go_as_json() -> None:
    with pytest.raises(BodyTooLarge, match="as bytes"):
        wire.encode_value("x" * wire.MAX_VALUE_BYTES)


@pytest.mark.parametrize(
    ("calls", "in_flight", "body", "wanted"),
    [
        (0, 0, 10 * Limits.max_bytes, True),  # a large body goes alone
        (1, 0, Limits.max_bytes, True),
        (1, 1, Limits.max_bytes, False),
        (Limits.max_calls - 1, 0, 0, True),
        (Limits.max_calls, 0, 0, False),
    ],
)
def test_calls_and_bytes_in_flight_are_bounded(
    calls: int, in_flight: int, body: int, wanted: bool
) -> None:
    assert Limits().has_room(calls, in_flight, body) is wanted
