# SPDX-License-Identifier: Apache-2.0
"""`MemoryHistory`: memory by what holds it, now and over the last hour.

Memory is measured in a thread, every 30 seconds, and every 2 seconds while a page is open; less
often where that takes long, as with many replicas: at most half a percent of a core, or a twentieth
while a page is open. Sizes are bytes.

The hour is kept in a file, and so survives a restart of the daemon.

`MachineSource` shows the daemon, memory, plan and workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import time
from collections import deque
from dataclasses import asdict, astuple, dataclass, fields

import anyio

from ...environments.shim.files import read_json, write_json
from ...executor.messages import ExecutorStatus
from ...requests_db.sql import queries
from ...schema.replica import StatusLine
from ...system.memory.limits import available_memory_bytes
from ...system.memory.usage import proportional_bytes, replica_bytes
from ..api.dependencies import Dependencies
from .live_state import LiveState, Turn

SAMPLE_SECONDS = 30.0
HOUR_SECONDS = 3600.0
MAX_SAMPLES = 120  # an hour of them
POLL_INTERVAL_SECONDS = 2.0  # while a page is open
MAX_SHARE = 0.05  # of a core
IDLE_SHARE = 0.005  # the same, while no page is open

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of this machine, or of our own group, by what holds it."""

    limit: int
    daemon: int
    zygote: int
    workers: int
    replicas: int
    other: int  # programs that are not ours
    reserve: int  # kept free for them
    free: int  # for workers and replicas yet to come

    def to_json(self) -> dict[str, int]:
        """Return the sizes for the page, rounded to megabytes: smaller steps are not visible."""
        return {name: round(size, -6) for name, size in asdict(self).items()}


class MemoryHistory:
    """Measures memory, and remembers an hour of it."""

    def __init__(self, deps: Dependencies) -> None:
        self._deps = deps
        self.samples: deque[tuple[int, MemoryUse]] = deque(maxlen=MAX_SAMPLES)
        self._file = str(deps.paths.home / "memory.json")
        self.now: MemoryUse | None = None
        self.replicas: dict[str, int] = {}  # by id, those whose memory is on this machine
        self._has_failed = False  # and that was logged
        self.wanted = asyncio.Event()  # set: measure soon, without waiting

    async def measure_regularly(self) -> None:
        """Measure for a sample twice a minute, and as often as that is asked for."""
        await asyncio.to_thread(self._restore)
        sample_at = 0.0
        while True:
            began = time.monotonic()
            await self.look()
            took_seconds = time.monotonic() - began
            if began >= sample_at:
                sample_at = began + max(SAMPLE_SECONDS, took_seconds / IDLE_SHARE)
                if self.now is not None:
                    self.samples.append((int(time.time()), self.now))
                    await asyncio.to_thread(self._write)
            self.wanted.clear()
            await asyncio.sleep(max(POLL_INTERVAL_SECONDS, took_seconds / MAX_SHARE))
            with anyio.move_on_after(sample_at - time.monotonic()):
                await self.wanted.wait()

    def _restore(self) -> None:
        """Read the samples of the last hour; samples of another form are left out."""
        for at, *sizes in (read_json(self._file) or {}).get("samples", ()):
            if at > time.time() - HOUR_SECONDS and len(sizes) == len(fields(MemoryUse)):
                self.samples.append((at, MemoryUse(*sizes)))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the chart begins again later
            kept = [[at, *astuple(use)] for at, use in self.samples]
            write_json(self._file, {"samples": kept})

    async def look(self) -> None:
        """Measure once."""
        try:
            live, executor = self._deps.reconciler.replicas.live, self._deps.executor.status()
            await asyncio.to_thread(self._measure, live, executor)
        except Exception:  # a defect costs this chart only; the next measurement may succeed
            self.now = None
            if not self._has_failed:
                log.exception("the memory could not be measured; it is tried again")
            self._has_failed = True

    def _measure(self, live: dict[str, StatusLine], executor: ExecutorStatus) -> None:
        sizes = {replica: replica_bytes(status) for replica, status in live.items()}
        self.replicas = {replica: size for replica, size in sizes.items() if size is not None}
        limit = int(self._deps.limits["memory_bytes"])
        available = available_memory_bytes()
        reserve = int(executor.plan["reserve_bytes"])
        daemon = proportional_bytes(os.getpid())
        zygote = proportional_bytes(executor.zygote_pid) if executor.zygote_pid else 0
        workers = sum(proportional_bytes(worker.pid) for worker in executor.workers)
        replicas = sum(self.replicas.values())
        other = max(0, limit - available - daemon - zygote - workers - replicas)
        reserve, free = min(reserve, available), max(0, available - reserve)
        self.now = MemoryUse(limit, daemon, zygote, workers, replicas, other, reserve, free)


ROUNDING_BYTES = 100_000
_IDENTITY = ("version", "installation", "address", "home", "pid", "started_at")


class MachineSource:
    """The daemon and its machine: kinds `daemon`, `memory`, `samples`, `plan`, `workers`."""

    def __init__(self, deps: Dependencies, memory: MemoryHistory) -> None:
        self._deps = deps
        self._memory = memory
        home = os.environ.get("OPENENV_HOME")
        # The command that starts the daemon again in a terminal.
        self._start = f"OPENENV_HOME={shlex.quote(home)} openenv up" if home else "openenv up"

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Refresh the workers in each turn, all else once a second."""
        executor = self._deps.executor.status()
        workers = {
            worker.name: asdict(worker) | {"rss_bytes": coarse(worker.rss_bytes)}
            for worker in executor.workers
        }
        state.replace("workers", workers)
        if not turn.is_tick:
            return
        self._memory.wanted.set()
        if self._memory.now is not None:
            state.put("memory", "", self._memory.now.to_json())
        state.replace(
            "samples", {str(at): list(use.to_json().values()) for at, use in self._memory.samples}
        )
        state.put("plan", "", executor.plan)
        counts = await self._deps.store.read(queries.COUNTS)
        lag = {key: round(value, 4) for key, value in asdict(self._deps.lag.snapshot()).items()}
        known = {name: self._deps.identity[name] for name in _IDENTITY}
        more = {"start": self._start, "requests": counts, "loop": lag}
        state.put("daemon", "", known | more)


def coarse(size: int | None) -> int | None:
    """Round a size down, so that a small change is not sent."""
    return None if size is None else size // ROUNDING_BYTES * ROUNDING_BYTES
