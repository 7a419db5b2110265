# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames and handshakes as bytes: what is understood, refused and written."""

from __future__ import annotations

import os

import pytest
from websockets.frames import Frame, Opcode

from openenvd.env_host.websocket.frames import (
    FrameError,
    FrameParser,
    close_frame,
    code_of_close,
    whole_text,
)
from openenvd.env_host.websocket.handshake import acceptance, parse_upgrade
from openenvd.system.net.websocket import BINARY, CLOSE, PING, PONG, TEXT

LIMIT = 1 << 20
SIZES = (0, 1, 125, 126, 65535, 65536, 300_000)
HEAD = (
    b"GET /ws?session_id=a%20b HTTP/1.1\r\nHost: localhost\r\nUpgrade: WebSocket\r\n"
    b"Connection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def sent(opcode: Opcode, payload: bytes, *, fin: bool = True) -> bytes:
    """A client's frame, as the `websockets` library writes it."""
    return Frame(opcode, payload, fin).serialize(mask=True)


def parse(data: bytes, limit: int = LIMIT) -> list[tuple[int, bytes]]:
    return FrameParser(limit).feed(data)


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_of_any_size_is_read_back(size: int) -> None:
    payload = os.urandom(size)
    assert parse(sent(Opcode.TEXT, payload)) == [(TEXT, payload)]


@pytest.mark.parametrize("size", [1, 125, 126, 65535])
def test_a_whole_text_is_read_as_the_parser_reads_it(size: int) -> None:
    payload = os.urandom(size)
    assert whole_text(sent(Opcode.TEXT, payload)) == payload


NOT_ONE_WHOLE_TEXT = {
    "two": sent(Opcode.TEXT, b"two") * 2,
    "empty": sent(Opcode.TEXT, b""),
    "cut off": sent(Opcode.TEXT, b"cut off")[:-1],
    "longer, cut off": sent(Opcode.TEXT, b"x" * 300)[:-1],
    "half a head": sent(Opcode.TEXT, b"x" * 300)[:7],
    "large": sent(Opcode.TEXT, b"x" * 70_000),
    "first of two": sent(Opcode.TEXT, b"first of two", fin=False),
    "last of two": sent(Opcode.CONT, b"last of two"),
    "binary": sent(Opcode.BINARY, b"no text"),
    "ping": sent(Opcode.PING, b"are you there"),
    "not masked": Frame(Opcode.TEXT, b"not masked").serialize(mask=False),
    "longer, not masked": Frame(Opcode.TEXT, b"x" * 300).serialize(mask=False),
    "a length that would fit into one byte": b"\x81\xfe\x00\x05keys12345",
    "a reserved bit": b"\xc1\x85keys12345",
}


@pytest.mark.parametrize("data", NOT_ONE_WHOLE_TEXT.values(), ids=NOT_ONE_WHOLE_TEXT)
def test_all_but_one_whole_text_is_left_to_the_parser(data: bytes) -> None:
    assert whole_text(data) is None


@pytest.mark.parametrize("size", [1, 7, 130, 70_000])
@pytest.mark.parametrize("step", [1, 3, 64, 65536])
def test_frames_are_parsed_from_chunks_of_any_size(size: int, step: int) -> None:
    if size // step > 1000:
        step = size // 100
    payload = os.urandom(size)
    data = sent(Opcode.TEXT, payload) + sent(Opcode.PING, b"p") + sent(Opcode.TEXT, b"next")
    parser, found = FrameParser(LIMIT), []
    for start in range(0, len(data), step):
        found += parser.feed(data[start : start + step])
    assert found == [(TEXT, payload), (PING, b"p"), (TEXT, b"next")]


def test_fragments_are_joined_and_control_frames_pass_between_them() -> None:
    data = sent(Opcode.TEXT, b"a", fin=False) + sent(Opcode.PING, b"1")
    data += sent(Opcode.CONT, b"b", fin=False) + sent(Opcode.PONG, b"2")
    data += sent(Opcode.CONT, b"c") + sent(Opcode.BINARY, b"d")
    assert parse(data) == [(PING, b"1"), (PONG, b"2"), (TEXT, b"abc"), (BINARY, b"d")]


def test_many_empty_fragments_take_neither_time_nor_memory() -> None:
    """Adding all of them up again with each would take minutes."""
    parser = FrameParser(LIMIT)
    parser.feed(sent(Opcode.TEXT, b"", fin=False))
    empty = sent(Opcode.CONT, b"", fin=False) * 1000
    for _ in range(300):
        assert parser.feed(empty) == []
    assert parser._fragments is not None
    assert not parser._fragments.data
    assert parser.feed(sent(Opcode.CONT, b"x")) == [(TEXT, b"x")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (Frame(Opcode.TEXT, b"x").serialize(mask=False), 1002),
        (b"\xc1\x80\x00\x00\x00\x00", 1002),  # a reserved bit: compressed
        (b"\x83\x80\x00\x00\x00\x00", 1002),  # a reserved opcode
        (b"\x09\x80\x00\x00\x00\x00", 1002),  # a ping in fragments
        (b"\x89\xfe\x00\x7e", 1002),  # a ping of 126 bytes
        (sent(Opcode.CONT, b"x"), 1002),
        (sent(Opcode.TEXT, b"x", fin=False) + sent(Opcode.TEXT, b"x"), 1002),
        (
            b"\x81\xff" + (LIMIT + 1).to_bytes(8, "big") + bytes(4),
            1009,
        ),  # before its payload has come
        (sent(Opcode.TEXT, bytes(LIMIT), fin=False) + sent(Opcode.CONT, b"x"), 1009),
        (sent(Opcode.TEXT, bytes(LIMIT), fin=False) + b"\x80\x81", 1009),  # by its head alone
        (b"\x81\xfe\x00\x7d" + bytes(4), 1002),
        (b"\x81\xff" + (65535).to_bytes(8, "big") + bytes(4), 1002),
        (b"\x81\xff\x80" + bytes(7) + bytes(4), 1002),
        (sent(Opcode.TEXT, b"\xce", fin=False) + sent(Opcode.CONT, b"x", fin=False), 1007),
        (sent(Opcode.TEXT, b"x", fin=False) + sent(Opcode.CONT, b"\xce"), 1007),
    ],
    ids=[
        "unmasked",
        "compressed",
        "reserved opcode",
        "ping in fragments",
        "long ping",
        "continuation of nothing",
        "text within a text",
        "too large by its head",
        "too large by its fragments",
        "too large by a fragment's head",
        "16 bits for 125",
        "64 bits for 65535",
        "the top bit of the length",
        "no UTF-8 in a fragment",
        "half a character at the end",
    ],
)
def test_protocol_violations_are_refused_with_their_close_code(data: bytes, code: int) -> None:
    with pytest.raises(FrameError) as refused:
        parse(data)
    assert refused.value.code == code


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1011, "too slow"), (1001, "é" * 100)])
def test_a_close_frame_carries_its_code_and_fits(code: int, reason: str) -> None:
    frame = close_frame(code, reason)
    assert len(frame) <= 127
    assert code_of_close(frame[2:]) == code
    assert reason.startswith(frame[4:].decode().removesuffix("…"))


@pytest.mark.parametrize("payload", [b"\x03", b"\x03\xed", b"\x00\x01", b"\x03\xe8\xff"])
def test_a_close_frame_with_an_invalid_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        code_of_close(payload)


def test_a_close_frame_may_have_no_code() -> None:
    assert code_of_close(b"") == 1005
    assert close_frame(1005) == bytes((0x80 | CLOSE, 0))


def test_a_handshake_is_read_and_answered_as_the_rfc_has_it() -> None:
    upgrade = parse_upgrade(HEAD)
    assert upgrade is not None
    assert (upgrade.path, upgrade.parameter("session_id")) == ("/ws", "a b")
    assert upgrade.parameter("nothing") is None
    assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in acceptance(upgrade)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"GET ", b"POST "),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"Host: localhost\r\n", b""),
        (b"WebSocket\r\n", b"h2c\r\n"),
        (b"keep-alive, Upgrade", b"keep-alive"),
        (b"Version: 13", b"Version: 8"),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"short"),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"dGhlIHNhbXBsZSBub25jZQ"),
        (b"Host:", b"Host :"),
        (b"/ws", b"/ws\xc3\xa9"),
        (b"Host: l", b"H\xc3\xb6st: a\r\nHost: l"),
        (b"Host: l", b" folded: a\r\nHost: l"),
        (b"Host: l", b"Other: \x00\r\nHost: l"),
        (b"Upgrade: W", b"no colon\r\nUpgrade: W"),
        (b"Connection", b"Content-Length: 3\r\nConnection"),
    ],
)
def test_a_request_that_is_not_plainly_a_handshake_is_not_parsed(old: bytes, new: bytes) -> None:
    assert old in HEAD
    assert parse_upgrade(HEAD.replace(old, new)) is None
