# SPDX-License-Identifier: Apache-2.0
"""The cases of the Autobahn test suite, as frames and what is to come back.

The numbers are those of https://github.com/crossbario/autobahn-testsuite, sections 1 to 7, 9 and 10
(12 and 13 are about compression, which is never agreed on). The suite itself needs Python 2 and a
server that echoes; an environment answers. So what is to be understood is padded JSON here, and any
other text is answered that it is not JSON. `0.*` are ours: lengths, and how much is too much.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from websockets.frames import Opcode

from .raw import Raw, frame

CONT, TEXT, BINARY = Opcode.CONT, Opcode.TEXT, Opcode.BINARY
CLOSE, PING, PONG = Opcode.CLOSE, Opcode.PING, Opcode.PONG
MB = 2**20

# What a text from the endpoint is.
ANSWER = "an answer"
NO_JSON = "the answer that it is not JSON"
ERROR = "the error that ends the session"
_ERRORS = {"INVALID_JSON": NO_JSON, -32700: NO_JSON, "SESSION_ERROR": ERROR, -32000: ERROR}


@dataclass(frozen=True)
class Case:
    """What is sent, and what is to come back."""

    sent: bytes
    texts: tuple[str, ...] = ()
    pongs: tuple[bytes, ...] = ()
    closed: int | None = None  # code of the endpoint's close frame; None: the session goes on
    chop: int = 0  # bytes sent at a time; 0: all at once


def good(size: int = 2) -> bytes:
    """A message of that size that is understood: JSON without a type, or a method."""
    return b"{}".ljust(size)


def text(payload: bytes = good(), *, fin: bool = True) -> bytes:
    return frame(TEXT, payload, fin=fin)


def cont(payload: bytes, *, fin: bool = True) -> bytes:
    return frame(CONT, payload, fin=fin)


def close(payload: bytes = b"\x03\xe8") -> bytes:
    return frame(CLOSE, payload)


def fragments(payload: bytes, size: int, opcode: int = TEXT) -> bytes:
    parts = [payload[at : at + size] for at in range(0, len(payload), size)]
    last = len(parts) - 1
    return b"".join(
        frame(CONT if number else opcode, part, fin=number == last)
        for number, part in enumerate(parts)
    )


def ping(payload: bytes = b"") -> bytes:
    return frame(PING, payload)


def converse(client: Raw, case: Case, *, is_strict: bool) -> None:
    """Play a case, on a connection that has just been opened.

    Args:
        client: the connection.
        case: if it leaves the session as it is, a last message must be answered.
        is_strict: whether messages before a breach of the protocol are answered, too. They are on
            `/ws`, at once; those on `/mcp` are calls, and the connection does not wait for them.
    """
    client.send(text())
    assert _what_is(client.receive()[1]) == ANSWER  # now the session has begun
    texts, sent = list(case.texts), case.sent
    if case.closed is None:
        texts, sent = [*texts, ANSWER], sent + text()
    client.send_in_pieces(sent, case.chop)
    seen: list[str] = []
    pongs: list[bytes] = []
    while case.closed is not None or len(seen) < len(texts) or len(pongs) < len(case.pongs):
        opcode, payload = client.receive()
        if opcode == CLOSE:
            break
        assert opcode in (TEXT, PONG), (opcode, payload[:100])
        if opcode == TEXT:
            seen.append(_what_is(payload))
        else:
            pongs.append(payload)
    assert pongs == list(case.pongs)
    if case.closed is None:
        assert seen == texts
        client.send(close())
        opcode, payload = client.receive()
    elif is_strict or ERROR in texts:
        assert seen == texts
    else:
        assert seen == texts[: len(seen)]
    assert opcode == CLOSE, (opcode, payload[:100])
    code = int.from_bytes(payload[:2], "big") if payload else 1005
    assert code == (1000 if case.closed is None else case.closed), payload
    if ERROR in texts:
        client.send(close())
    assert client.is_over()


def _what_is(payload: bytes) -> str:
    answer = json.loads(payload)
    error = answer.get("error") or answer.get("data") or {}
    return _ERRORS.get(error.get("code"), ANSWER)


# The cases, by their number


def all_cases() -> Iterator[tuple[str, Case]]:
    groups = (lengths, messages, pings, reserved, fragmentation)
    for group in (*groups, valid_utf8, invalid_utf8, closes, large):
        yield from group()


def lengths() -> Iterator[tuple[str, Case]]:
    """Ours: lengths that are not minimal, or too large, are refused by the head alone."""
    yield "0.1.1", Case(frame(TEXT, good(125), length_bytes=2), closed=1002)
    yield "0.1.2", Case(frame(TEXT, good(125), length_bytes=8), closed=1002)
    yield "0.1.3", Case(frame(TEXT, good(65535), length_bytes=8), closed=1002)
    yield "0.1.4", Case(frame(PING, b"x", length_bytes=2), closed=1002)
    yield "0.1.5", Case(frame(BINARY, b"", length_bytes=8), closed=1002)
    yield "0.2.1", Case(b"\x81\xff\x80" + bytes(7) + bytes(4), closed=1002)
    yield "0.2.2", Case(b"\x81\xff" + b"\xff" * 8 + bytes(4), closed=1002)
    yield "0.3.1", Case(b"\x81\xff\x7f" + b"\xff" * 7 + bytes(4), closed=1009)
    yield "0.3.2", Case(b"\x81\xff" + (100 * MB + 1).to_bytes(8, "big") + bytes(4), closed=1009)
    yield "0.4.1", Case(frame(TEXT, good(), mask=False), closed=1002)
    yield "0.4.2", Case(text() + frame(PING, b"", mask=False), (ANSWER,), closed=1002)


def messages() -> Iterator[tuple[str, Case]]:
    sizes = (0, 125, 126, 127, 128, 65535, 65536, 65536)
    for number, size in enumerate(sizes, 1):
        chop = 997 if number == len(sizes) else 0
        expected = ANSWER if size else NO_JSON
        yield f"1.1.{number}", Case(text(good(size)[:size]), (expected,), chop=chop)
        binary = frame(BINARY, bytes(size))
        yield f"1.2.{number}", Case(binary, (ERROR,), closed=1000, chop=chop)


def pings() -> Iterator[tuple[str, Case]]:
    binary = b"\x00\xff\xfe\xfd\xfc\xfb\x00\xff"
    ten = tuple(b"payload-%d" % number for number in range(10))
    pong = frame(PONG, b"unsolicited")
    yield "2.1", Case(ping(), pongs=(b"",))
    yield "2.2", Case(ping(b"Hello, world!"), pongs=(b"Hello, world!",))
    yield "2.3", Case(ping(binary), pongs=(binary,))
    yield "2.4", Case(ping(b"\xfe" * 125), pongs=(b"\xfe" * 125,))
    yield "2.5", Case(ping(b"\xfe" * 126), closed=1002)
    yield "2.6", Case(ping(b"\xfe" * 125), pongs=(b"\xfe" * 125,), chop=1)
    yield "2.7", Case(frame(PONG, b""))
    yield "2.8", Case(pong)
    yield "2.9", Case(pong + ping(b"ours"), pongs=(b"ours",))
    yield "2.10", Case(b"".join(map(ping, ten)), pongs=ten)
    yield "2.11", Case(b"".join(map(ping, ten)), pongs=ten, chop=1)


def reserved() -> Iterator[tuple[str, Case]]:
    def with_bits(bits: int, opcode: int = TEXT, payload: bytes = good()) -> bytes:
        return frame(opcode, payload, reserved=bits)

    yield "3.1", Case(with_bits(1), closed=1002)
    for number, chop in ((2, 0), (3, 7), (4, 1)):
        sent = text() + with_bits(number) + ping()
        yield f"3.{number}", Case(sent, (ANSWER,), closed=1002, chop=chop)
    yield "3.5", Case(with_bits(5, BINARY), closed=1002)
    yield "3.6", Case(with_bits(6, PING), closed=1002)
    yield "3.7", Case(with_bits(7, CLOSE, b"\x03\xe8"), closed=1002)
    for group, opcodes in ((1, range(3, 8)), (2, range(11, 16))):
        for number, opcode in enumerate(opcodes, 1):
            payload = b"" if number % 2 else b"with a payload"
            alone = number <= 2
            sent = frame(opcode, payload)
            sent = sent if alone else text() + sent + ping()
            answers = () if alone else (ANSWER,)
            case = Case(sent, answers, closed=1002, chop=1 if number == 5 else 0)
            yield f"4.{group}.{number}", case


def fragmentation() -> Iterator[tuple[str, Case]]:
    first, last = text(b"{", fin=False), cont(b"}")
    middle, pinged = cont(b" ", fin=False), ping(b"between")
    lone, lone_first = cont(b"alone"), cont(b"alone", fin=False)
    yield "5.1", Case(frame(PING, b"a", fin=False) + cont(b"b"), closed=1002)
    yield "5.2", Case(frame(PONG, b"a", fin=False) + cont(b"b"), closed=1002)
    for number, chop in ((3, 0), (4, len(first)), (5, 1)):
        yield f"5.{number}", Case(first + last, (ANSWER,), chop=chop)
        sent = first + pinged + last
        yield f"5.{number + 3}", Case(sent, (ANSWER,), (b"between",), chop=chop)
    for number, chop in ((9, 0), (10, len(lone)), (11, 1)):
        yield f"5.{number}", Case(lone + text(), closed=1002, chop=chop)
        yield f"5.{number + 3}", Case(lone_first + text(), closed=1002, chop=chop)
    yield "5.15", Case(first + last + lone_first + text(), (ANSWER,), closed=1002)
    yield "5.16", Case((lone_first + first + last) * 2, closed=1002)
    yield "5.17", Case((lone + first + last) * 2, closed=1002)
    yield "5.18", Case(first + text(b"}"), closed=1002)
    five = first + middle + ping(b"1") + middle + middle + ping(b"2") + last
    yield "5.19", Case(five, (ANSWER,), (b"1", b"2"))
    yield "5.20", Case(five, (ANSWER,), (b"1", b"2"), chop=1)


GREETING = "Hello-µ@ßöäüàá-UTF-8!!".encode()
COSMOS = bytes.fromhex("cebae1bdb9cf83cebcceb5")  # "kosme" in Greek, as the suite has it


def _valid() -> Iterator[tuple[str, bytes]]:
    for length in (2, 5, 7, 9, 11):
        yield f"6.6.{length}", COSMOS[:length]
    for group, points in {
        "6.7": (0, 0x80, 0x800, 0x10000),
        "6.9": (0x7F, 0x7FF, 0xFFFF, 0x10FFFF),
        "6.11": (0xD7FF, 0xE000, 0xFFFD, 0x10FFFF),
        "6.22": [plane * 0x10000 + low for plane in range(17) for low in (0xFFFE, 0xFFFF)],
        "6.23": range(0xFFF9, 0x10000),
    }.items():
        for number, point in enumerate(points, 1):
            yield f"{group}.{number}", chr(point).encode()


def valid_utf8() -> Iterator[tuple[str, Case]]:
    """Each alone, which is not JSON, and within a string, which is; whole, and byte by byte."""
    yield "6.1.1", Case(text(b""), (NO_JSON,))
    yield "6.1.2", Case(text(b"", fin=False) + cont(b"", fin=False) + cont(b""), (NO_JSON,))
    yield "6.1.3", Case(text(b"", fin=False) + cont(good(), fin=False) + cont(b""), (ANSWER,))
    pieces = (text(GREETING), fragments(GREETING, 8), fragments(GREETING, 1), fragments(COSMOS, 1))
    for number, sent in enumerate(pieces, 1):
        yield f"6.2.{number}", Case(sent, (NO_JSON,))
    for number, size in enumerate((len(COSMOS), 5, 4, 2, 1), 1):
        yield f"6.5.{number}", Case(fragments(COSMOS, size), (NO_JSON,))
    for name, payload in _valid():
        bare = text(payload) + fragments(payload, 1)
        if payload < b" ":  # must be escaped in JSON
            yield name, Case(bare, (NO_JSON,) * 2)
            continue
        quoted = b'{"x":"%b"}' % payload
        sent = bare + text(quoted) + fragments(quoted, 1)
        yield name, Case(sent, (NO_JSON, NO_JSON, ANSWER, ANSWER))


def _invalid() -> Iterator[tuple[str, bytes]]:
    for length in (1, 3, 4, 6, 8, 10):
        yield f"6.6.{length}", COSMOS[:length]
    groups = {
        "6.8": "f888808080 fc8480808080",
        "6.10": "f7bfbfbf fbbfbfbfbf fdbfbfbfbfbf",
        "6.12": "80 bf 80bf 80bf80 80bf80bf 80bf80bf80 80bf80bf80bf "
        + bytes(range(0x80, 0xC0)).hex(),
        "6.13": " ".join(
            b"".join(bytes((start, 32)) for start in range(low, high)).hex()
            for low, high in ((0xC0, 0xE0), (0xE0, 0xF0), (0xF0, 0xF8), (0xF8, 0xFC), (0xFC, 0xFE))
        ),
        "6.14": "c0 e080 f08080 f8808080 fc80808080 df efbf f7bfbf fbbfbfbf fdbfbfbfbf",
        "6.15": "c0e080f08080f8808080fc80808080dfefbff7bfbffbbfbfbffdbfbfbfbf",
        "6.16": "fe ff fefeffff",
        "6.17": "c0af e080af f08080af f8808080af fc80808080af",
        "6.18": "c1bf e09fbf f08fbfbf f887bfbfbf fc83bfbfbfbf",
        "6.19": "c080 e08080 f0808080 f880808080 fc8080808080",
        "6.20": "eda080 edadbf edae80 edafbf edb080 edbe80 edbfbf",
        "6.21": "eda080edb080 eda080edbfbf edadbfedb080 edadbfedbfbf edae80edb080 edae80edbfbf "
        "edafbfedb080 edafbfedbfbf",
    }
    for group, sequences in groups.items():
        for number, sequence in enumerate(sequences.split(), 1):
            yield f"{group}.{number}", bytes.fromhex(sequence)
    yield "6.11.5", b"\xf4\x90\x80\x80"


def invalid_utf8() -> Iterator[tuple[str, Case]]:
    broken = COSMOS + b"\xed\xa0\x80edited"
    yield "6.3.1", Case(text(broken), closed=1007)
    yield "6.3.2", Case(fragments(broken, 1), closed=1007)
    # Fail fast: the last fragment never comes; within a frame, one waits for the whole.
    beginning = text(COSMOS, fin=False)
    yield "6.4.1", Case(beginning + cont(b"\xf4\x90\x80\x80", fin=False), closed=1007)
    half = text(COSMOS + b"\xf4", fin=False)
    yield "6.4.2", Case(half + cont(b"\x90", fin=False), closed=1007)
    yield "6.4.3", Case(text(COSMOS + b"\xf4\x90\x80\x80edited"), closed=1007, chop=19)
    yield "6.4.4", Case(text(COSMOS + b"\xf4\x90\x80\x80edited"), closed=1007, chop=1)
    for number, payload in _invalid():
        for kind, sent in {
            "alone": text(payload),
            "by byte": fragments(payload + b" ", 1),
            "in JSON": text(b'{"x":"%b"}' % payload),
            "behind others": text() + text(payload),
        }.items():
            texts = (ANSWER,) if kind == "behind others" else ()
            yield f"{number} {kind}", Case(sent, texts, closed=1007)


def closes() -> Iterator[tuple[str, Case]]:
    yield "7.1.1", Case(text() + close(), (ANSWER,), closed=1000)
    yield "7.1.2", Case(close() + close(), closed=1000)
    yield "7.1.3", Case(close() + ping(), closed=1000)
    yield "7.1.4", Case(close() + text(), closed=1000)
    yield "7.1.5", Case(text(b"{", fin=False) + close() + cont(b"}"), closed=1000)
    yield "7.1.6", Case(text(good(256 * 1024)) + close() + ping(), (ANSWER,), closed=1000)
    yield "7.3.1", Case(close(b""), closed=1005)
    yield "7.3.2", Case(close(b"a"), closed=1002)
    yield "7.3.3", Case(close(), closed=1000)
    yield "7.3.4", Case(close(b"\x03\xe8Hello World!"), closed=1000)
    yield "7.3.5", Case(close(b"\x03\xe8" + b"*" * 123), closed=1000)
    yield "7.3.6", Case(close(b"\x03\xe8" + b"*" * 124), closed=1002)
    yield "7.5.1", Case(close(b"\x03\xe8" + COSMOS + b"\xed\xa0\x80"), closed=1007)
    may = [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014]
    for number, code in enumerate([*may, 3000, 3999, 4000, 4999], 1):
        yield f"7.7.{number}", Case(close(code.to_bytes(2, "big")), closed=code)
    for number, code in enumerate([0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999], 1):
        yield f"7.9.{number}", Case(close(code.to_bytes(2, "big")), closed=1002)
    for number, code in enumerate([5000, 65535], 1):
        yield f"7.13.{number}", Case(close(code.to_bytes(2, "big")), closed=1002)


def large() -> Iterator[tuple[str, Case]]:
    for number, size in enumerate((MB // 16, MB // 4, MB, 4 * MB, 8 * MB, 16 * MB), 1):
        yield f"9.1.{number}", Case(text(good(size)), (ANSWER,))
        yield f"9.2.{number}", Case(frame(BINARY, bytes(size)), (ERROR,), closed=1000)
    whole = good(4 * MB)
    for number in range(1, 10):
        size = 16 * 4**number
        yield f"9.3.{number}", Case(fragments(whole, size), (ANSWER,))
        binary = fragments(whole, size, BINARY)
        yield f"9.4.{number}", Case(binary, (ERROR,), closed=1000)
    for number, chop in enumerate((64, 128, 256, 512, 1024, 2048), 1):
        yield f"9.5.{number}", Case(text(good(MB // 4)), (ANSWER,), chop=chop)
    for number, size in enumerate((2, 16, 64, 256, 1024, 4096), 1):
        yield f"9.7.{number}", Case(text(good(size)) * 1000, (ANSWER,) * 1000)
    yield "10.1.1", Case(fragments(good(65536), 1300), (ANSWER,))
