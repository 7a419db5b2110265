# SPDX-License-Identifier: Apache-2.0
"""Splits received bytes: whole messages to the session, all other frames to the library.

    socket ─▶ `room` ─▶ `take` ─┬─ a whole text or binary frame ──────────────▶ on_message
                                ├─ one that is not all here: its own memory; the socket fills it
                                └─ handshake, fragments, pings, closes, what is wrong ─▶ on_bytes

The library parses frames in Python, out of a buffer that it copies three times. A message with an
observation is a head of at most ten bytes and the text. A large one is received into the memory in
which it stays: one of up to 4 MB is never copied, and of a longer one a third, as its memory grows.
All frames that are not plain, whole messages go to the library unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from ...env_host.protocol import MAX_MESSAGE_BYTES
from ...system.websocket import BINARY, CONTINUATION, FIN, OPCODE, TEXT, parse_head
from ..episodes import BytesLike
from .answers import LARGE_BYTES
from .message_memory import MessageMemory

SCRATCH_BYTES = 256 << 10  # into which all connections of a loop receive, one after the other
# A message of more is received into memory that grows with it: what is announced may never come.
AHEAD_BYTES = 4 << 20
GROWTH = 4  # each time; so a third is copied at most, and nothing up to `AHEAD_BYTES`
_END_OF_HEAD = b"\r\n\r\n"
_WHOLE = (FIN | TEXT, FIN | BINARY)


class Inbox:
    """The inbox of one connection. The loop's connections share `scratch`, for one read each."""

    def __init__(
        self,
        scratch: memoryview,
        memory: MessageMemory,
        *,
        on_bytes: Callable[[bytes], bool],
        on_message: Callable[[BytesLike], None],
    ) -> None:
        """`on_bytes` returns whether the handshake is over, and frames follow."""
        self._scratch = scratch
        self._memory = memory
        self._on_bytes = on_bytes
        self._on_message = on_message
        self._upgrade: bytes | None = b""  # as far as it has come; None: frames follow
        self._head = b""  # of a frame, not all of it
        self._passing_bytes = 0  # of a frame, still to come, that are the library's
        self._is_fragmented = False
        self._message: memoryview | None = None  # under way, or the first part of it
        self._message_bytes = 0  # of all of it
        self._filled_bytes = 0

    @property
    def room(self) -> memoryview:
        """The memory for the next bytes."""
        if self._message is not None:
            return self._message[self._filled_bytes :]
        return self._scratch

    @property
    def missing_bytes(self) -> int:
        """The bytes that the message in progress still lacks."""
        return 0 if self._message is None else self._message_bytes - self._filled_bytes

    def take(self, size_bytes: int) -> None:
        """Takes bytes that were received into the `room`."""
        if self._message is not None:
            self._fill(size_bytes)
        elif self._upgrade is not None:
            self._shake_hands(bytes(self._scratch[:size_bytes]))
        elif self._head:
            head, self._head = self._head, b""
            self._walk(memoryview(head + self._scratch[:size_bytes]))
        else:
            self._walk(self._scratch[:size_bytes])

    def close(self) -> None:
        """Ends the inbox, and releases its callbacks."""
        self._message = None
        self._on_bytes, self._on_message = _refuse, lambda message: None

    def _fill(self, size_bytes: int) -> None:
        self._filled_bytes += size_bytes
        message = self._message
        if message is None or self._filled_bytes < len(message):
            return
        if self._filled_bytes < self._message_bytes:
            self._message = self._memory.take(min(GROWTH * len(message), self._message_bytes))
            self._message[: len(message)] = message
            return
        self._message = None
        self._on_message(message if len(message) >= LARGE_BYTES else bytes(message))

    def _shake_hands(self, data: bytes) -> None:
        """Takes the handshake; frames follow it, or the body of a refusal."""
        assert self._upgrade is not None
        self._upgrade += data
        head, end, rest = self._upgrade.partition(_END_OF_HEAD)
        if not end:
            self._on_bytes(data)
            return
        before = len(self._upgrade) - len(data)
        if self._on_bytes((head + end)[before:]):
            self._upgrade = None
            self._walk(memoryview(rest))
        else:
            self._upgrade = b""
            self._on_bytes(rest)

    def _walk(self, data: memoryview) -> None:
        """Takes frames one by one."""
        at = 0
        while at < len(data):
            if self._passing_bytes:
                at = self._pass(data, at)
                continue
            head = parse_head(data, at)
            if head is None:
                self._head = bytes(data[at:])
                return
            first, is_masked, payload_at, end = head
            is_message = first in _WHOLE and not is_masked and not self._is_fragmented
            if is_message and end - payload_at <= MAX_MESSAGE_BYTES:
                at = self._begin(data, payload_at, end)
            else:
                self._note_fragments(first)
                self._passing_bytes = end - at

    def _begin(self, data: memoryview, at: int, end: int) -> int:
        """Take a message between these; where the next frame begins, as far as it has come."""
        payload_bytes = end - at
        if payload_bytes < LARGE_BYTES and end <= len(data):
            self._on_message(bytes(data[at:end]))
            return end
        here = data[at:end]
        is_large = payload_bytes >= LARGE_BYTES
        take = self._memory.take if is_large else lambda size: memoryview(bytearray(size))
        self._message, self._filled_bytes = take(min(payload_bytes, AHEAD_BYTES)), 0
        self._message_bytes = payload_bytes
        self._message[: len(here)] = here
        self._fill(len(here))
        return at + len(here)

    def _pass(self, data: memoryview, at: int) -> int:
        piece = bytes(data[at : at + self._passing_bytes])
        self._passing_bytes -= len(piece)
        self._on_bytes(piece)
        return at + len(piece)

    def _note_fragments(self, first: int) -> None:
        """A whole message in the middle of another one is the library's to refuse."""
        if first & OPCODE in (TEXT, BINARY, CONTINUATION):
            self._is_fragmented = not first & FIN


def _refuse(data: bytes) -> bool:
    """Ignores frames after the end."""
    return True
