# SPDX-License-Identifier: Apache-2.0
"""Environments as they are, against environments as they are wanted.

    hub: a request about an environment changed ──▶ settle(name) ──▶ environments table ──▶ hub
    keepers' sockets ──▶ ReplicaWatch ──▶ observe ──────────────────▶ replicas table ─────▶ hub
                             └─ exited ──▶ restart_decision ──▶ start after a pause | give up

`settle` is level-triggered: it reads the environment's row, its launch and its latest `down`, and
lets one pure function (`next_step`) say what is due. It may run at any time and any number of
times, so a daemon that starts settles every environment once, and is where its predecessor was.

Who is responsible for a replica: while the launch runs, the launch (it fails at once when a replica
dies, and stops what it started); from then on, the reconciler. A launch whose worker was killed
leaves its replicas to the reconciler, which stops them: their run files were written before they
were started, so none is lost.

Failure cases:

* A replica's server dies: its keeper says how; it is started again after a pause, until the budget
  of `restart_policy` is spent. Then the keeper is stopped too, so that nothing keeps the port.
* A keeper dies (SIGKILL, a reboot): its socket ends; the server died with it. A new keeper is
  started from the same run file, on a sibling's listening socket when there is one.
* The daemon dies: keepers and servers go on. What happened meanwhile is in the keepers' first
  message, or in their status files.

Everything here runs on the daemon's loop; what blocks goes through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from ..environments import run_files
from ..environments.run_files import RunFile
from ..processes.exit_reason import ExitReason
from ..requests_db.async_store import AsyncStore
from ..requests_db.records import Environment, Event, Json, Replica, Request, RequestError
from ..requests_db.states import EnvironmentState, ErrorKind, ReplicaState, RequestState
from .hub import EventHub
from .outcomes import error_of_exit
from .replica_watch import ReplicaWatch
from .settings import Paths

log = logging.getLogger(__name__)


_GIVEN_UP_HINT = "mend what its log shows, then launch it again"


class Step(Enum):
    """What is due for an environment."""

    NOTHING = "nothing"
    QUEUED = "queued"  # its launch waits (again)
    STARTING = "starting"  # its launch runs
    SERVE = "serve"  # its launch succeeded: adopt its replicas, observe them
    ABANDON = "abandon"  # its launch failed: stop what it left, say why
    CALL_OFF = "call off"  # its launch was cancelled: stop what it left
    RETIRE = "retire"  # it was taken down
    STUCK = "stuck"  # taking it down failed


_STEP_OF_LAUNCH = {
    RequestState.PENDING: Step.QUEUED,
    RequestState.RUNNING: Step.STARTING,
    RequestState.SUCCEEDED: Step.SERVE,
    RequestState.FAILED: Step.ABANDON,
    RequestState.CANCELLED: Step.CALL_OFF,
}
_STEP_OF_DOWN = {
    RequestState.PENDING: Step.NOTHING,
    RequestState.RUNNING: Step.NOTHING,
    RequestState.SUCCEEDED: Step.RETIRE,
    RequestState.FAILED: Step.STUCK,
    RequestState.CANCELLED: Step.STUCK,  # only by a lost daemon's hand: the API refuses it
}


def next_step(
    state: EnvironmentState, launch: RequestState | None, down: RequestState | None
) -> Step:
    """What is due, from where the environment, its launch and its latest `down` stand."""
    if not state.is_live:
        return Step.NOTHING
    if state is EnvironmentState.STOPPING and down in _STEP_OF_DOWN:
        return _STEP_OF_DOWN[down]
    return Step.SERVE if launch is None else _STEP_OF_LAUNCH[launch]


def observed_state(replicas: list[ReplicaState]) -> EnvironmentState:
    """How an environment is whose launch succeeded, from how its replicas are."""
    if replicas and all(state is ReplicaState.READY for state in replicas):
        return EnvironmentState.READY
    if all(state in (ReplicaState.FAILED, ReplicaState.STOPPED) for state in replicas):
        return EnvironmentState.FAILED
    return EnvironmentState.DEGRADED


class Reconciler:
    """Keeps the tables of environments and replicas true, and replicas alive."""

    def __init__(self, store: AsyncStore, hub: EventHub, paths: Paths) -> None:
        self._store = store
        self._hub = hub
        self._paths = paths
        self._watches: dict[str, ReplicaWatch] = {}
        self._serving: set[str] = set()  # environments whose replicas are ours to restart
        self._serving_grew = asyncio.Event()  # a new one each time
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._steps: dict[Step, Callable[[Environment, Request | None], Coroutine[Any, Any, None]]]
        self._steps = {
            Step.QUEUED: self._queued,
            Step.STARTING: self._starting,
            Step.SERVE: self._serve,
            Step.ABANDON: self._abandon,
            Step.CALL_OFF: self._call_off,
            Step.RETIRE: self._retire,
            Step.STUCK: self._stuck,
        }

    @property
    def live(self) -> dict[str, Json]:
        """The last status of each watched replica, by its id."""
        return {name: watch.status for name, watch in self._watches.items()}

    async def start(self) -> None:
        """Adopt what an earlier daemon left; then follow the events."""
        environments = await self._store.environments(include_stopped=True)
        for environment in environments:
            await self.settle(environment.name)
        await self._stop_strays({e.name for e in environments if e.state.is_live})
        self._spawn(self._follow(), "reconciler")

    async def stop(self) -> None:
        """Stop watching. Replicas go on."""
        for task in [*self._tasks, *(watch.task for watch in self._watches.values())]:
            task.cancel()
        tasks = [*self._tasks, *(watch.task for watch in self._watches.values())]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self, name: str) -> None:
        """Do what is due for this environment."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            environment = await self._store.environment(name)
            if environment is None:
                return
            launch = await self._launch_of(environment)
            down = await self._latest_down(environment)
            step = next_step(environment.state, _state_of(launch), _state_of(down))
            if step is not Step.NOTHING:
                request = down if step in (Step.RETIRE, Step.STUCK) else launch
                await self._steps[step](environment, request)

    # Following events.

    async def _follow(self) -> None:
        with self._hub.subscribe() as subscription:
            while True:
                for event in await subscription.next():
                    await self._on_event(event)

    async def _on_event(self, event: Event) -> None:
        if event.environment is None:
            return
        try:
            if event.kind == "request.state":
                await self.settle(event.environment)
            elif event.kind == "request.progress" and "replica" in event.data:
                await self._adopt(event.environment)
        except Exception:
            # One environment's trouble must not end the care of all others.
            log.exception("cannot settle %s", event.environment)

    async def _launch_of(self, environment: Environment) -> Request | None:
        if environment.request_id is None:
            return None
        found = await self._store.get(environment.request_id)
        return found if isinstance(found, Request) else None

    async def _latest_down(self, environment: Environment) -> Request | None:
        if environment.state is not EnvironmentState.STOPPING:
            return None
        downs = await self._store.list_requests(
            operation="down", environment=environment.name, limit=1
        )
        return downs[0] if downs and downs[0].created_at >= environment.created_at else None

    # The steps.

    async def _queued(self, environment: Environment, _launch: Request | None) -> None:
        await self._set(environment.name, EnvironmentState.PENDING)

    async def _starting(self, environment: Environment, _launch: Request | None) -> None:
        await self._set(environment.name, EnvironmentState.STARTING)

    async def _serve(self, environment: Environment, launch: Request | None) -> None:
        self._serving.add(environment.name)
        self._serving_grew.set()
        self._serving_grew = asyncio.Event()
        await self._adopt(environment.name)
        address = environment.address
        if launch is not None and isinstance(launch.result, dict):
            address = launch.result.get("environment", {}).get("address", address)
        await self._observe(environment.name, address)

    async def _abandon(self, environment: Environment, launch: Request | None) -> None:
        await self._stop_all(environment.name)
        error = launch.error if launch is not None else None
        await self._set(environment.name, EnvironmentState.FAILED, error=error)

    async def _call_off(self, environment: Environment, _launch: Request | None) -> None:
        await self._stop_all(environment.name)
        await self._set(environment.name, EnvironmentState.STOPPED)

    async def _retire(self, environment: Environment, _down: Request | None) -> None:
        await self._stop_all(environment.name)
        await self._set(environment.name, EnvironmentState.STOPPED)

    async def _stuck(self, environment: Environment, down: Request | None) -> None:
        error = down.error if down is not None else None
        await self._set(environment.name, EnvironmentState.FAILED, error=error)

    # Replicas.

    async def _adopt(self, name: str) -> None:
        """Watch every replica of the environment that has a run file."""
        known = {replica.id: replica for replica in await self._store.replicas(name)}
        for run_file in run_files.of_environment(self._paths.runs, name):
            if run_file.replica_id in self._watches:
                continue
            replica = known.get(run_file.replica_id) or _new_replica(run_file)
            watch = ReplicaWatch(replica, run_file, self)
            self._watches[replica.id] = watch
            watch.task = asyncio.create_task(watch.run(), name=f"watch {replica.id}")
            await self.record(replica)

    def serves(self, name: str) -> bool:
        """Whether this environment's replicas are the reconciler's to restart."""
        return name in self._serving

    async def until_serves(self, name: str, timeout_seconds: float | None = None) -> None:
        """Wait for this environment's replicas to be the reconciler's, or for the time to be over.

        For good, when its launch fails; but then whoever waits is cancelled with its watch.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self.serves(name):
                    await self._serving_grew.wait()

    async def record(self, replica: Replica) -> None:
        """Write how a replica is, and what that makes of its environment."""
        event = await self._store.upsert_replica(replica, now=time.time())
        self._hub.publish([event] if event is not None else [])
        if self.serves(replica.environment):
            await self._observe(replica.environment)

    async def gave_up(
        self, replica: Replica, reason: ExitReason, why: str, tail: tuple[str, ...]
    ) -> None:
        """A replica's restart budget is spent: free what it holds, and say why."""
        await self.record(replica)
        self._spawn(self._stop_one(replica), f"stop {replica.id}")
        environment = await self._store.environment(replica.environment)
        if environment is not None and environment.state is EnvironmentState.FAILED:
            error = error_of_exit(f"replica {replica.id} (pid {reason.pid})", reason, tail)
            error = replace(error, message=f"{error.message}; {why}", hint=_GIVEN_UP_HINT)
            await self._set(environment.name, EnvironmentState.FAILED, error=error)

    async def _observe(self, name: str, address: str | None = None) -> None:
        environment = await self._store.environment(name)
        if environment is None or environment.state is EnvironmentState.STOPPING:
            return  # that its replicas go is what was asked for
        replicas = [replica.state for replica in await self._store.replicas(name)]
        error = None if replicas else _lost_replicas(name)
        await self._set(name, observed_state(replicas), address=address, error=error)

    async def _stop_all(self, name: str) -> None:
        self._serving.discard(name)
        await self._unwatch(name)
        await asyncio.to_thread(run_files.stop_environment, self._paths.runs, name)
        await self._store.delete_replicas(name)

    async def _stop_one(self, replica: Replica) -> None:
        watch = self._watches.pop(replica.id, None)
        if watch is not None:
            watch.task.cancel()
        await asyncio.to_thread(run_files.stop_replica, Path(replica.run_dir))

    async def _stop_strays(self, live: set[str]) -> None:
        """Stop replicas that belong to no environment: a launch and a daemon died together."""
        for run_file in run_files.all_of(self._paths.runs):
            if run_file.environment not in live:
                log.warning("stopping %s, which belongs to nothing", run_file.replica_id)
                await asyncio.to_thread(run_files.stop_replica, run_file.run_dir)

    async def _unwatch(self, name: str) -> None:
        watches = [w for w in self._watches.values() if w.replica.environment == name]
        for watch in watches:
            del self._watches[watch.replica.id]
            watch.task.cancel()
        await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)

    async def _set(
        self,
        name: str,
        state: EnvironmentState,
        *,
        address: str | None = None,
        error: RequestError | None = None,
    ) -> None:
        event = await self._store.set_environment_state(
            name, state, address=address, error=error, now=time.time()
        )
        if event is not None:
            self._hub.publish([event])

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _state_of(request: Request | None) -> RequestState | None:
    return None if request is None else request.state


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
