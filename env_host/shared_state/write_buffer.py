# SPDX-License-Identifier: Apache-2.0
"""`WriteBuffer`: frames of one iteration of the loop leave in one write.

A write is a system call, the largest part of the cost of a small call.
"""

from __future__ import annotations

import asyncio

_JOIN_BYTES = 16 * 1024  # larger frames are written as they are, uncopied


class WriteBuffer:
    """The frames that one end of a connection sends; none before `attach` and after `detach`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames: list[bytes] = []

    def attach(self, transport: asyncio.Transport) -> None:
        """Send to this transport from now on."""
        self._transport = transport

    def detach(self) -> None:
        """Drop all frames: the connection is gone."""
        self._transport = None
        self._frames.clear()

    def send(self, frame: bytes) -> None:
        """Send a frame with all others of this iteration."""
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
