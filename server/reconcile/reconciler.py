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

While a launch is under way it fails at once when a replica of it dies, and stops what it started
(`changes.py`); from then on, replicas are restarted. What a daemon that was killed has started, the
next one stops: run files are written before replicas are started, so none is lost.

Updates. The environment's row names the launch that serves. A launch of a name that runs is another
generation beside it, STARTING in `generations`, and `update_step` says what is due for that:

    its launch waits or runs      WAIT       the environment continues as if there were none
    its launch has succeeded      SWITCH     in one transaction the row names the new launch, whose
                                             generation is SERVING, and the old one is DRAINING
    its launch has not            ROLL_BACK  what it left is stopped; the old one was not touched
    it is DRAINING                DRAIN      when the new replicas accept, the old ones are drained
                                             and stopped, and it is RETIRED

Local replicas of both listen on the same sockets. The new ones are held until the SWITCH: ready,
but accepting nothing, so that no session begins where it may not stay. A shim that says that its
server is held is told to serve as soon as the reconciler is responsible for its launch, so this is
made up for by the next daemon too. Those who wait for the launch hear of its end when the old
replicas begin no session any more (`has_taken_effect`), so that new clients are served by
the new ones; those who wait for a `down`, when its name is free. Whatever step a daemon is killed
at, the row names exactly one generation, and what the others have left is found by their rows and
run files.

Failure cases:

* The daemon exits during an update: before the SWITCH its launch is queued again, or has succeeded,
  and nothing of the old generation was touched; after it, the new one is adopted, let serve, and
  the old one drained.
* The environment fails during its update: the update takes over all the same, which repairs it.
* An environment is taken down during its update: the launch is cancelled; one that succeeds all the
  same is rolled back.
* A new replica accepts nothing within a time: the old ones are drained all the same.
* A replica's server exits: its shim reports how; it is restarted after a pause, until the budget
  of `replica_policy` is spent. Then the shim is stopped too, so that nothing keeps the port.
* What is to be drained cannot be asked: it is as soon as it can. It is not started again, whatever
  it was waiting for.
* A shim exits (SIGKILL, a reboot): its socket ends; the server exited with it. A new shim is
  started from the same run file, on a sibling's listening socket when there is one.
* Another process has taken the port of a replica that is to come back: it waits for the port, which
  does not count as an exit. Other environments do not get it (`engines/local/ports.py`).
* The daemon exits: shims and servers continue. What happened meanwhile is in the shims' first
  message, or in their status files.
* The database cannot be written: what was observed is tried again until it can, and meanwhile
  nothing is started or stopped because of it.
* The database was lost, or an old copy of it put back: what has a run file, and a launch that no
  table knows, is written as an environment, and adopted.
* No table knows a launch, and its environment's name is taken by another: its replicas are strays,
  which are shown and continue until a user stops them (`environments/strays.py`).
* An engine does not answer: its replicas stay as they were; what must stop there, stops later.
* A `down` fails, or its worker is killed: what is left is stopped here.
* A launch ends after its environment was taken down: what it left is stopped.
* A run file is damaged, or another version's: its replica continues unwatched, its environment is
  DEGRADED and says why; a `down` ends it (`environments/run_files.py`).

Everything here runs on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging

from ...environments.engines.local.ports import renew_reservations
from ...environments.strays import look_again
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Generation, Request
from ...requests_db.sql import queries
from ...requests_db.transactions.observing import CANCELLED
from ...schema.errors import EngineFailed
from ...schema.operation_options import DrainOptions
from ...schema.settings import Paths
from ...schema.states import EnvironmentState, GenerationState, RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import without_secrets
from ..events import EventBus
from .autoscaler import Autoscaler
from .changes import Changes, under_way
from .decisions import Step, UpdateStep, next_step, update_step
from .gateway import GatewayManager
from .replica_watch import BEGIN_SESSIONS, ReplicaWatch
from .replicas import ReplicaManager
from .status_writer import StatusWriter, Timing
from .successors import Successors
from .work_queue import BackgroundTasks, WorkQueue

DRAIN_SECONDS = DrainOptions().drain_timeout_seconds  # after a launch that is no longer known

log = logging.getLogger(__name__)

_STATE_OF_STEP = {Step.QUEUED: EnvironmentState.PENDING, Step.STARTING: EnvironmentState.STARTING}


class Reconciler:
    """Keeps the tables of environments and replicas up to date, and replicas running."""

    def __init__(
        self, store: AsyncStore, bus: EventBus, paths: Paths, timing: Timing | None = None
    ) -> None:
        timing = timing or Timing()
        self._store = store
        self._layout = paths
        self._tasks = BackgroundTasks()
        self._status = StatusWriter(store, bus, timing)
        self.replicas = ReplicaManager(store, self._status, self._tasks, paths.runs, timing)
        self.changes = Changes(store, self.replicas)
        self.autoscaler = Autoscaler(self._tasks, self.replicas.watches.occupancy)
        self.successors = Successors(self._tasks, self.replicas.watched)
        self.replicas.on_status = self._note_status
        self.queue = WorkQueue(store, bus, self._tasks, self._status, self.reconcile, timing)
        self.gateway = GatewayManager(store, bus, self._tasks, self.replicas, paths, timing)
        self.replicas.until_reached = self.gateway.until_reached
        self.replicas.until_left = self.gateway.until_left

    def _note_status(self, watch: ReplicaWatch) -> None:
        self.autoscaler.note(watch.replica.environment)
        self.gateway.note(watch.replica.environment)
        self.successors.note(watch)

    async def start(self) -> None:
        """Adopt what an earlier daemon left; then follow the events."""
        await asyncio.to_thread(renew_reservations, self.replicas.runs)
        await self.replicas.adopt_unknown()
        live = {e.name for e in await self._store.read(queries.environments()) if e.state.is_live}
        live.update(g.environment for g in await self._store.read(queries.UNSETTLED_GENERATIONS))
        await asyncio.gather(*(self._reconcile_first(name) for name in live))
        await self.replicas.stop_ownerless(live)
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
        """Have the agents of all engines look, which they have not done while none ran."""
        for engine, why in await asyncio.to_thread(lambda: list(look_again(self._layout))):
            log.warning("cannot look for strays of %s: %s", engine, why)

    async def stop(self) -> None:
        """Stop watching. Replicas continue."""
        await self._tasks.end()

    async def has_taken_effect(self, request: Request) -> bool:
        """Whether what an update, or a `down`, has done is seen by whoever comes now.

        An update: each new session begins with what it has launched, or never will. It serves, and
        what it has replaced begins none any more: so say its replicas' rows. A `down`: another
        environment may have the name.
        """
        environment = await self._store.read(queries.environment(request.environment or ""))
        if environment is None or not environment.state.is_live:
            return True
        if request.operation == "down":
            return environment.state is not EnvironmentState.STOPPING
        others = await self._others(environment)
        if environment.request_id != request.id:
            starting = GenerationState.STARTING
            return not any(g.request_id == request.id and g.state is starting for g in others)
        left = {g.request_id for g in others if g.state is GenerationState.DRAINING}
        rows = await self._store.read(queries.replicas(environment.name))
        return not any(row.request_id in left and row.state in BEGIN_SESSIONS for row in rows)

    async def reconcile(self, name: str) -> None:
        """Do what is due for this environment; one call at a time for each."""
        environment = await self._store.read(queries.environment(name))
        if environment is None:
            return
        environment = await self._settle_updates(environment)
        launch = await self._launch_of(environment.request_id)
        down = await self._latest_down(environment, launch)
        step = next_step(environment.state, _state_of(launch), _state_of(down))
        await self._take(step, environment, launch, down)
        await self._retire_replaced(environment)

    async def _settle_updates(self, environment: Environment) -> Environment:
        """Do what is due for generations that are to serve next; the environment as it is then."""
        name = environment.name
        for generation in reversed(await self._others(environment)):  # the oldest first
            launch = await self._launch_of(generation.request_id)
            is_newer = generation.number > environment.generation
            state, of_launch = environment.state, _state_of(launch)
            match update_step(state, generation.state, of_launch, is_newer=is_newer):
                case UpdateStep.WAIT:
                    await self.replicas.adopt(name, generation.request_id)
                case UpdateStep.SWITCH:
                    await self._switch(generation, launch)
                    now = await self._store.read(queries.environment(name))
                    environment = environment if now is None else now
                case UpdateStep.ROLL_BACK:
                    await self.replicas.stop_launch(name, generation.request_id)
                    error = _why_not_ready(launch)
                    await self._status.end_generation(generation, GenerationState.FAILED, error)
        return environment

    async def _retire_replaced(self, environment: Environment) -> None:
        """Drain the generations that another has replaced: last, when that one is watched."""
        name, serving = environment.name, environment.request_id
        for generation in await self._others(environment):
            step = update_step(environment.state, generation.state, None)
            if step is UpdateStep.DRAIN and not self.replicas.is_retiring(generation):
                seconds = _drain_seconds(await self._launch_of(serving))
                await self.replicas.adopt(name, generation.request_id)
                self.replicas.retire(generation, serving, seconds)

    async def _others(self, environment: Environment) -> list[Generation]:
        """The generations beside the one that serves."""
        found = await self._store.read(queries.generations(environment.name))
        return [each for each in found if each.request_id != environment.request_id]

    async def _switch(self, generation: Generation, launch: Request | None) -> None:
        """Have a generation that is ready take its environment over."""
        assert launch is not None  # it has succeeded
        result = _result_of(launch)
        await self.replicas.adopt(generation.environment, generation.request_id)
        await self.replicas.switch(generation, launch.payload, result["address"])

    async def _take(
        self, step: Step, environment: Environment, launch: Request | None, down: Request | None
    ) -> None:
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
                await self.replicas.stop_all(environment)
                error = None if launch is None else launch.error
                await self._status.set_environment(name, EnvironmentState.FAILED, error=error)
            case Step.CANCEL | Step.RETIRE:
                await self.replicas.stop_all(environment, **_grace_of(down))
                await self._status.set_environment(name, EnvironmentState.STOPPED)
            case Step.SWEEP:
                await self.replicas.stop_launch(name, environment.request_id)
            case Step.RELINQUISH:
                self.replicas.let_go(name)

    async def _serve(self, environment: Environment, launch: Request | None) -> None:
        await self.replicas.adopt(environment.name, environment.request_id)
        result = _result_of(launch)
        await self.replicas.take_over(environment)
        await self.replicas.observe(environment.name, result.get("address", environment.address))
        await self.changes.end_surplus(environment)
        scales = await self._store.read(under_way("scale", environment.name))
        self.autoscaler.serve(environment, is_changing=bool(scales))

    async def _launch_of(self, request_id: str | None) -> Request | None:
        if request_id is None:
            return None
        found = await self._store.read(queries.get(request_id))
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


def _result_of(launch: Request | None) -> Json:
    """What a launch that succeeded says of its environment; nothing of one that is not known."""
    result = None if launch is None else launch.result
    return result.get("environment", {}) if isinstance(result, dict) else {}


def _why_not_ready(launch: Request | None) -> str:
    if launch is None or launch.error is None:
        return CANCELLED
    return str(without_secrets(launch.error.message, launch.payload))


def _drain_seconds(launch: Request | None) -> float:
    """How long sessions of what a launch has replaced may go on."""
    return DRAIN_SECONDS if launch is None else float(launch.payload["drain_timeout_seconds"])


def _state_of(request: Request | None) -> RequestState | None:
    return None if request is None else request.state
