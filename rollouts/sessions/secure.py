# SPDX-License-Identifier: Apache-2.0
"""What secure connections share: whom to trust.

Reading the machine's certificates takes 23 ms. For each connection anew, and on the loop, hundreds
of sessions held it for seconds.
"""

from __future__ import annotations

import asyncio
import ssl


class Secure:
    """Python's usual context (`SSL_CERT_FILE` and `SSL_CERT_DIR` say whom else to trust)."""

    def __init__(self) -> None:
        self._reading = asyncio.Lock()
        self._context: ssl.SSLContext | None = None

    async def context(self) -> ssl.SSLContext:
        """Read by the first who asks, on a thread."""
        async with self._reading:
            if self._context is None:
                self._context = await asyncio.to_thread(ssl.create_default_context)
        return self._context
