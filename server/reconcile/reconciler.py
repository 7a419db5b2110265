# SPDX-License-Identifier: Apache-2.0
"""`Reconciler`: brings environments from what is observed to what is wanted.

    bus: a request about an environment changed ──▶ queue ──▶ reconcile(name) ──▶ environments table
    shims' sockets ──▶ ReplicaWatch ──▶ observe ──────────────▶ replicas table ──▶ bus
                             └─ exited ──▶ restart_decision ──▶ restart after a pause | give up

`reconcile` is level-triggered: it reads the environment's row, its launch and its latest `down`,
and one pure function (`next_step`) says what is due. It may run at any time and any number of
times, so a daemon that starts reconciles every environment once, and is where its predecessor was;
when events were dropped, everything is reconciled.

While a launch is under way it fails at once when a replica of it dies, and stops what it started
(`changes.py`); from then on, replicas are restarted. Replicas that a killed daemon has started are
stopped by the next one: run files are written before replicas are started, so none is lost.

Updates. A launch of a name that runs is another generation, STARTING in `generations` until it
serves (`changes.py`). The earlier one is then DRAINING, and RETIRED once nothing of it runs.
One whose request has failed ends in the same way, as FAILED. Local replicas of both listen on the
same sockets; new ones are held until they are kept.

Failure cases:

* The environment fails during its update: the update takes over all the same, which repairs it.
* An environment is taken down during its update: the launch is cancelled.
* A replica's server exits: its shim reports how; it is restarted after a pause, until the budget
  of `replica_policy` is spent. Then the shim is stopped too, so that nothing keeps the port.
* A replica that has to drain cannot be asked: it is asked as soon as it can be. It is not started
  again, whatever it was waiting for.
* A shim exits (SIGKILL, a reboot): its socket ends; the server exited with it. A new shim is
  started from the same run file, on a peer replica's listening socket if there is one.
* Another process has taken the port of a replica that has exited: it waits for the port, which
  does not count as an exit. Other environments do not get it (`engines/local/ports.py`).
* The daemon exits: shims and servers continue. What happened meanwhile is in the shims' first
  message, or in their status files.
* The database cannot be written: the write is repeated until it succeeds, and nothing is started or
  stopped because of it before.
* The database was lost, or an old copy was restored: replicas with a run file whose launch no table
  knows are written as an environment, and adopted.
* No table knows a launch, and its environment's name is taken by another: its replicas are strays,
  which are shown and continue until a user stops them (`environments/strays.py`).
* An engine does not answer: its replicas stay as they were; what must stop there, stops later.
* A `down` fails, its daemon is killed, or a launch ends after it: what is left is stopped here.
* A run file is damaged, or another version's: its replica continues unwatched, its environment is
  DEGRADED and says why; a `down` ends it (`environments/run_files.py`).

Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging

from ...environments.engines.local.ports import renew_reservations
from ...environments.shim.client import Fork
from ...environments.strays import look_again
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Request
from ...requests_db.sql import queries
from ...schema.errors import EngineFailed
from ...schema.settings import Paths
from ...schema.states import EnvironmentState, RequestState
from ..events import EventBus
from .changes import Changes, under_way
from .decisions import Step, next_step
from .gateway import GatewayManager
from .own_requests import Autoscaler, Submit, Successors, scaling_of
from .replica_watch import ReplicaWatch
from .replicas import Leftovers, ReplicaManager
from .status_writer import StatusWriter
from .work_queue import BackgroundTasks, WorkQueue

log = logging.getLogger(__name__)

_STATE_OF_STEP = {Step.QUEUED: EnvironmentState.PENDING, Step.STARTING: EnvironmentState.STARTING}


class Reconciler:
    """Keeps the tables of environments and replicas up to date, and replicas running."""

    def __init__(
        self,
        store: AsyncStore,
        bus: EventBus,
        paths: Paths,
        *,
        submit: Submit,
        fork: Fork | None = None,
    ) -> None:
        """`submit` submits the daemon's own requests.

        `fork` forks shims; without it they are programs.
        """
        self._store = store
        self._layout = paths
        self._tasks = BackgroundTasks()
        self._status = StatusWriter(store, bus)
        self.replicas = ReplicaManager(
            store, self._status, self._tasks, paths.runs, self._note_status, fork
        )
        self.leftovers = Leftovers(store, self._status, self.replicas)
        self.autoscaler = Autoscaler(self._tasks, self.replicas.watches.occupancy, submit)
        self.successors = Successors(self._tasks, self.replicas.watches.of, submit)
        self.queue = WorkQueue(store, bus, self._tasks, self._status, self.reconcile)
        self.gateway = GatewayManager(store, bus, self._tasks, self.replicas, paths)
        self.changes = Changes(store, self.replicas, self.gateway, submit)

    def _note_status(self, watch: ReplicaWatch) -> None:
        self.autoscaler.note(watch.replica.environment)
        self.gateway.note(watch.replica.environment)
        self.successors.note(watch)

    async def start(self) -> None:
        """Adopt what an earlier daemon left; then follow the events."""
        read = self._store.read
        async with self.replicas.reading_once() as found:
            await asyncio.to_thread(renew_reservations, self.replicas.runs, found)
            await self.leftovers.adopt_unknown(found)
            live = {e.name for e in await read(queries.NOT_STOPPED) if e.state.is_live}
            live.update(g.environment for g in await read(queries.UNSETTLED_GENERATIONS))
            await asyncio.gather(*(self._reconcile_first(name) for name in live))
            await self.leftovers.stop_ownerless(found, live)
        self._tasks.spawn(self._look_for_strays(), "look for strays")
        self._tasks.spawn(self.queue.follow(), "reconciler")
        self._tasks.spawn(self.gateway.follow(), "gateway")

    async def _reconcile_first(self, name: str) -> None:
        try:
            await self.reconcile(name)
        except EngineFailed as exc:  # what it has is stopped when it answers
            log.warning("cannot reconcile %s yet: %s", name, exc, extra={"environment": name})
            self.queue.add(name)

    async def _look_for_strays(self) -> None:
        """Make the agents of all engines list strays, which none did while no daemon ran."""
        for engine, why in await asyncio.to_thread(lambda: list(look_again(self._layout))):
            log.warning("cannot look for strays of %s: %s", engine, why)

    async def stop(self) -> None:
        """Stop watching. Replicas continue."""
        await self._tasks.end()

    async def reconcile(self, name: str) -> None:
        """Do what is due for this environment; one call at a time for each."""
        environment = await self._store.read(queries.environment(name))
        if environment is None:
            return
        launch = await self._store.read(queries.request(environment.request_id or ""))
        down = await self._latest_down(environment, launch)
        step = next_step(environment.state, _state_of(launch), _state_of(down))
        await self._take(step, environment, launch)
        await self.changes.end_other_generations(environment)

    async def _take(self, step: Step, environment: Environment, launch: Request | None) -> None:
        name = environment.name
        if step is not Step.SERVE:
            self.autoscaler.forget(name)
        match step:
            case Step.QUEUED | Step.STARTING:
                await self.replicas.forget_predecessor(environment)
                await self._status.set_environment(name, _STATE_OF_STEP[step])
            case Step.SERVE:
                await self._serve(environment, launch)
            case Step.ABANDON:
                await self.replicas.stop_all(name)
                error = None if launch is None else launch.error
                await self._status.set_environment(name, EnvironmentState.FAILED, error=error)
            case Step.CANCEL | Step.RETIRE:
                await self.replicas.stop_all(name)
                await self._status.set_environment(name, EnvironmentState.STOPPED)
            case Step.SWEEP:
                await self.replicas.stop_all(name, launch=environment.request_id)
            case Step.RELINQUISH:
                self.replicas.let_go(name)

    async def _serve(self, environment: Environment, launch: Request | None) -> None:
        await self.replicas.adopt(environment.name, environment.request_id)
        await self.replicas.take_over(environment)
        launched = launch is not None and isinstance(launch.result, dict) and launch.result
        result = launched.get("environment", {}) if launched else {}
        address = result.get("address", environment.address)
        await self.replicas.observer.observe(environment.name, address)
        await self.changes.end_surplus(environment)
        is_changing = scaling_of(environment.spec) is not None and bool(
            await self._store.read(under_way("scale", environment.name))
        )
        self.autoscaler.serve(environment, is_changing=is_changing)

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


def _state_of(request: Request | None) -> RequestState | None:
    return None if request is None else request.state
