# SPDX-License-Identifier: Apache-2.0
"""Runs a process's event loop: uvloop's where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable


def run_loop(main: Awaitable[None], on_end: Callable[[], None]) -> None:
    """Run `main` on the fastest event loop there is; `on_end` before the loop is taken down."""
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop

    async def run() -> None:
        await main

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
        on_end()
