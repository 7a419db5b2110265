# SPDX-License-Identifier: Apache-2.0
"""An environment that holds `HELD_MB` for `HELD_SECONDS` while it is imported, then is ready."""

from __future__ import annotations

import os
import time

PAGE_BYTES = 4096


def _hold(size_bytes: int, seconds: float) -> None:
    held = bytearray(size_bytes)
    held[::PAGE_BYTES] = b"1" * len(range(0, size_bytes, PAGE_BYTES))
    time.sleep(seconds)


_hold(int(os.environ.get("HELD_MB", "0")) * 2**20, float(os.environ.get("HELD_SECONDS", "0")))


class HoldingEnvironment:
    """Does as little as an environment can."""

    def reset(self) -> dict[str, object]:
        return {}

    def step(self, action: object) -> dict[str, object]:
        return {"action": action}

    @property
    def state(self) -> dict[str, object]:
        return {}
