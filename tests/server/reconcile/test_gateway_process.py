# SPDX-License-Identifier: Apache-2.0
"""The daemon watches the process of its gateway."""

import asyncio
from pathlib import Path

from openenvd.environments.gateway import process
from openenvd.environments.gateway.configuration import GatewayOptions
from openenvd.schema.layout import Layout
from openenvd.server.reconcile.gateway import GatewayProcess
from openenvd.server.reconcile.work_queue import BackgroundTasks


async def test_a_gateway_is_watched_once_and_again_when_its_watch_has_ended(tmp_path: Path) -> None:
    async def begin_anew() -> None:
        pass

    layout, tasks = Layout(tmp_path), BackgroundTasks()
    gateway = GatewayProcess(tasks, layout, begin_anew)
    watches = []

    async def follow() -> None:
        await gateway.follow()
        watches.append(gateway.watch)

    await follow()  # no launch has started a gateway yet
    await asyncio.to_thread(process.ensure_running, layout, GatewayOptions("127.0.0.1", 0))
    try:
        await follow()
        await follow()
        _, first, second = watches
        assert first is not None
        first.task.cancel()
        await asyncio.wait([first.task])
        await follow()
    finally:
        await gateway.stop()
    assert watches[0] is None
    assert first is second
    assert watches[3] not in (first, None)
    assert process.read_gateway(layout) is None
    await tasks.end()
