# SPDX-License-Identifier: Apache-2.0
"""`Reconciler`: brings environments from what is observed to what is wanted.

    bus: a request about an environment changed ──▶ queue ──▶ reconcile(name) ──▶ environments table
    shims' sockets ──▶ ReplicaWatch ──▶ observe ──────────────▶ replicas table ──▶ bus
                             └─ exited ──▶ restart_decision ──▶ restart after a pause | give up

`reconcile` is level-triggered: it reads the environment's row, its launch and its latest `down`,
and one pure function (`next_step`) says what is due. It may run at any time and any number of
times, so a daemon that starts reconciles every environment once, and is where its predecessor was;
when events were dropped, everything is reconciled. Each environment has at most one task that
reconciles it: its steps come in their order, and a slow one (stopping) does not delay another
environment.

Who is responsible for a replica: while the launch runs, the launch (it fails at once when a replica
dies, and stops what it started); from then on, the reconciler. A launch whose worker was killed
leaves its replicas to the reconciler, which stops them: their run files were written before they
were started, so none is lost.

Failure cases:

* A replica's server exits: its shim reports how; it is restarted after a pause, until the budget
  of `restart_policy` is spent. Then the shim is stopped too, so that nothing keeps the port.
* A shim exits (SIGKILL, a reboot): its socket ends; the server exited with it. A new shim is
  started from the same run file, on a sibling's listening socket when there is one.
* Another process has taken the port of a replica that is to come back: it waits for the port, which
  does not count as an exit. Other environments do not get it (`environments/providers/ports.py`).
* The daemon exits: shims and servers continue. What happened meanwhile is in the shims' first
  message, or in their status files.
* The database cannot be written: what was observed is tried again until it can, and meanwhile
  nothing is started or stopped because of it.
* The database was lost, or an old copy of it put back: what has a run file, and a launch that no
  table knows, is written as an environment, and adopted.
* A `down` fails, or its worker is killed: what is left is stopped here.
* A launch ends after its environment was taken down: what it left is stopped.

Everything here runs on the daemon's loop. Where to look:

    decisions.py         what is due, and the state of an environment: pure
    work_queue.py        which environments are to be reconciled, one task for each; all tasks
    replicas.py          all replicas: watched, restarted, stopped
    replica_watch.py     one replica, through its shim's socket; whose business a restart is
    status_writer.py     states, written, published and logged
"""

from __future__ import annotations

import asyncio

from ...environments.providers.ports import renew_reservations
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Json, Request
from ...requests_db.sql import queries
from ...requests_db.states import EnvironmentState, RequestState
from ..events.bus import EventBus
from ..settings import Paths
from .decisions import Step, next_step
from .replicas import ReplicaManager
from .status_writer import StatusWriter, Timing
from .work_queue import BackgroundTasks, WorkQueue

_STATE_OF_STEP = {Step.QUEUED: EnvironmentState.PENDING, Step.STARTING: EnvironmentState.STARTING}


class Reconciler:
    """Keeps the tables of environments and replicas up to date, and replicas running.

    Attributes:
        queue: which environments are to be reconciled.
        replicas: watches them, restarts them and stops them.
    """

    def __init__(
        self, store: AsyncStore, bus: EventBus, paths: Paths, timing: Timing | None = None
    ) -> None:
        timing = timing or Timing()
        self._store = store
        self._tasks = BackgroundTasks()
        self._status = StatusWriter(store, bus, timing)
        self.replicas = ReplicaManager(store, self._status, self._tasks, paths.runs, timing)
        self.queue = WorkQueue(store, bus, self._tasks, self._status, self.reconcile, timing)

    async def start(self) -> None:
        """Adopt what an earlier daemon left; then follow the events."""
        await asyncio.to_thread(renew_reservations, self.replicas.runs)
        await self.replicas.adopt_unknown()
        live = {e.name for e in await self._store.read(queries.environments()) if e.state.is_live}
        await asyncio.gather(*(self.reconcile(name) for name in live))
        await self.replicas.stop_strays(live)
        self._tasks.spawn(self.queue.follow(), "reconciler")

    async def stop(self) -> None:
        """Stop watching. Replicas continue."""
        await self._tasks.end()

    async def reconcile(self, name: str, adopt: bool = False) -> None:
        """Do what is due for this environment; one call at a time for each.

        Args:
            name: the environment's.
            adopt: whether to watch what its launch has started by now, also when nothing is due.
        """
        environment = await self._store.read(queries.environment(name))
        if environment is None:
            return
        launch = await self._launch_of(environment)
        down = await self._latest_down(environment, launch)
        step = next_step(environment.state, _state_of(launch), _state_of(down))
        await self._take(step, environment, launch, down)
        if adopt:
            await self.replicas.adopt(environment)

    async def _take(
        self, step: Step, environment: Environment, launch: Request | None, down: Request | None
    ) -> None:
        name = environment.name
        match step:
            case Step.QUEUED | Step.STARTING:
                await self.replicas.forget_predecessor(environment)
                await self._status.set_environment(name, _STATE_OF_STEP[step])
            case Step.SERVE:
                await self._serve(environment, launch)
            case Step.ABANDON:
                await self.replicas.stop_all(name)
                await self._fail(name, launch)
            case Step.CALL_OFF | Step.RETIRE:
                await self.replicas.stop_all(name, **_grace_of(down))
                await self._status.set_environment(name, EnvironmentState.STOPPED)
            case Step.SWEEP:
                await self.replicas.stop_left(environment)
            case Step.LET_GO:
                self.replicas.responsibility.let_go(name)

    async def _serve(self, environment: Environment, launch: Request | None) -> None:
        await self.replicas.adopt(environment)
        result: Json = {}
        if launch is not None and isinstance(launch.result, dict):
            result = launch.result.get("environment", {})
        if environment.state in (EnvironmentState.PENDING, EnvironmentState.STARTING):
            await self.replicas.confirm_ready(result.get("replicas", []))
        self.replicas.responsibility.take_over(environment.name)
        await self.replicas.observe(environment.name, result.get("address", environment.address))

    async def _fail(self, name: str, request: Request | None) -> None:
        error = request.error if request is not None else None
        await self._status.set_environment(name, EnvironmentState.FAILED, error=error)

    async def _launch_of(self, environment: Environment) -> Request | None:
        if environment.request_id is None:
            return None
        found = await self._store.read(queries.get(environment.request_id))
        return found if isinstance(found, Request) else None

    async def _latest_down(
        self, environment: Environment, launch: Request | None
    ) -> Request | None:
        """The last `down` that was submitted after the launch: by number, as clocks step."""
        if environment.state is not EnvironmentState.STOPPING:
            return None
        query = queries.list_requests(operation="down", environment=environment.name, limit=1)
        downs = await self._store.read(query)
        after = 0 if launch is None else launch.seq
        return downs[0] if downs and downs[0].seq > after else None


def _grace_of(down: Request | None) -> dict[str, float]:
    """What the user gave the sessions, when the `down` could not see to it itself."""
    asked = None if down is None else down.payload.get("grace_seconds")
    return {} if asked is None else {"grace_seconds": asked}


def _state_of(request: Request | None) -> RequestState | None:
    return None if request is None else request.state
