# SPDX-License-Identifier: Apache-2.0
"""`GatewayProcess`: keeps the gateway running after a launch has started its process.

    the gateway's shim ──▶ ReplicaWatch ──▶ start again, a new shim
                               └─ given up ─▶ a pause, then a new watch

Its port is kept from other users while the daemon runs, also when the shim has been killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ...environments.gateway import process
from ...environments.replica_policy import MAX_PAUSE_SECONDS
from ...requests_db.records import Replica, RequestError
from ...schema.layout import Layout
from .replica_watch import ReplicaWatch, new_replica
from .work_queue import BackgroundTasks

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GatewayProcess:
    """Owns the watch over the process, and its port."""

    tasks: BackgroundTasks
    layout: Layout
    begin_anew: Callable[[], Coroutine[Any, Any, None]]  # follows whatever runs by then
    watch: ReplicaWatch | None = field(init=False, default=None)
    _port_guard: contextlib.ExitStack = field(init=False, default_factory=contextlib.ExitStack)

    async def follow(self) -> None:
        """Watch the process of the gateway that a launch has started by now."""
        found = await asyncio.to_thread(process.read_gateway, self.layout)
        watch = self.watch
        if found is None or (watch and watch.is_of(found.run_file) and not watch.task.done()):
            return
        await self._unwatch()
        self._port_guard.close()
        with contextlib.suppress(OSError):  # another user has it, so Envoy's start fails, too
            self._port_guard.enter_context(process.hold_port(found))
        self.watch = ReplicaWatch(
            new_replica(found.run_file),
            found.run_file,
            _log_state,
            self._give_up,
            revive=lambda _: process.revive(self.layout),
        )
        self.watch.is_kept.set()
        self.watch.task = self.tasks.spawn(self.watch.run(), "watch the gateway")

    async def _give_up(self, _: Replica, error: RequestError) -> None:
        """Pause, and begin again: environments have no other address."""
        log.error("the gateway cannot be kept running: %s", error.message)
        self.tasks.spawn(self._begin_anew(), "restart the gateway")

    async def _begin_anew(self) -> None:
        await asyncio.sleep(MAX_PAUSE_SECONDS)
        await self._unwatch()
        await self.begin_anew()

    async def _unwatch(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.task.cancel()
            await asyncio.gather(watch.task, return_exceptions=True)

    async def stop(self) -> None:
        """End the process; the caller has its lock."""
        await self._unwatch()
        self._port_guard.close()
        await asyncio.to_thread(process.stop, self.layout)


async def _log_state(replica: Replica) -> None:
    log.info("the gateway is %s", replica.state.value, extra={"pid": replica.pid})
