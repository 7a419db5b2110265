# SPDX-License-Identifier: Apache-2.0
"""Moves what was committed from the write-ahead log into the database, off everybody's way.

SQLite would do it inside whichever commit finds the log long: two fsyncs and a thousand pages, some
milliseconds that one request in forty would wait for. Here a thread of its own does it:

    a link commits ──committed()──▶ every `COMMITS` of them ──▶ thread ──▶ PRAGMA wal_checkpoint

A passive checkpoint waits for nobody and nobody waits for it. If it never gets its turn (or fails:
a full disk, say, which the next commit will tell), commits do it themselves once the log has
`sqlite.MOST_LOG_PAGES`.

The thread begins with the first checkpoint and ends with `close`. `_commits` is only ever touched
by whoever has the turn to write (`connections.py`).
"""

from __future__ import annotations

import logging
import threading

from sqlalchemy import URL

from . import sqlite

log = logging.getLogger(__name__)

COMMITS = 256  # between checkpoints: some hundred pages


class Checkpointer:
    """One database's checkpoints; for a database that needs none, nothing."""

    def __init__(self, url: URL) -> None:
        self._url = url
        self._commits = 0
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def committed(self) -> None:
        """A transaction has ended; by whoever has the turn to write."""
        self._commits += 1
        if self._commits < COMMITS:
            return
        self._commits = 0
        if self._thread is None and sqlite.needs_checkpoints(self._url):
            self._closing = False
            self._thread = threading.Thread(
                target=self._run, name="requests-db-checkpoints", daemon=True
            )
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End the thread, if there is one; the next commits would begin another."""
        if self._thread is not None:
            self._closing = True
            self._wake.set()
            self._thread.join()
            self._thread = None
            self._wake.clear()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closing:
                return
            try:
                sqlite.checkpoint(self._url)
            except sqlite.DRIVER_ERRORS as exc:
                log.debug("no checkpoint of %s: %s", self._url.database, exc)
