# SPDX-License-Identifier: Apache-2.0
"""The form in which batches travel: a JSON text, and large buffers beside it as they are.

    16 bytes    length of the head (4, big endian), of the body (8), of nothing (4 zeros)
    head        {"kind": "batch", "number": 7, "content": …, "buffers": [sizes]}
    body        each buffer, padded so that the next is aligned

The same on a socket and in a file. A reader's buffers are views of the body: nothing is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ..episodes import BytesLike
from ..errors import SendError
from ..folder.layout import padding

PREFIX = struct.Struct(">IQxxxx")
MOST_HEAD_BYTES = 256 << 20
HELLO, WELCOME, BATCH, ACK = "hello", "welcome", "batch", "ack"


@dataclass(frozen=True, slots=True)
class Batch:
    """What is sent: anything that has a JSON form, and buffers that it speaks of by position."""

    content: Any
    buffers: Sequence[BytesLike] = ()

    @property
    def size_bytes(self) -> int:
        """Of the buffers, which are nearly all of it."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


def encode_batch(number: int, batch: Batch) -> list[BytesLike]:
    """A batch as pieces to be written one after the other; the buffers are not copied."""
    views = [memoryview(buffer).cast("B") for buffer in batch.buffers]
    sizes = [view.nbytes for view in views]
    head = {"kind": BATCH, "number": number, "content": batch.content, "buffers": sizes}
    body: list[BytesLike] = []
    for view in views:
        body += [view, bytes(padding(view.nbytes))]
    return [*encode_head(head, sum(map(_padded, sizes))), *body]


def encode_head(head: Mapping[str, Any], body_bytes: int = 0) -> list[BytesLike]:
    """The beginning of a frame, filled with blanks so that an aligned body follows."""
    text = orjson.dumps(head)
    text += b" " * padding(PREFIX.size + len(text))
    return [PREFIX.pack(len(text), body_bytes), text]


def decode_prefix(prefix: BytesLike) -> tuple[int, int]:
    """How long the head and the body are.

    Raises:
        SendError: this is no frame.
    """
    head_bytes, body_bytes = PREFIX.unpack(prefix)
    if head_bytes > MOST_HEAD_BYTES:
        raise SendError("what came is no frame of ours", "see what else connects to this address")
    return head_bytes, body_bytes


def decode_head(text: BytesLike) -> dict[str, Any]:
    """What the frame says.

    Raises:
        SendError: this is no frame.
    """
    try:
        head = orjson.loads(text)
    except ValueError as exc:
        raise SendError(f"what came is no frame of ours: {exc}") from exc
    if not isinstance(head, dict) or "kind" not in head:
        raise SendError("what came is no frame of ours")
    return head


def decode_batch(head: Mapping[str, Any], body: memoryview) -> Batch:
    """The batch of a frame, on the body's memory."""
    return Batch(head["content"], tuple(_views(head["buffers"], body)))


def _views(sizes: Sequence[int], body: memoryview) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        yield body[at : at + size]
        at += _padded(size)


def _padded(size_bytes: int) -> int:
    return size_bytes + padding(size_bytes)
