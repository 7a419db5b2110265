# SPDX-License-Identifier: Apache-2.0
"""A replica's control socket: the protocol of a shim, on the agent's loop.

Each client is sent the status when it connects and whenever it has changed. A status is whole in
itself: a client that reads slowly is sent the newest one only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from ..shim.connections import MAX_LINE_BYTES, error_line
from ..shim.files import open_control_socket

LAST_STATUS_SECONDS = 1.0  # for clients to read the last status


class StatusServer:
    """The clients of one replica.

    Args:
        path: Where they connect.
        status_line: Makes the line that they are sent.
        obey: Called with each line that one of them sends; raises `ValueError` for one that
            cannot be understood.
    """

    def __init__(
        self, path: str, status_line: Callable[[], bytes], obey: Callable[[bytes], None]
    ) -> None:
        self._path = path
        self._status_line = status_line
        self._obey = obey
        self._server: asyncio.Server | None = None
        self._changed: dict[asyncio.StreamWriter, asyncio.Event] = {}

    async def open(self) -> None:
        """Listen; a socket that a killed agent left is replaced.

        Raises:
            OSError: The socket cannot be made.
        """
        control = open_control_socket(self._path)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=control, limit=MAX_LINE_BYTES
        )

    def send_status(self) -> None:
        """Send every client the status, which has changed."""
        for changed in self._changed.values():
            changed.set()

    async def close(self) -> None:
        """Accept no more, give clients that read time for the last status, and close."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # noqa: PTH108  at once
        writers = list(self._changed)
        self._changed.clear()  # ends `_send_statuses`
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LAST_STATUS_SECONDS):
                for writer in writers:
                    writer.write(self._status_line())
                    await writer.drain()
        for writer in writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # closed since it was accepted
            writer.write(self._status_line())
            writer.close()
            return
        changed = self._changed[writer] = asyncio.Event()
        changed.set()
        sending = asyncio.create_task(self._send_statuses(writer, changed))
        try:
            async for line in reader:
                try:
                    self._obey(line)
                except ValueError as exc:
                    writer.write(error_line(str(exc)))
        except (OSError, ValueError):  # it broke off; or its line has no end
            pass
        finally:
            self._changed.pop(writer, None)
            sending.cancel()
            writer.close()

    async def _send_statuses(self, writer: asyncio.StreamWriter, changed: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while True:
                await changed.wait()
                if writer not in self._changed:
                    return
                changed.clear()
                writer.write(self._status_line())
                await writer.drain()
