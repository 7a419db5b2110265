# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames as the generator reads and writes them, beside `websockets`' own."""

from __future__ import annotations

import pytest
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from openenvd.bench.ws_session import CLOSE, TEXT, frame, take_frame

SIZES = (0, 1, 125, 126, 65_535, 65_536, 200_000)


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_of_any_size_is_read(size: int) -> None:
    data = Frame(Opcode.TEXT, b"x" * size).serialize(mask=False)
    assert take_frame(b"??" + data + b"more", 2) == (TEXT, True, b"x" * size, 2 + len(data))


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_is_not_read_before_it_is_whole(size: int) -> None:
    data = Frame(Opcode.TEXT, b"x" * size).serialize(mask=False)
    for length in {0, 1, 2, 3, 5, 9, len(data) - 1}:
        if length < len(data):
            assert take_frame(data[:length], 0) is None


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_a_masked_frame(size: int) -> None:
    payload = b"x" * size
    stream = StreamReader()
    stream.feed_data(frame(TEXT, payload))
    parsing = Frame.parse(stream.read_exact, mask=True)
    with pytest.raises(StopIteration) as done:
        next(parsing)
    assert done.value.value == Frame(Opcode.TEXT, payload)


def test_a_message_may_come_in_several_frames() -> None:
    data = Frame(Opcode.TEXT, b"{", fin=False).serialize(mask=False)
    assert take_frame(data, 0) == (TEXT, False, b"{", len(data))


def test_a_close_frame_is_told_apart() -> None:
    data = Frame(Opcode.CLOSE, b"\x03\xe8bye").serialize(mask=False)
    assert take_frame(data, 0) == (CLOSE, True, b"\x03\xe8bye", len(data))
