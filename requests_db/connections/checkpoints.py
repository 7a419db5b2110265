# SPDX-License-Identifier: Apache-2.0
"""Moves committed pages from the write-ahead log into the database, on a thread of its own.

SQLite would do it inside whichever commit finds the log long: two fsyncs and a thousand pages, some
milliseconds that one request in forty would wait for. Here:

    a connection commits ──committed()──▶ every `COMMITS` of them ──▶ thread ──▶ wal_checkpoint

A passive checkpoint waits for no reader or writer, and none waits for it. If it never completes (or
fails: a full disk, say, which the next commit will report), commits make the checkpoint themselves
once the log has `sqlite.MOST_LOG_PAGES`.

The thread starts with the first checkpoint and exits in `close`. `_commits` is only touched by the
holder of the write lock (`write_connection.py`). Where no thread can be started, the commits have
been made all the same: `committed` raises nothing, and starts it some commits later.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from . import sqlite

log = logging.getLogger(__name__)

COMMITS = 256  # between checkpoints: some hundred pages


class Checkpointer:
    """Makes one database's checkpoints."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._commits = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def committed(self) -> None:
        """Count a transaction that has ended; called with the write lock held. Never raises."""
        self._commits += 1
        if self._commits < COMMITS:
            return
        self._commits = 0
        if self._thread is None:
            self._start()
        self._wake.set()

    def close(self) -> None:
        """Stop the thread, if there is one; the next commits would start another."""
        if self._thread is not None:
            self._closing = True
            self._wake.set()
            self._thread.join()
            self._thread = None
            self._wake.clear()

    def _start(self) -> None:
        self._closing = False
        thread = threading.Thread(target=self._run, name="requests-db-checkpoints", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no room for another thread
            log.warning("no checkpoint of %s for now: %s", self._path, exc)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closing:
                return
            try:
                sqlite.checkpoint(self._path)
            except sqlite.DRIVER_ERRORS as exc:
                log.debug("checkpoint of %s failed: %s", self._path, exc)
