# SPDX-License-Identifier: Apache-2.0
"""A wire format for pipes and stream sockets: one JSON object per line. Light for shims."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode_line(message: Mapping[str, object]) -> bytes:
    """Return a message as a line of the wire."""
    return _to_json(message).encode() + b"\n"


def decode_line(line: bytes) -> Json:
    """Return the message that `encode_line` wrote; raises `ValueError` if it is not an object."""
    try:
        message = json.loads(line)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message


class LineBuffer:
    """Assembles lines from the chunks that a pipe delivers."""

    __slots__ = ("_max_bytes", "_rest", "has_overflowed")

    def __init__(self, max_bytes: int) -> None:
        """A line may have `max_bytes`."""
        self._max_bytes = max_bytes
        self._rest = b""
        self.has_overflowed = False  # whether a longer line has been dropped

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._max_bytes:
            self._rest = b""
            self.has_overflowed = True
        return lines
