# SPDX-License-Identifier: Apache-2.0
"""A client's text frames (RFC 6455, 5.2 and 5.3): a head, a key, and the text under it.

The library asks the system for four random bytes with each frame, and builds it up in six writes:
a sixth of what a small step cost. The keys here come from the same generator, a thousand at a time.
"""

from __future__ import annotations

import os

from ...system.websocket import KEY_BYTES, frame_head

try:
    from websockets.speedups import apply_mask
except ImportError:  # where it was installed without a compiler
    from ...system.websocket import apply_mask

KEYS_AT_ONCE = 1024


class Masks:
    """Unpredictable masking keys, each used once."""

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
    return frame_head(len(text), key=key) + apply_mask(text, key)
