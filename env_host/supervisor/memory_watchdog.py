# SPDX-License-Identifier: Apache-2.0
"""`MemoryWatch`: ends isolated sessions over their cap, where no cgroup caps them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from .children import Child
from .session_memory import cap_sentence, held_bytes

LOOK_SECONDS = 0.25  # at the memory of isolated sessions


class MemoryWatch:
    """Looks at them now and then."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit = limit_bytes
        self._next_look = 0.0

    def due(self, children: Iterable[Child]) -> float | None:
        """When to look next; None: there is nobody to look at."""
        is_wanted = self._limit is not None and any(_is_uncapped(each) for each in children)
        return self._next_look if is_wanted else None

    def look(self, children: Iterable[Child]) -> None:
        """Look, when it is time."""
        now = time.monotonic()
        if self._limit is None or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for each in children:
            if _is_uncapped(each) and held_bytes(each.pid) > self._limit:
                each.killed_for = cap_sentence(self._limit)
                os.kill(each.pid, signal.SIGKILL)


def _is_uncapped(each: Child) -> bool:
    return each.is_isolated and each.group is None
