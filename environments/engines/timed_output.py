# SPDX-License-Identifier: Apache-2.0
"""An instance's output with times, as engines deliver it, and where to go on in it.

A cursor is the time of the last piece, and how many pieces had it: `2026-05-04T10:00:00.5Z#2`.
Engines copy standard output and error into one log side by side, so a piece may stand behind
another with a later time: a cursor is a place in the log, and its time only says where to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from .base import LogChunk

OUT_OF_ORDER = timedelta(seconds=1)  # by more, no piece stands before one of an earlier time


def since_of(cursor: str | None) -> datetime | None:
    """Return from when, to the second, output is to be asked for again; None: all of it."""
    written = (cursor or "").partition("#")[0]
    return (_time_of(written) - OUT_OF_ORDER).replace(microsecond=0) if written else None


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
    """Yield the pieces of an output with times that stand behind a cursor's.

    When the cursor's own piece is not there any more, those of later times are yielded.
    """
    last = (cursor or "").partition("#")[0]
    is_behind, held = cursor is None, list[LogChunk]()
    time, pieces = "", 0
    for frame in frames:
        written, _, data = frame.partition(b" ")
        pieces = pieces + 1 if written.decode() == time else 1
        time = written.decode()
        chunk = LogChunk(data=data, cursor=f"{time}#{pieces}")
        if is_behind:
            yield chunk
        elif chunk.cursor == cursor:
            is_behind, held = True, []
        elif time > last:  # before the cursor's piece, or that is gone
            held.append(chunk)
            if _time_of(time) - _time_of(last) > OUT_OF_ORDER:
                yield from held
                is_behind, held = True, []
    yield from held


def _time_of(written: str) -> datetime:
    return datetime.fromisoformat(written).astimezone(UTC)
