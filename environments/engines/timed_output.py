# SPDX-License-Identifier: Apache-2.0
"""An instance's output with times, as engines deliver it, and where to go on in it.

A cursor is the time of the last piece, and how many pieces had it: `2026-05-04T10:00:00.5Z#2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from .base import LogChunk


def since_of(cursor: str | None) -> datetime | None:
    """Return from when, to the second, output is to be asked for again; None: all of it."""
    written = (cursor or "").partition("#")[0]
    return (
        datetime.fromisoformat(written).astimezone(UTC).replace(microsecond=0) if written else None
    )


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines of a stream, and what is left at its end."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def pieces_after(frames: Iterable[bytes], cursor: str | None) -> Iterator[LogChunk]:
    """Yield the pieces of an output with times that are after a cursor."""
    last, _, count = (cursor or "").partition("#")
    seen = int(count or 0)  # pieces of that very time
    time, pieces = last, 0
    for frame in frames:
        written, _, data = frame.partition(b" ")
        pieces = pieces + 1 if written.decode() == time else 1
        time = written.decode()
        if time < last or (time == last and pieces <= seen):
            continue
        yield LogChunk(data=data, cursor=f"{time}#{pieces}")
