# SPDX-License-Identifier: Apache-2.0
"""The dependencies of the HTTP handlers: one value on the application's state."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from ...executor.executor import BurstableExecutor
from ...requests_db.async_store import AsyncStore
from ...schema.settings import Paths, Settings
from ...system.process.loop_lag import EventLoopLagMonitor
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.request_traces import RequestTraces
from ..dispatch.submission import Submitter
from ..events.bus import EventBus
from ..reconcile.reconciler import Reconciler
from .replay import ReplayReader


@dataclass(frozen=True)
class Dependencies:
    """The dependencies of the HTTP handlers."""

    paths: Paths
    settings: Settings
    identity: dict[str, Any]  # the contents of daemon.json
    limits: dict[str, Any]
    store: AsyncStore
    executor: BurstableExecutor
    reconciler: Reconciler
    dispatcher: Dispatcher
    submitter: Submitter
    bus: EventBus
    lag: EventLoopLagMonitor  # of the one event loop
    stopping: asyncio.Event  # set when the daemon is to end: streams end with it
    traces: RequestTraces | None = None  # where traces are on
    began_at: float = field(default_factory=time.monotonic)
    replay: ReplayReader = field(default_factory=ReplayReader)


# Asynchronous, though it awaits nothing: FastAPI runs any other dependency in a pool of threads,
# 40 of them, each of which then contends with the loop for every call.
async def _deps(request: Request) -> Dependencies:
    deps: Dependencies = request.app.state.deps
    return deps


Injected = Annotated[Dependencies, Depends(_deps)]
