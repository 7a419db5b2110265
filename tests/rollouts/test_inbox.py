# SPDX-License-Identifier: Apache-2.0
"""The inbox: however the bytes are cut, the same messages come out of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from websockets.frames import Frame, Opcode

from openenvd.env_host.protocol import MAX_MESSAGE_BYTES
from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.sessions.answers import LARGE_BYTES
from openenvd.rollouts.sessions.inbox import AHEAD_BYTES, Inbox
from openenvd.rollouts.sessions.message_memory import MessageMemory

UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"


class Seen:
    """An inbox, and what came out of it, in order."""

    def __init__(self, *, accepted: bool = True) -> None:
        self.messages: list[BytesLike] = []
        self.passed = b""
        self._accepted = accepted
        self.memory = MessageMemory(1 << 30)
        self.inbox = Inbox(
            memoryview(bytearray(256 << 10)),
            self.memory,
            on_bytes=self._pass,
            on_message=self.messages.append,
        )

    def give(self, data: bytes) -> None:
        """As a transport does: as much as there is room for."""
        while data:
            room = self.inbox.room
            piece = data[: len(room)]
            room[: len(piece)] = piece
            self.inbox.take(len(piece))
            data = data[len(piece) :]

    @property
    def texts(self) -> list[bytes]:
        return [bytes(message) for message in self.messages]

    def _pass(self, data: bytes) -> bool:
        self.passed += data
        return self._accepted and UPGRADE in self.passed


def framed(data: bytes, opcode: Opcode = Opcode.TEXT, *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=False)


def cut(data: bytes, seed: int) -> Iterator[bytes]:
    """At random places, many of them in the middle of a head."""
    dice = random.Random(seed)  # nothing depends on it but where is cut
    at = 0
    while at < len(data):
        size = dice.choice([1, 2, 3, 9, 100, 5_000, 70_000])
        yield data[at : at + size]
        at += size


SIZES = (0, 1, 125, 126, 65_535, 65_536, 700_000, 3, 126, 300_000, 64, 1_000_000)
MESSAGES = [bytes([97 + n]) * size for n, size in enumerate(SIZES)]


@pytest.mark.parametrize("seed", range(20))
def test_the_same_messages_arrive_however_the_bytes_are_split(seed: int) -> None:
    seen = Seen()
    ping = framed(b"are you there?", Opcode.PING)
    stream = UPGRADE + ping.join(framed(message) for message in MESSAGES)
    for piece in cut(stream, seed):
        seen.give(piece)
    assert seen.texts == MESSAGES
    assert seen.passed == UPGRADE + ping * (len(MESSAGES) - 1)


def test_messages_that_arrive_byte_by_byte_are_whole() -> None:
    seen = Seen()
    for byte in UPGRADE + framed(b"x" * 200) + framed(b"y" * LARGE_BYTES):
        seen.give(bytes([byte]))
    assert seen.texts == [b"x" * 200, b"y" * LARGE_BYTES]


def test_only_large_messages_are_views() -> None:
    seen = Seen()
    for message in (b"x" * (LARGE_BYTES - 1), b"x" * LARGE_BYTES):
        seen.give((UPGRADE if not seen.passed else b"") + framed(message))
    assert [type(message) for message in seen.messages] == [bytes, memoryview]


def test_a_message_of_many_megabytes_arrives_whole() -> None:
    seen = Seen()
    message = bytes(range(256)) * 100_000
    seen.give(UPGRADE + framed(message))
    assert seen.texts == [message]


def test_memory_grows_with_what_arrives_and_not_with_what_is_announced() -> None:
    """Sixty servers that announce 100 MB each took 6 GB of address space with 16 bytes each."""
    seen = Seen()
    seen.give(UPGRADE + b"\x81\x7f" + MAX_MESSAGE_BYTES.to_bytes(8, "big") + b"abcdef")
    assert seen.memory.size_bytes == AHEAD_BYTES
    assert seen.inbox.missing_bytes == MAX_MESSAGE_BYTES - 6
    seen.give(bytes(AHEAD_BYTES))
    assert seen.memory.size_bytes < MAX_MESSAGE_BYTES / 2


def test_a_message_in_use_is_not_overwritten() -> None:
    seen = Seen()
    seen.give(UPGRADE)
    for byte in range(97, 107):
        seen.give(framed(bytes([byte]) * 200_000))
    assert seen.texts == [bytes([byte]) * 200_000 for byte in range(97, 107)]


def test_fragments_go_to_the_library_with_all_that_lies_between_them() -> None:
    seen = Seen()
    pieces = [
        framed(b"a" * 100_000, fin=False),
        framed(b"", Opcode.PING),
        framed(b"b" * 100_000, Opcode.CONT, fin=False),
        framed(b"not now"),  # a message in a message: the library's to refuse
        framed(b"c", Opcode.CONT),
    ]
    seen.give(UPGRADE + b"".join(pieces) + framed(b"whole"))
    assert seen.passed == UPGRADE + b"".join(pieces)
    assert seen.texts == [b"whole"]


@pytest.mark.parametrize(
    "wrong",
    [
        Frame(Opcode.TEXT, b"masked").serialize(mask=True),
        b"\xc1\x08reserved",  # a bit that nobody has agreed on
        b"\x81\x7f" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big") + b"too much",
        framed(b"\x03\xe8bye", Opcode.CLOSE),
        b"\x83\x00",  # an opcode that there is not
    ],
    ids=["masked", "reserved bit", "too large", "close", "no such opcode"],
)
def test_frames_other_than_whole_messages_go_to_the_library_unchanged(wrong: bytes) -> None:
    seen = Seen()
    seen.give(UPGRADE + wrong)
    assert seen.passed == UPGRADE + wrong
    assert not seen.messages


@pytest.mark.parametrize("seed", range(5))
def test_a_refusal_goes_to_the_library_whole(seed: int) -> None:
    seen = Seen(accepted=False)
    refusal = b"HTTP/1.1 503 Service Unavailable\r\n\r\nthere is no room\r\n\r\nreally"
    for piece in cut(refusal, seed):
        seen.give(piece)
    assert seen.passed == refusal


def test_bytes_after_the_end_are_ignored() -> None:
    seen = Seen()
    seen.give(UPGRADE + framed(b"x" * 200_000)[:1000])
    seen.inbox.close()
    seen.give(b"more")
    assert (seen.messages, seen.passed) == ([], UPGRADE)
