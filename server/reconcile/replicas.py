# SPDX-License-Identifier: Apache-2.0
"""The replicas of all environments: found by their run files, watched, kept alive, stopped.

    run files ──adopt──▶ ReplicaWatch (one task each, `replica_watch.py`)
                             ├─ record ──▶ its row ──▶ observe ──▶ its environment's state
                             └─ gave_up ─▶ its row, the environment's error ──▶ it is stopped

Who is responsible for an environment's replicas, a launch or we, is told by `take_over` and
`let_go`; a watch starts none again before the former. When that is, `reconciler.py` says.

Everything here runs on the daemon's loop; what blocks goes through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...environments import run_files
from ...environments.run_files import RunFile
from ...processes.exits.exit_reason import ExitReason
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Json, Replica, RequestError
from ...requests_db.states import EnvironmentState, ErrorKind, ReplicaState
from ..dispatch.outcomes import error_of_exit
from .background_tasks import BackgroundTasks
from .decisions import observed_state
from .replica_watch import ReplicaWatch, is_over
from .status_writer import StatusWriter, insist

log = logging.getLogger(__name__)

_GIVEN_UP_HINT = "mend what its log shows, then launch it again"


class ReplicaManager:
    """Is told how each replica is (a `Caretaker`), and sees to it."""

    def __init__(
        self, store: AsyncStore, status_writer: StatusWriter, tasks: BackgroundTasks, runs: Path
    ) -> None:
        self._store = store
        self._status_writer = status_writer
        self._tasks = tasks
        self._runs = runs
        self._watches: dict[str, ReplicaWatch] = {}  # by the replica's id
        # Set for the environments whose replicas are ours to restart.
        self._serving: dict[str, asyncio.Event] = {}

    @property
    def live(self) -> dict[str, Json]:
        """The last status of each watched replica, by its id."""
        return {name: watch.status for name, watch in self._watches.items()}

    # Finding and watching.

    async def adopt(self, environment: Environment) -> None:
        """Watch every replica of the environment that has a run file."""
        known = {replica.id: replica for replica in await self._store.replicas(environment.name)}
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
            watch = ReplicaWatch(replica, run_file, self)
            self._watches[replica.id] = watch
            watch.task = self._tasks.spawn(watch.run(), f"watch {replica.id}")
            await self.record(replica)

    async def believe(self, replicas: list[Json]) -> None:
        """What a launch has just seen ready is ready, although its shim was not heard here yet.

        Otherwise whoever was told of the launch's success might find it DEGRADED for a moment.
        """
        for replica in replicas:
            watch = self._watches.get(replica.get("id", ""))
            if watch is not None:
                await watch.believe_ready(replica.get("pid"))

    async def forget_predecessor(self, environment: Environment) -> None:
        """A launch is responsible now, and for an earlier environment of its name nobody is."""
        self.let_go(environment.name)
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
        found = await asyncio.to_thread(run_files.of_environment, self._runs, environment.name)
        return [run_file for run_file in found if run_file.request_id == environment.request_id]

    # Who is responsible.

    def take_over(self, name: str) -> None:
        """From now on this environment's replicas are started again."""
        self._ours(name).set()

    def let_go(self, name: str) -> None:
        """From now on they are not."""
        self._ours(name).clear()

    def serves(self, name: str) -> bool:
        """Whether this environment's replicas are ours to restart."""
        return name in self._serving and self._serving[name].is_set()

    async def until_serves(self, name: str) -> None:
        """Wait until this environment's replicas are ours to restart."""
        await self._ours(name).wait()

    def _ours(self, name: str) -> asyncio.Event:
        return self._serving.setdefault(name, asyncio.Event())

    # What is made of how they are.

    async def record(self, replica: Replica) -> None:
        """Write how a replica is, and what that makes of its environment."""
        await insist(lambda: self._record(replica))

    async def _record(self, replica: Replica) -> None:
        await self._status_writer.set_replica(replica)
        if self.serves(replica.environment):
            await self.observe(replica.environment)

    async def gave_up(
        self, replica: Replica, reason: ExitReason, why: str, tail: tuple[str, ...]
    ) -> None:
        """A replica's restart budget is spent: free what it holds, and say why."""
        error = error_of_exit(f"replica {replica.id} (pid {reason.pid})", reason, tail)
        error = replace(error, message=f"{error.message}; {why}", hint=_GIVEN_UP_HINT)
        await self.record(replica)
        await insist(lambda: self._blame(replica.environment, error))
        # Last: it cancels the watch that calls this.
        self._tasks.spawn(self._stop_one(replica), f"stop {replica.id}")

    async def _blame(self, name: str, error: RequestError) -> None:
        environment = await self._store.environment(name)
        if environment is not None and environment.state is EnvironmentState.FAILED:
            await self._status_writer.set_environment(name, EnvironmentState.FAILED, error=error)

    async def observe(self, name: str, address: str | None = None) -> None:
        """Write how an environment is whose launch succeeded."""
        environment = await self._store.environment(name)
        if environment is None or environment.state is EnvironmentState.STOPPING:
            return  # that its replicas go is what was asked for
        replicas = [replica.state for replica in await self._store.replicas(name)]
        state = observed_state(replicas)
        # One that failed says why itself (`gave_up`).
        unexplained = state is EnvironmentState.FAILED and ReplicaState.FAILED not in replicas
        error = _lost_replicas(name) if unexplained else None
        await self._status_writer.set_environment(name, state, address=address, error=error)

    # Stopping.

    async def stop_all(self, name: str) -> None:
        """Nothing is left of the environment when this returns."""
        await self._unwatch(w for w in self._watches.values() if w.replica.environment == name)
        self._serving.pop(name, None)  # nobody waits for it any more
        await asyncio.to_thread(run_files.stop_environment, self._runs, name)
        await self._store.delete_replicas(name)

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
        found = await asyncio.to_thread(run_files.all_of, self._runs)
        strays = [run_file for run_file in found if run_file.environment not in live]
        for run_file in strays:
            extra = {"replica": run_file.replica_id, "environment": run_file.environment}
            log.warning(
                "stopping replica %s: no environment owns it", run_file.replica_id, extra=extra
            )
        if strays:
            await asyncio.to_thread(run_files.stop_replicas, [r.run_dir for r in strays])


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
        f"nothing is left of {name}'s replicas",
        f"launch it again: openenv launch {name}",
    )
