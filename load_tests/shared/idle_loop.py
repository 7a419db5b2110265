# SPDX-License-Identifier: Apache-2.0
"""How late a loop is that does nothing, until stdin ends: the limit for `rollouts.py`."""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from openenvd.system.process.loop_lag import EventLoopLagMonitor

WINDOW_SECONDS = 3600.0


async def _measure() -> None:
    with EventLoopLagMonitor("idle", window_seconds=WINDOW_SECONDS) as lag:
        await asyncio.to_thread(sys.stdin.read)
        seen = lag.snapshot()
    print(json.dumps([round(seen.p99_seconds * 1e3, 2), round(seen.worst_seconds * 1e3, 2)]))


if __name__ == "__main__":
    uvloop.run(_measure())
