# SPDX-License-Identifier: Apache-2.0
"""Environments as they are, against environments as they are wanted.

    bus: a request about an environment changed ──▶ settle(name) ──▶ environments table ──▶ bus
    shims' sockets ──▶ ReplicaWatch ──▶ observe ──────────────────▶ replicas table ─────▶ bus
                             └─ exited ──▶ restart_decision ──▶ start after a pause | give up

`settle` is level-triggered: it reads the environment's row, its launch and its latest `down`, and
lets one pure function (`next_step`) say what is due. It may run at any time and any number of
times, so a daemon that starts settles every environment once, and is where its predecessor was; and
events that came faster than they were taken are made up for by settling everything. Each
environment has at most one task that settles it: its steps come in their order, and one that takes
its time (stopping does) keeps no other environment waiting.

Who is responsible for a replica: while the launch runs, the launch (it fails at once when a replica
dies, and stops what it started); from then on, the reconciler. A launch whose worker was killed
leaves its replicas to the reconciler, which stops them: their run files were written before they
were started, so none is lost.

Failure cases:

* A replica's server dies: its shim says how; it is started again after a pause, until the budget
  of `restart_policy` is spent. Then the shim is stopped too, so that nothing keeps the port.
* A shim dies (SIGKILL, a reboot): its socket ends; the server died with it. A new shim is
  started from the same run file, on a sibling's listening socket when there is one.
* The daemon dies: shims and servers go on. What happened meanwhile is in the shims' first
  message, or in their status files.
* The database cannot be written: what was observed is tried again until it can, and meanwhile
  nothing is started or stopped on its account.
* A launch ends after its environment was taken down (it was slow to hear of it): what it left is
  stopped.

Everything here runs on the daemon's loop. Where to look:

    next_step.py     what is due, and how an environment is: pure
    settling.py      which environments are to be settled, one task for each
    replica_care.py  replicas: watched, kept alive, stopped
    replica_watch.py one replica, through its shim's socket
    observations.py  what was observed, written and told
    loop_tasks.py    the tasks of all of them
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Json, Request
from ...requests_db.states import EnvironmentState, RequestState
from ..events.bus import EventBus
from ..settings import Paths
from .background_tasks import BackgroundTasks
from .decisions import Step, next_step
from .replicas import ReplicaManager
from .status_writer import StatusWriter
from .work_queue import WorkQueue


class Reconciler:
    """Keeps the tables of environments and replicas true, and replicas alive."""

    def __init__(self, store: AsyncStore, bus: EventBus, paths: Paths) -> None:
        self._store = store
        self._tasks = BackgroundTasks()
        self._status_writer = StatusWriter(store, bus)
        self._replicas = ReplicaManager(store, self._status_writer, self._tasks, paths.runs)
        self._settling = WorkQueue(store, bus, self._tasks, self.settle)
        self._steps: dict[Step, Callable[[Environment, Request | None], Coroutine[Any, Any, None]]]
        self._steps = {
            Step.QUEUED: self._queued,
            Step.STARTING: self._starting,
            Step.SERVE: self._serve,
            Step.ABANDON: self._abandon,
            Step.CALL_OFF: self._call_off,
            Step.SWEEP: self._sweep,
            Step.LET_GO: self._let_go_of,
            Step.RETIRE: self._retire,
            Step.STUCK: self._stuck,
        }

    @property
    def live(self) -> dict[str, Json]:
        """The last status of each watched replica, by its id."""
        return self._replicas.live

    async def start(self) -> None:
        """Adopt what an earlier daemon left; then follow the events."""
        live = {e.name for e in await self._store.environments() if e.state.is_live}
        await asyncio.gather(*(self.settle(name) for name in live))
        await self._replicas.stop_strays(live)
        self._tasks.spawn(self._settling.follow(), "reconciler")

    async def stop(self) -> None:
        """Stop watching. Replicas go on."""
        await self._tasks.end()

    async def settled(self, name: str | None = None) -> None:
        """Wait until what has been heard of an environment, or of all, is in the tables."""
        await self._settling.settled(name)

    async def settle(self, name: str, *, adopt: bool = False) -> None:
        """Do what is due for this environment; `adopt` also watches what its launch has started.

        One call at a time for each environment.
        """
        environment = await self._store.environment(name)
        if environment is None:
            return
        launch = await self._launch_of(environment)
        down = await self._latest_down(environment)
        step = next_step(environment.state, _state_of(launch), _state_of(down))
        if step is not Step.NOTHING:
            request = down if step in (Step.RETIRE, Step.STUCK) else launch
            await self._steps[step](environment, request)
        if adopt:
            await self._replicas.adopt(environment)

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
        await self._replicas.forget_predecessor(environment)
        await self._status_writer.set_environment(environment.name, EnvironmentState.PENDING)

    async def _starting(self, environment: Environment, _launch: Request | None) -> None:
        await self._replicas.forget_predecessor(environment)
        await self._status_writer.set_environment(environment.name, EnvironmentState.STARTING)

    async def _serve(self, environment: Environment, launch: Request | None) -> None:
        await self._replicas.adopt(environment)
        told: Json = {}
        if launch is not None and isinstance(launch.result, dict):
            told = launch.result.get("environment", {})
        if environment.state in (EnvironmentState.PENDING, EnvironmentState.STARTING):
            await self._replicas.believe(told.get("replicas", []))
        self._replicas.take_over(environment.name)
        await self._replicas.observe(environment.name, told.get("address", environment.address))

    async def _abandon(self, environment: Environment, launch: Request | None) -> None:
        await self._replicas.stop_all(environment.name)
        error = launch.error if launch is not None else None
        await self._status_writer.set_environment(
            environment.name, EnvironmentState.FAILED, error=error
        )

    async def _call_off(self, environment: Environment, _launch: Request | None) -> None:
        await self._replicas.stop_all(environment.name)
        await self._status_writer.set_environment(environment.name, EnvironmentState.STOPPED)

    async def _sweep(self, environment: Environment, _launch: Request | None) -> None:
        await self._replicas.stop_left(environment)

    async def _let_go_of(self, environment: Environment, _down: Request | None) -> None:
        self._replicas.let_go(environment.name)

    async def _retire(self, environment: Environment, _down: Request | None) -> None:
        await self._replicas.stop_all(environment.name)
        await self._status_writer.set_environment(environment.name, EnvironmentState.STOPPED)

    async def _stuck(self, environment: Environment, down: Request | None) -> None:
        error = down.error if down is not None else None
        await self._status_writer.set_environment(
            environment.name, EnvironmentState.FAILED, error=error
        )


def _state_of(request: Request | None) -> RequestState | None:
    return None if request is None else request.state
