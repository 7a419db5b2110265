# SPDX-License-Identifier: Apache-2.0
"""The handler that `watchdog` calls when a log has changed.

A module of its own, so that it is imported with the first follower of a log (`log_files.py`) and
not at every start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler


class Handler(FileSystemEventHandler):
    """From the watcher's thread to the loop."""

    def __init__(self, changed: Callable[[Path], None], loop: asyncio.AbstractEventLoop) -> None:
        self._changed = changed
        self._loop = loop

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Pass on that a file changed."""
        if event.event_type not in ("modified", "created", "moved"):
            return  # reading a log is an event too
        path = Path(os.fsdecode(event.dest_path or event.src_path))
        try:
            self._loop.call_soon_threadsafe(self._changed, path)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
