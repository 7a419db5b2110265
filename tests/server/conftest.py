# SPDX-License-Identifier: Apache-2.0
"""The parts of a daemon, each real: a database's file, an event bus, shims with their servers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection, open_database
from openenvd.schema.settings import Paths
from openenvd.server.events import EventBus
from openenvd.system.process.exit_reason import Detector, ExitKind, ExitReason

from .tracing.conftest import kept as kept

WAIT_SECONDS = 30.0

Json = dict[str, Any]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / "home")
    for folder in (paths.runs, paths.sockets, paths.request_logs, paths.environment_logs):
        folder.mkdir(parents=True, mode=0o700)
    open_database(paths.database)
    return paths


@pytest.fixture
async def store(paths: Paths) -> AsyncIterator[AsyncStore]:
    store = AsyncStore(paths.database)
    yield store
    await store.close()


@pytest.fixture
def dispatch(paths: Paths) -> Iterator[WriteConnection]:
    store = WriteConnection(paths.database)
    yield store
    store.close()


@pytest.fixture
async def bus() -> EventBus:
    return EventBus(asyncio.get_running_loop())


async def until(bus: EventBus, check: Callable[[], Awaitable[bool]]) -> None:
    with bus.subscribe() as subscription:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await check():
                await subscription.next()


def oom_killed(pid: int, peak_bytes: int, limit_bytes: int, **known: Any) -> ExitReason:
    """A process that the kernel killed for memory, by its cgroup's count."""
    known |= {"peak_bytes": peak_bytes, "limit_bytes": limit_bytes, "detector": Detector.CGROUP}
    return ExitReason(ExitKind.OOM_KILLED, pid, signal_number=9, **known)
