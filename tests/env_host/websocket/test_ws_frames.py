# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames and handshakes as bytes: what is understood, refused and written."""

from __future__ import annotations

import os

import pytest
from websockets.frames import Frame, Opcode

from openenvd.env_host.websocket.frames import (
    FrameError,
    FrameParser,
    whole_text,
)
from openenvd.env_host.websocket.handshake import acceptance, parse_upgrade
from openenvd.system.net.websocket import TEXT

LIMIT = 1 << 20
HEAD = (
    b"GET /ws?session_id=a%20b HTTP/1.1\r\nHost: localhost\r\nUpgrade: WebSocket\r\n"
    b"Connection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def sent(opcode: Opcode, payload: bytes, *, fin: bool = True) -> bytes:
    """A client's frame, as the `websockets` library writes it."""
    return Frame(opcode, payload, fin).serialize(mask=True)


@pytest.mark.parametrize("size", [1, 125, 126, 65535])
def test_a_whole_text_is_read_as_the_parser_reads_it(size: int) -> None:
    payload = os.urandom(size)
    assert whole_text(sent(Opcode.TEXT, payload)) == payload


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


@pytest.mark.parametrize("rest", [sent(Opcode.CONT, b"x"), b"\x80\x81"], ids=["whole", "its head"])
def test_a_message_is_too_large_by_a_fragment(rest: bytes) -> None:
    with pytest.raises(FrameError) as refused:
        FrameParser(LIMIT).feed(sent(Opcode.TEXT, bytes(LIMIT), fin=False) + rest)
    assert refused.value.code == 1009


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
