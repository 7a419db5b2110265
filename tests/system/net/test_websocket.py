# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames as bytes are what the `websockets` library reads and writes."""

import os

import pytest
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from openenvd.rollouts.bench.generator import parse_frame
from openenvd.system.net.websocket import (
    CLOSE,
    TEXT,
    close_payload,
    frame_head,
    unmasked_client_frame,
)

SIZES = (0, 1, 125, 126, 127, 65_535, 65_536, 300_000)


def parsed(data: bytes) -> Frame:
    """One client's frame, as the library reads it on a server."""
    reader = StreamReader()
    reader.feed_data(data)
    parsing = Frame.parse(reader.read_exact, mask=True)
    with pytest.raises(StopIteration) as ended:
        next(parsing)
    assert not reader.buffer
    return ended.value.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", SIZES)
def test_frames_of_any_size_are_those_of_the_library_once_they_are_whole(size: int) -> None:
    payload = os.urandom(size)
    assert frame_head(size) + payload == Frame(Opcode.TEXT, payload).serialize(mask=False)
    assert parsed(unmasked_client_frame(payload)) == Frame(Opcode.TEXT, payload)
    data = Frame(Opcode.TEXT, b"x" * size).serialize(mask=False)
    assert parse_frame(b"??" + data + b"more", 2) == (TEXT, True, b"x" * size, 2 + len(data))
    for length in {0, 1, 2, 3, 5, 9, len(data) - 1}:
        if length < len(data):
            assert parse_frame(data[:length], 0) is None


@pytest.mark.parametrize(
    ("frame", "taken"),
    [
        (Frame(Opcode.TEXT, b"{", fin=False), (TEXT, False, b"{")),
        (Frame(Opcode.CLOSE, b"\x03\xe8bye"), (CLOSE, True, b"\x03\xe8bye")),
    ],
)
def test_frames_of_other_kinds_are_read(frame: Frame, taken: tuple[int, bool, bytes]) -> None:
    data = frame.serialize(mask=False)
    assert parse_frame(data, 0) == (*taken, len(data))


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("a" * 123, "a" * 123),
        ("word " * 30, "word " * 23 + "word…"),
        ("é" * 100, "é" * 60 + "…"),
    ],
)
def test_a_close_reason_is_cut_at_a_word(reason: str, kept: str) -> None:
    payload = close_payload(1011, reason)
    assert (payload[2:].decode(), len(payload) <= 125) == (kept, True)
