# SPDX-License-Identifier: Apache-2.0
"""A client's text frames (RFC 6455, 5.2 and 5.3): a head, a key, and the text under it.

The library asks the system for four random bytes with each frame, and builds it up in six writes:
a sixth of what a small step cost. The keys here come from the same generator, a thousand at a time.
"""

from __future__ import annotations

import os
import struct

try:
    from websockets.speedups import apply_mask
except ImportError:  # where it was installed without a compiler
    from websockets.utils import apply_mask

KEY_BYTES = 4
KEYS_AT_ONCE = 1024
_FIN_TEXT, _MASKED = 0x81, 0x80
_SHORT, _MEDIUM, _LONG = struct.Struct("!BB"), struct.Struct("!BBH"), struct.Struct("!BBQ")


class Masks:
    """Keys that nobody can foresee, each used once."""

    def __init__(self) -> None:
        self._keys = b""
        self._at = 0

    def key(self) -> bytes:
        """The next one."""
        if self._at == len(self._keys):
            self._keys, self._at = os.urandom(KEY_BYTES * KEYS_AT_ONCE), 0
        self._at += KEY_BYTES
        return self._keys[self._at - KEY_BYTES : self._at]


def client_frame(text: bytes, key: bytes) -> bytes:
    """The text as one frame."""
    return _head(len(text)) + key + apply_mask(text, key)


def _head(size_bytes: int) -> bytes:
    if size_bytes < 126:
        return _SHORT.pack(_FIN_TEXT, _MASKED | size_bytes)
    if size_bytes < 1 << 16:
        return _MEDIUM.pack(_FIN_TEXT, _MASKED | 126, size_bytes)
    return _LONG.pack(_FIN_TEXT, _MASKED | 127, size_bytes)
