# SPDX-License-Identifier: Apache-2.0
"""An instance's output with times, as engines deliver it; and `LogPump`, which writes it to a log.

A cursor is the time of the last piece, and how many pieces had it: `2026-05-04T10:00:00.5Z#2`.
Engines copy standard output and error into one log side by side, so a piece may come after another
with a later time: a cursor is a place in the log, and its time only says where to look.

    engine.logs ──chunks──▶ thread ──▶ log file
                               └─────▶ <run dir>/log-cursor.json    how far it has come

The cursor is written after the log, with the log's size. If an agent is killed in between, the next
one skips as many bytes of the repeated output as the log has beyond that size. So no piece is lost
or doubled, unless the kill came while the log was cut to its limit. When the engine is gone, or its
library fails, the thread continues from the cursor later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ...system.files.log_files import BoundedLog
from ...system.process.backoff import backoff_seconds
from ..shim.files import open_log, read_json, write_json
from .base import Engine, EngineGone, EngineRefused, Instance, LogChunk

OUT_OF_ORDER = timedelta(seconds=1)  # the most by which a piece comes before an earlier one


def since_of(cursor: str | None) -> datetime | None:
    """Return the time, in whole seconds, since which to request output; None: all of it."""
    written = (cursor or "").partition("#")[0]
    return (_time_of(written) - OUT_OF_ORDER).replace(microsecond=0) if written else None


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the whole lines of a stream, and the rest at its end."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def pieces_after(frames: Iterable[bytes], cursor: str | None) -> Iterator[LogChunk]:
    """Yield the pieces of an output after the cursor's piece, or of later times if that is gone."""
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
        elif time > last:  # the cursor's piece is still to come, or is gone
            held.append(chunk)
            if _time_of(time) - _time_of(last) > OUT_OF_ORDER:
                yield from held
                is_behind, held = True, []
    yield from held


def _written_at(cursor: str) -> float | None:
    """Return the Unix time of a cursor; None if the engine's cursors are offsets."""
    written, mark, _ = cursor.partition("#")
    return _time_of(written).timestamp() if mark else None


def _time_of(written: str) -> datetime:
    return datetime.fromisoformat(written).astimezone(UTC)


log = logging.getLogger(__name__)

CURSOR_FILE_NAME = "log-cursor.json"
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0


class LogPump:
    """Follows the output of one instance; the event `ended` is set on the loop at its end."""

    def __init__(
        self, engine: Engine, instance: Instance, *, run_dir: Path, log_path: str, max_bytes: int
    ) -> None:
        self.ended = asyncio.Event()
        self._engine = engine
        self._instance = instance
        self._cursor_path = run_dir / CURSOR_FILE_NAME
        self._log_path = log_path
        self._log = BoundedLog(log_path, max_bytes)
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        name = f"log of {instance.labels.replica}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def stop(self) -> None:
        """End the thread, with the next piece or the engine's stream."""
        self._stopped.set()

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                self._follow()
                break
            except EngineRefused:  # it was removed
                break
            except (EngineGone, OSError):
                failures += 1
            except Exception:  # of the engine's library
                if not failures:
                    log.exception("cannot follow the log of %s", self._instance.labels.replica)
                failures += 1
            pause = backoff_seconds(failures, first=FIRST_PAUSE_SECONDS, longest=MAX_PAUSE_SECONDS)
            self._stopped.wait(pause)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.ended.set)

    def _follow(self) -> None:
        descriptor = open_log(self._log_path)
        try:
            cursor, size = self._read_cursor(os.fstat(descriptor).st_size)
            ahead = max(0, os.fstat(descriptor).st_size - size)
            for chunk in self._engine.logs(self._instance, cursor):
                if self._stopped.is_set():
                    return
                data = chunk.data[ahead:]
                if os.write(descriptor, data) < len(data):
                    raise OSError("there is no room for the whole piece")  # the rest comes again
                ahead = max(0, ahead - len(chunk.data))
                self._log.bound(_written_at(chunk.cursor))
                self._write_cursor(chunk.cursor, os.fstat(descriptor).st_size - ahead)
        finally:
            os.close(descriptor)

    def _read_cursor(self, size: int) -> tuple[str | None, int]:
        """Return the cursor from which to continue, and the log's size when that was written."""
        match read_json(self._cursor_path):
            case {"instance": self._instance.id, "cursor": cursor, "size": int(known_size)}:
                return cursor, known_size
        self._write_cursor(None, size)
        return None, size

    def _write_cursor(self, cursor: str | None, size: int) -> None:
        known = {"instance": self._instance.id, "cursor": cursor, "size": size}
        write_json(str(self._cursor_path), known)
