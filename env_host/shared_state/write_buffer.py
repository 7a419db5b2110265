# SPDX-License-Identifier: Apache-2.0
"""`Outgoing`: frames of one turn of the loop leave in one write.

A write is a system call, and dearer than all else that a small call costs.
"""

from __future__ import annotations

import asyncio

_JOIN_BYTES = 16 * 1024  # larger frames are handed over as they are, uncopied


class WriteBuffer:
    """What one end of a connection has to say. Silent before `attach` and after `detach`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames: list[bytes] = []

    def attach(self, transport: asyncio.Transport) -> None:
        """From here on it is heard."""
        self._transport = transport

    def detach(self) -> None:
        """The connection is gone."""
        self._transport = None
        self._frames.clear()

    def send(self, frame: bytes) -> None:
        """Send a frame with all others of this turn."""
        if self._transport is None:
            return
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(frame)

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        if self._transport is None:
            return
        small: list[bytes] = []
        for frame in frames:
            if len(frame) <= _JOIN_BYTES:
                small.append(frame)
                continue
            self._write(small)
            small = []
            self._transport.write(frame)
        self._write(small)

    def _write(self, frames: list[bytes]) -> None:
        if frames and self._transport is not None:
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
