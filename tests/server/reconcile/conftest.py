# SPDX-License-Identifier: Apache-2.0
"""Watches of replicas that are not followed, and requests that the reconciler submits by itself."""

import asyncio
from pathlib import Path
from typing import Any

from openenvd.environments.run_files import RunFile
from openenvd.requests_db.records import Replica
from openenvd.schema.states import ReplicaState
from openenvd.server.errors import CannotChange
from openenvd.server.reconcile.replica_watch import ReplicaWatch
from openenvd.server.reconcile.work_queue import BackgroundTasks

WAIT_SECONDS = 20.0


def new_watch(
    ordinal: int = 0, state: ReplicaState = ReplicaState.READY, **data: Any
) -> ReplicaWatch:
    """The watch of a replica of `trial`, which is not followed; `data`: of its run file."""

    async def ignore(*_: Any) -> None:
        pass

    row = Replica(f"trial-{ordinal}-1", "trial", ordinal, "local", state, "/run", 0.0)
    known: Any = {"replica_id": row.id, "environment": "trial", "ordinal": ordinal}
    known |= {"number": ordinal, "request_id": "1", "host": "127.0.0.1", "port": 21000 + ordinal}
    known["created_at"] = float(ordinal)
    run_file = RunFile.of(Path("/run"), known | data)
    watch = ReplicaWatch(row, run_file, ignore, ignore)
    watch.is_kept.set()
    return watch


class Submissions:
    """The replicas of one environment, and what is submitted for them; the clock stands at 1000."""

    def __init__(self) -> None:
        self.tasks = BackgroundTasks()
        self.watches: list[ReplicaWatch] = []
        self.submitted: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.refuses = 0
        self.now = 1000.0
        self.options: Any = {"clock": lambda: self.now, "again_seconds": 0.0}

    async def submit(self, _operation: str, payload: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses -= 1
            raise CannotChange("trial is being restarted already")
        self.submitted.put_nowait(tuple(payload.values()))

    async def asked(self) -> tuple[Any, ...]:
        return await asyncio.wait_for(self.submitted.get(), WAIT_SECONDS)

    async def is_quiet(self) -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
        return self.submitted.empty()
