# SPDX-License-Identifier: Apache-2.0
"""The benchmark environment, but some memory of each step is never given back."""

from __future__ import annotations

import os
from typing import Any

from openenvd.env_host.bundled.benchmark.environment import BenchmarkEnvironment

LEAK_BYTES = int(os.environ["LEAK_BYTES"])  # a step

_leaked: list[bytes] = []


class LeakyEnvironment(BenchmarkEnvironment):
    """Until it is killed."""

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Wait for `action.wait_seconds`, and leak."""
        _leaked.append(os.urandom(LEAK_BYTES))
        return await super().step_async(action, timeout_s, **kwargs)
