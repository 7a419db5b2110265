# SPDX-License-Identifier: Apache-2.0
"""What the machine would still give, less the reserve and what running tasks have yet to grow by.

Looked at no more often than every `LOOK_SECONDS`; what is submitted in between is counted with
what it is expected to need. Used under the pools' lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...processes.resources.limits import available_memory_bytes

LOOK_SECONDS = 0.1


class MachineGauge:
    """Remembers the last look."""

    def __init__(self, reserve_bytes: int) -> None:
        self._reserve_bytes = reserve_bytes
        self._looked_at = 0.0
        self._left_bytes = 0

    def committed(self, expected_bytes: int) -> None:
        """A task was submitted."""
        self._left_bytes -= expected_bytes

    def available_bytes(self, held_bytes: Callable[[], int], expected_bytes: int) -> int:
        """What is left for further tasks. `held_bytes` tells what busy workers hold already of
        the `expected_bytes` that all tasks under way are expected to need."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            yet_to_grow = max(0, expected_bytes - held_bytes())
            self._left_bytes = available_memory_bytes() - self._reserve_bytes - yet_to_grow
        return self._left_bytes
