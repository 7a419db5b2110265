# SPDX-License-Identifier: Apache-2.0
"""Frames on asyncio's streams, a bounded piece at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..episodes import BytesLike
from .frames import PREFIX, decode_head, decode_prefix

PIECE_BYTES = 256 << 10  # of one write or read: what the loop does in one go
Address = tuple[str, int] | Path
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(address: Address) -> Streams:
    """To a host and port, or to a Unix socket."""
    if isinstance(address, Path):
        return await asyncio.open_unix_connection(address, limit=PIECE_BYTES)
    return await asyncio.open_connection(*address, limit=PIECE_BYTES)


async def write_pieces(writer: asyncio.StreamWriter, pieces: Sequence[BytesLike]) -> None:
    """All of it, never with more than a piece waiting in the transport."""
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for at in range(0, view.nbytes, PIECE_BYTES):
            writer.write(view[at : at + PIECE_BYTES])
            await writer.drain()


async def read_head(reader: asyncio.StreamReader) -> tuple[dict[str, Any], int]:
    """What the next frame says, and how long its body is.

    Raises:
        EOFError: the other side has gone.
        SendError: this is no frame.
    """
    head_bytes, body_bytes = decode_prefix(await reader.readexactly(PREFIX.size))
    return decode_head(await reader.readexactly(head_bytes)), body_bytes


async def read_body(reader: asyncio.StreamReader, size_bytes: int) -> memoryview:
    """Into memory of its own, once.

    Raises:
        EOFError: the other side has gone.
    """
    body = memoryview(bytearray(size_bytes))
    at = 0
    while at < size_bytes:
        piece = await reader.read(min(PIECE_BYTES, size_bytes - at))
        if not piece:
            raise EOFError("the connection ended in the middle of a batch")
        body[at : at + len(piece)] = piece
        at += len(piece)
    return body


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], memoryview]:
    """A whole frame."""
    head, body_bytes = await read_head(reader)
    return head, await read_body(reader, body_bytes)
