# SPDX-License-Identifier: Apache-2.0
"""What a server says to its shim, one JSON object a line (`env_host.protocol` lists them).

One pipe a generation. A line that is no message, or has no end, is dropped. Light: a shim
imports it.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Iterator

from ..system.json_lines import Json, LineBuffer, decode_line

MAX_LINE_BYTES = 256 * 1024
_READ_BYTES = 65536


class NotifyPipe:
    """The reading end, watched by `selector`, which calls `on_words`; never blocks."""

    def __init__(self, selector: selectors.BaseSelector, on_words: Callable[[], None]) -> None:
        self._selector = selector
        self._on_words = on_words
        self._fd: int | None = None
        self._lines = LineBuffer(MAX_LINE_BYTES)

    def listen_to(self, fd: int) -> None:
        """A new server's, ours to close; the last one's is closed."""
        self.close()
        os.set_blocking(fd, False)
        self._fd, self._lines = fd, LineBuffer(MAX_LINE_BYTES)
        self._selector.register(fd, selectors.EVENT_READ, self._on_words)

    def messages(self) -> Iterator[Json]:
        """What has come in; closed at the end of the pipe, and then there is nothing."""
        while self._fd is not None:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            for line in self._lines.feed(data):
                try:
                    message = decode_line(line)
                except ValueError:
                    continue
                yield message
            if not data:
                self.close()

    def close(self) -> None:
        """Hear no more of this server."""
        if self._fd is not None:
            self._selector.unregister(self._fd)
            os.close(self._fd)
            self._fd = None
