# SPDX-License-Identifier: Apache-2.0
"""The daemon, memory, plan and workers."""

from __future__ import annotations

from dataclasses import asdict

from ....requests_db.sql import queries
from ...api.dependencies import Dependencies
from ..live_state import LiveState, Turn
from ..memory import MemoryHistory

ROUNDING_BYTES = 100_000
_IDENTITY = ("version", "address", "home", "pid", "started_at")


class MachineSource:
    """What the daemon is and has: kinds `daemon`, `memory`, `samples`, `plan`, `workers`."""

    def __init__(self, deps: Dependencies, memory: MemoryHistory, page: str) -> None:
        self._deps = deps
        self._memory = memory
        self._page = page

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Look at workers in each turn, at the rest once a second."""
        executor = self._deps.executor.status()
        workers = {
            worker.name: asdict(worker) | {"rss_bytes": _coarse(worker.rss_bytes)}
            for worker in executor.workers
        }
        state.replace("workers", workers)
        if not turn.is_tick:
            return
        self._memory.look_soon()
        if self._memory.now is not None:
            state.put("memory", "", self._memory.now.to_json())
        state.replace(
            "samples", {str(at): list(use.to_json().values()) for at, use in self._memory.samples}
        )
        state.put("plan", "", executor.plan)
        counts = await self._deps.store.read(queries.COUNTS)
        lag = self._deps.lag.snapshot()
        state.put(
            "daemon",
            "",
            {name: self._deps.identity[name] for name in _IDENTITY}
            | {"page": self._page}
            | {"requests": counts, "loop": _rounded(lag.to_json())},
        )


def _coarse(size: int | None) -> int | None:
    return None if size is None else size // ROUNDING_BYTES * ROUNDING_BYTES


def _rounded(lag: dict[str, object]) -> dict[str, object]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in lag.items()}
