# SPDX-License-Identifier: Apache-2.0
"""`ReplicaManager`: finds replicas by their run files, watches, restarts and stops them.

    run files ──adopt──▶ ReplicaWatch (one task each, `replica_watch.py`)
                             ├─ changed ──▶ its row ──▶ observe ──▶ its environment's state
                             └─ given up ─▶ its row, the environment's error ──▶ it is stopped

`Responsibility` says whose business a restart is, the launch's or the reconciler's; a watch starts
no server before the latter. When that changes, `reconciler.py` says.

Everything here runs on the daemon's loop; what blocks goes through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...environments import run_files
from ...environments.run_files import RunFile
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Json, Replica, Request, RequestError
from ...requests_db.sql import queries
from ...requests_db.states import EnvironmentState, ErrorKind, ReplicaState
from ...requests_db.transactions import observing
from .decisions import observed_state
from .replica_watch import ReplicaWatch, Responsibility, is_over
from .status_writer import StatusWriter, Timing
from .work_queue import BackgroundTasks

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ReplicaManager:
    """Owns the watches of all replicas, and which of them the reconciler restarts."""

    store: AsyncStore
    status: StatusWriter
    tasks: BackgroundTasks
    runs: Path  # the folder of run files
    timing: Timing
    responsibility: Responsibility = field(init=False, default_factory=Responsibility)
    _watches: dict[str, ReplicaWatch] = field(init=False, default_factory=dict)  # by replica

    @property
    def live(self) -> dict[str, Json]:
        """The last status of each watched replica, by its id."""
        return {name: watch.status for name, watch in self._watches.items()}

    # Finding and watching.

    async def adopt(self, environment: Environment) -> None:
        """Watch every replica of the environment that has a run file."""
        rows = await self.store.read(queries.replicas(environment.name))
        known = {replica.id: replica for replica in rows}
        for run_file in await self._run_files(environment):
            watch = self._watches.get(run_file.replica_id)
            if watch is not None and watch.is_of(run_file):
                continue
            replica = known.get(run_file.replica_id)
            if watch is not None:  # of an earlier attempt of the same launch, as is its row
                await self._unwatch([watch])
                replica = None
            if replica is None or is_over(replica.state):  # or the row of an earlier attempt
                replica = _new_replica(run_file)
            watch = ReplicaWatch(
                replica, run_file, self.responsibility, self.timing, self._record, self._give_up
            )
            self._watches[replica.id] = watch
            watch.task = self.tasks.spawn(watch.run(), f"watch {replica.id}")
            await self._record(replica)

    async def adopt_unknown(self) -> None:
        """Write an environment for each launch that has run files and is in no table.

        The tables may have been lost: what was launched goes on all the same.
        """
        found = await asyncio.to_thread(run_files.all_of, self.runs)
        launches = {(run_file.environment, run_file.request_id): run_file for run_file in found}
        for run_file in launches.values():
            row = await self.store.read(queries.environment(run_file.environment))
            is_free = row is None or not row.state.is_live or _has_lost(row, launches)
            if is_free and not await self._is_known(run_file, row):
                await self.status.adopt(_adopted(run_file))

    async def _is_known(self, run_file: RunFile, row: Environment | None) -> bool:
        """Whether a table has its launch, which says whether it is wanted."""
        if row is not None and row.request_id == run_file.request_id:
            return True
        return isinstance(await self.store.read(queries.get(run_file.request_id)), Request)

    async def confirm_ready(self, replicas: list[Json]) -> None:
        """Take the launch's word for the replicas that it saw ready, before their shims' word.

        Otherwise a client that saw the launch succeed might find the environment DEGRADED
        for a moment.
        """
        for replica in replicas:
            watch = self._watches.get(replica.get("id", ""))
            if watch is not None:
                await watch.confirm_ready(replica.get("pid"))

    async def forget_predecessor(self, environment: Environment) -> None:
        """Leave restarts to the launch, and stop watching an earlier environment of its name."""
        self.responsibility.let_go(environment.name)
        await self._unwatch(
            watch
            for watch in self._watches.values()
            if watch.replica.environment == environment.name
            and watch.request_id != environment.request_id
        )

    async def _unwatch(self, chosen: Iterable[ReplicaWatch]) -> None:
        watches = list(chosen)
        for watch in watches:
            del self._watches[watch.replica.id]
            watch.task.cancel()
        await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)

    async def _run_files(self, environment: Environment) -> list[RunFile]:
        """What its own launch has started: the name may have had, or have by now, another."""
        found = await asyncio.to_thread(run_files.of_environment, self.runs, environment.name)
        return [run_file for run_file in found if run_file.request_id == environment.request_id]

    # Writing what was observed.

    async def _record(self, replica: Replica) -> None:
        """Write how a replica is, and what that makes of its environment."""

        async def write() -> None:
            await self.status.set_replica(replica)
            if self.responsibility.is_ours(replica.environment):
                await self.observe(replica.environment)

        await self.status.insist(write)

    async def _give_up(self, replica: Replica, error: RequestError) -> None:
        """Write why a replica is not started again, and free what it holds."""
        await self._record(replica)
        await self.status.insist(lambda: self._fail(replica.environment, error))
        # Last: it cancels the watch that calls this.
        self.tasks.spawn(self._stop_one(replica), f"stop {replica.id}")

    async def _fail(self, name: str, error: RequestError) -> None:
        environment = await self.store.read(queries.environment(name))
        if environment is not None and environment.state is EnvironmentState.FAILED:
            await self.status.set_environment(name, EnvironmentState.FAILED, error=error)

    async def observe(self, name: str, address: str | None = None) -> None:
        """Write how an environment is whose launch succeeded."""
        environment = await self.store.read(queries.environment(name))
        if environment is None or environment.state is EnvironmentState.STOPPING:
            return  # that its replicas go is what was asked for
        replicas = [each.state for each in await self.store.read(queries.replicas(name))]
        state = observed_state(replicas)
        # A replica that FAILED has said why itself (`_give_up`).
        unexplained = state is EnvironmentState.FAILED and ReplicaState.FAILED not in replicas
        error = _lost_replicas(name) if unexplained else None
        await self.status.set_environment(name, state, address=address, error=error)

    # Stopping.

    async def stop_all(self, name: str, grace_seconds: float = run_files.GRACE_SECONDS) -> None:
        """Nothing is left of the environment when this returns."""
        await self._unwatch(w for w in self._watches.values() if w.replica.environment == name)
        self.responsibility.forget(name)
        await asyncio.to_thread(run_files.stop_environment, self.runs, name, grace_seconds)
        await self.store.write(observing.delete_replicas, name)

    async def _stop_one(self, replica: Replica) -> None:
        watch = self._watches.pop(replica.id, None)
        if watch is not None:
            watch.task.cancel()
        await asyncio.to_thread(run_files.stop_replica, Path(replica.run_dir))

    async def stop_left(self, environment: Environment) -> None:
        """What its own launch started after the environment had ended."""
        left = await self._run_files(environment)
        if left:
            extra = {"environment": environment.name, "request_id": environment.request_id}
            log.warning("stopping replicas left by the launch of %s", environment.name, extra=extra)
            await asyncio.to_thread(run_files.stop_replicas, [r.run_dir for r in left])

    async def stop_strays(self, live: set[str]) -> None:
        """Stop replicas that belong to no environment: a launch and a daemon died together."""
        found = await asyncio.to_thread(run_files.all_of, self.runs)
        strays = [run_file for run_file in found if run_file.environment not in live]
        for stray in strays:
            extra = {"replica": stray.replica_id, "environment": stray.environment}
            log.warning("stopping stray replica %s", stray.replica_id, extra=extra)
        if strays:
            await asyncio.to_thread(run_files.stop_replicas, [r.run_dir for r in strays])


def _has_lost(environment: Environment, launches: Collection[tuple[str, str]]) -> bool:
    """Whether it had been launched, and nothing of that launch is there: so of an old database."""
    was_launched = environment.state in (EnvironmentState.READY, EnvironmentState.DEGRADED)
    return was_launched and (environment.name, environment.request_id) not in launches


def _adopted(run_file: RunFile) -> Environment:
    """Make the row of an environment from one of its run files."""
    return Environment(
        run_file.environment,
        {"provider": "local", "host": run_file.host, **run_file.data.get("spec", {})},
        EnvironmentState.STARTING,
        run_file.created_at,
        time.time(),
        run_file.request_id,
        run_file.address,
    )


def _new_replica(run_file: RunFile) -> Replica:
    return Replica(
        id=run_file.replica_id,
        environment=run_file.environment,
        ordinal=run_file.ordinal,
        provider="local",
        state=ReplicaState.STARTING,
        run_dir=str(run_file.run_dir),
        started_at=time.time(),
    )


def _lost_replicas(name: str) -> RequestError:
    return RequestError(
        ErrorKind.WORKER_LOST,
        f"{name} has no replicas left",
        f"launch it again: openenv launch {name}",
    )
