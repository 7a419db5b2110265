# SPDX-License-Identifier: Apache-2.0
"""What a client sends is what the library would have sent."""

from __future__ import annotations

import pytest
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from openenvd.rollouts.sessions.outgoing import KEY_BYTES, KEYS_AT_ONCE, Masks, client_frame


def parsed(data: bytes) -> Frame:
    """By the library, as a server does."""
    reader = StreamReader()
    reader.feed_data(data)
    parsing = Frame.parse(reader.read_exact, mask=True)
    with pytest.raises(StopIteration) as ended:
        next(parsing)
    assert not reader.buffer
    return ended.value.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("size_bytes", [0, 1, 125, 126, 127, 65_535, 65_536, 1_000_003])
def test_the_library_reads_what_was_sent(size_bytes: int) -> None:
    text = bytes(range(32, 127)) * (size_bytes // 95 + 1)
    frame = parsed(client_frame(text[:size_bytes], b"\1\xff\0z"))
    assert (frame.opcode, frame.fin, bytes(frame.data)) == (Opcode.TEXT, True, text[:size_bytes])


def test_every_key_is_used_once() -> None:
    masks = Masks()
    keys = [masks.key() for _ in range(2 * KEYS_AT_ONCE + 1)]
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert len(set(keys)) >= len(keys) - 2  # two of two thousand may be alike, once in a thousand
