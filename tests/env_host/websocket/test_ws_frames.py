# SPDX-License-Identifier: Apache-2.0
"""WebSocket frames and handshakes as bytes: what is understood, refused and written."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from websockets.frames import Frame, Opcode

from openenvd.env_host.websocket.frames import (
    FrameError,
    FrameParser,
    whole_text,
)
from openenvd.env_host.websocket.handshake import acceptance, parse_upgrade
from openenvd.system.net.websocket import TEXT

from .fuzzing import FrameSpec, check_frames

LIMIT = 1 << 20
HEAD = (
    b"GET /ws?session_id=a%20b HTTP/1.1\r\nHost: localhost\r\nUpgrade: WebSocket\r\n"
    b"Connection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def sent(opcode: Opcode, payload: bytes, *, fin: bool = True) -> bytes:
    """A client's frame, as the `websockets` library writes it."""
    return Frame(opcode, payload, fin).serialize(mask=True)


# The cases of https://github.com/crossbario/autobahn-testsuite, sections 1 to 7, and `0.*` of ours.
# What is to be understood is what `websockets` understands.


def cont(payload: bytes, *, fin: bool = True) -> FrameSpec:
    return FrameSpec(Opcode.CONT, payload, fin)


def text(payload: bytes = b"{}", *, fin: bool = True) -> FrameSpec:
    return FrameSpec(Opcode.TEXT, payload, fin)


def ping(payload: bytes) -> FrameSpec:
    return FrameSpec(Opcode.PING, payload)


FIRST, LAST, LONE, LONE_FIRST = text(b"{", fin=False), cont(b"}"), cont(b"1"), cont(b"1", fin=False)
PINGED = [FIRST, cont(b" ", fin=False), ping(b"1"), *[cont(b" ", fin=False)] * 2, ping(b"2"), LAST]
FRAMES: dict[str, list[FrameSpec]] = {
    "0.1.1": [FrameSpec(Opcode.TEXT, bytes(125), length_bytes=2)],
    "0.1.2": [FrameSpec(Opcode.TEXT, bytes(125), length_bytes=8)],
    "0.1.3": [FrameSpec(Opcode.TEXT, bytes(65535), length_bytes=8)],
    "0.1.4": [FrameSpec(Opcode.PING, b"x", length_bytes=2)],
    "0.1.5": [FrameSpec(Opcode.BINARY, b"", length_bytes=8)],
    "0.2.1": [FrameSpec(Opcode.TEXT, b"", announced=1 << 63)],
    "0.2.2": [FrameSpec(Opcode.TEXT, b"", announced=(1 << 64) - 1)],
    "0.3.1": [FrameSpec(Opcode.TEXT, b"", announced=(1 << 63) - 1)],
    "0.4.1": [FrameSpec(Opcode.TEXT, b"{}", masked=False)],
    "0.4.2": [text(), FrameSpec(Opcode.PING, b"", masked=False)],
    **{
        f"1.{kind}.{size}": [FrameSpec(kind, b"x" * size)]
        for kind in (Opcode.TEXT, Opcode.BINARY)
        for size in (0, 125, 126, 127, 128, 65535, 65536, 65537)
    },
    **{f"2.{size}": [ping(b"\xfe" * size)] for size in (0, 8, 125, 126)},
    "2.9": [FrameSpec(Opcode.PONG, b"unasked"), ping(b"ours")],
    "2.10": [ping(b"%d" % number) for number in range(10)],
    **{
        f"3.{bits}.{opcode}": [text(), FrameSpec(opcode, b"\x03\xe8", reserved=bits), ping(b"")]
        for bits in range(1, 8)
        for opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.PING, Opcode.CLOSE)
    },
    **{
        f"4.{opcode}.{len(payload)}": [text(), FrameSpec(opcode, payload), ping(b"")]
        for opcode in (*range(3, 8), *range(11, 16))
        for payload in (b"", b"with a payload")
    },
    "5.1": [FrameSpec(Opcode.PING, b"a", fin=False), cont(b"b")],
    "5.2": [FrameSpec(Opcode.PONG, b"a", fin=False), cont(b"b")],
    "5.3": [FIRST, LAST],
    "5.6": [FIRST, ping(b"between"), LAST],
    "5.9": [LONE, text()],
    "5.12": [LONE_FIRST, text()],
    "5.15": [FIRST, LAST, LONE_FIRST, text()],
    "5.16": [LONE_FIRST, FIRST, LAST] * 2,
    "5.17": [LONE, FIRST, LAST] * 2,
    "5.18": [FIRST, text(b"}")],
    "5.19": PINGED,
    "6.1.2": [text(b"", fin=False), cont(b"", fin=False), cont(b"")],
    "6.1.3": [text(b"", fin=False), cont(b"{}", fin=False), cont(b"")],
    "7.1.2": [FrameSpec(Opcode.CLOSE, b"\x03\xe8")] * 2,
    "7.1.4": [FrameSpec(Opcode.CLOSE, b"\x03\xe8"), text()],
    "7.1.5": [FIRST, FrameSpec(Opcode.CLOSE, b"\x03\xe8"), LAST],
    "7.3.1": [FrameSpec(Opcode.CLOSE, b"")],
    "7.3.2": [FrameSpec(Opcode.CLOSE, b"a")],
    "7.3.5": [FrameSpec(Opcode.CLOSE, b"\x03\xe8" + b"*" * 123)],
    "7.3.6": [FrameSpec(Opcode.CLOSE, b"\x03\xe8" + b"*" * 124)],
    "7.5.1": [FrameSpec(Opcode.CLOSE, b"\x03\xe8\xed\xa0\x80")],
    **{
        f"7.7.{code}": [FrameSpec(Opcode.CLOSE, code.to_bytes(2, "big"))]
        for code in (
            0,
            999,
            *range(1000, 1017),
            1100,
            2000,
            2999,
            3000,
            3999,
            4000,
            4999,
            5000,
            65535,
        )
    },
}


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize("specs", FRAMES.values(), ids=FRAMES)
def test_frames_are_understood_as_by_websockets_however_they_are_cut(
    specs: list[FrameSpec], piece: int
) -> None:
    check_frames(specs, [piece] * 200)


COSMOS = bytes.fromhex("cebae1bdb9cf83cebcceb5")  # "kosme" in Greek, as the suite has it
CODE_POINTS = (
    *(0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, *range(0xFFF9, 0x10000), 0x10000, 0x10FFFF),
    *(plane * 0x10000 + low for plane in range(17) for low in (0xFFFE, 0xFFFF)),
)
BROKEN = {
    "6.8": "f888808080 fc8480808080",
    "6.10": "f7bfbfbf fbbfbfbfbf fdbfbfbfbfbf",
    "6.11": "f4908080",
    "6.12": f"80 bf 80bf 80bf80 80bf80bf 80bf80bf80 80bf80bf80bf {bytes(range(0x80, 0xC0)).hex()}",
    "6.13": " ".join(f"{start:x}20{start + 1:x}20" for start in range(0xC0, 0xFE, 2)),
    "6.14": "c0 e080 f08080 f8808080 fc80808080 df efbf f7bfbf fbbfbfbf fdbfbfbfbf",
    "6.16": "fe ff fefeffff",
    "6.17": "c0af e080af f08080af f8808080af fc80808080af",
    "6.18": "c1bf e09fbf f08fbfbf f887bfbfbf fc83bfbfbfbf",
    "6.19": "c080 e08080 f0808080 f880808080 fc8080808080",
    "6.20": "eda080 edadbf edae80 edafbf edb080 edbe80 edbfbf",
    "6.21": "eda080edb080 eda080edbfbf edadbfedb080 edadbfedbfbf edae80edb080 edafbfedbfbf",
}


def utf8_cases() -> Iterator[tuple[str, bytes]]:
    for length in range(1, len(COSMOS) + 1):
        yield f"6.6.{length}", COSMOS[:length]
    yield "6.3", COSMOS + b"\xed\xa0\x80edited"
    for point in CODE_POINTS:
        yield f"U+{point:04X}", chr(point).encode()
    for group, sequences in BROKEN.items():
        for sequence in sequences.split():
            yield f"{group} {sequence[:12]}", bytes.fromhex(sequence)


@pytest.mark.parametrize("payload", [pytest.param(each, id=name) for name, each in utf8_cases()])
def test_a_text_is_utf8_whole_and_by_bytes_or_refused(payload: bytes) -> None:
    parts = [payload[at : at + 1] for at in range(len(payload))]
    by_bytes = [text(parts[0], fin=False), *(cont(part, fin=False) for part in parts[1:])]
    for specs in ([text(payload)], [text(), text(payload)], [*by_bytes, cont(b"")]):
        check_frames(specs, [])


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
