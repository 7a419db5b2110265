# SPDX-License-Identifier: Apache-2.0
"""Environments as they are, against environments as they are wanted.

    hub: a request about an environment changed ──▶ settle(name) ──▶ environments table ──▶ hub
    keepers' sockets ──▶ ReplicaWatch ──▶ observe ──────────────────▶ replicas table ─────▶ hub
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

* A replica's server dies: its keeper says how; it is started again after a pause, until the budget
  of `restart_policy` is spent. Then the keeper is stopped too, so that nothing keeps the port.
* A keeper dies (SIGKILL, a reboot): its socket ends; the server died with it. A new keeper is
  started from the same run file, on a sibling's listening socket when there is one.
* The daemon dies: keepers and servers go on. What happened meanwhile is in the keepers' first
  message, or in their status files.
* The database cannot be written: what was observed is tried again until it can, and meanwhile
  nothing is started or stopped on its account.
* A launch ends after its environment was taken down (it was slow to hear of it): what it left is
  stopped.

Everything here runs on the daemon's loop; what blocks goes through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ..environments import run_files
from ..environments.run_files import RunFile
from ..processes.exit_reason import ExitReason
from ..requests_db.async_store import AsyncStore
from ..requests_db.errors import DatabaseError
from ..requests_db.records import Environment, Event, Json, Replica, Request, RequestError
from ..requests_db.states import EnvironmentState, ErrorKind, ReplicaState, RequestState
from .hub import EventHub, Subscription
from .outcomes import error_of_exit
from .replica_watch import ReplicaWatch, is_over
from .settings import Paths

log = logging.getLogger(__name__)

DECISIVE = frozenset({"launch", "down"})  # what `next_step` looks at; a `probe` changes nothing
T = TypeVar("T")

RETRY_SECONDS = 1.0
SETTLED_SECONDS = 0.2  # most that a look at environments waits for what is just being written
_GIVEN_UP_HINT = "mend what its log shows, then launch it again"


class Step(Enum):
    """What is due for an environment."""

    NOTHING = "nothing"
    QUEUED = "queued"  # its launch waits (again)
    STARTING = "starting"  # its launch runs
    SERVE = "serve"  # its launch succeeded: adopt its replicas, observe them
    ABANDON = "abandon"  # its launch failed: stop what it left, say why
    CALL_OFF = "call off"  # its launch was cancelled: stop what it left
    SWEEP = "sweep"  # its launch ended later than it did: stop what that left
    LET_GO = "let go"  # it is being taken down: start nothing again
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
    RequestState.PENDING: Step.LET_GO,
    RequestState.RUNNING: Step.LET_GO,
    RequestState.SUCCEEDED: Step.RETIRE,
    RequestState.FAILED: Step.STUCK,
    RequestState.CANCELLED: Step.STUCK,  # only by a lost daemon's hand: the API refuses it
}


def next_step(
    state: EnvironmentState, launch: RequestState | None, down: RequestState | None
) -> Step:
    """What is due, from where the environment, its launch and its latest `down` stand."""
    if state is EnvironmentState.STOPPED and launch is not None and launch.is_final:
        return Step.SWEEP
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
        # Set for the environments whose replicas are ours to restart.
        self._serving: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # What is to be settled (again); whether its launch has started a replica.
        self._due: dict[str, bool] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}  # the task that does
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
        return {name: watch.status for name, watch in self._watches.items()}

    async def start(self) -> None:
        """Adopt what an earlier daemon left; then follow the events."""
        live = {e.name for e in await self._store.environments() if e.state.is_live}
        await asyncio.gather(*(self.settle(name) for name in live))
        await self._stop_strays(live)
        self._spawn(self._follow(), "reconciler")

    async def stop(self) -> None:
        """Stop watching. Replicas go on."""
        for task in [*self._tasks, *(watch.task for watch in self._watches.values())]:
            task.cancel()
        tasks = [*self._tasks, *(watch.task for watch in self._watches.values())]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settled(self, name: str | None = None) -> None:
        """Wait until what has been heard of an environment, or of all, is in the tables.

        Whoever has been told that a launch succeeded must not find it STARTING. Not for long:
        stopping takes its time, and is told as it stands.
        """
        tasks = [task for known, task in self._settling.items() if name in (None, known)]
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLED_SECONDS)

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
            await self._adopt(environment)

    # Following events.

    async def _follow(self) -> None:
        with self._hub.subscribe() as subscription:
            while True:
                for event in await subscription.next():
                    self._on_event(event)
                if subscription.lagged:
                    await self._make_up(subscription)

    def _on_event(self, event: Event) -> None:
        if event.environment is None:
            return
        if event.kind == "request.state":
            if event.request is None or event.request.operation in DECISIVE:
                self._settle_soon(event.environment)
        elif event.kind == "request.progress" and "replica" in event.data:
            self._settle_soon(event.environment, adopt=True)

    async def _make_up(self, subscription: Subscription) -> None:
        """Events were dropped: what they told is in the tables."""
        subscription.lagged = False  # before the tables are read
        names = await self._insist(self._store.names)
        for name in names:
            self._settle_soon(name, adopt=True)

    def _settle_soon(self, name: str, *, adopt: bool = False) -> None:
        self._due[name] = adopt or self._due.get(name, False)
        if name not in self._settling:
            self._settling[name] = self._spawn(self._settle_while_due(name), f"settle {name}")

    async def _settle_while_due(self, name: str) -> None:
        try:
            while name in self._due:
                await self._try_to_settle(name, adopt=self._due.pop(name))
        finally:
            del self._settling[name]

    async def _try_to_settle(self, name: str, *, adopt: bool) -> None:
        try:
            await self.settle(name, adopt=adopt)
        except DatabaseError as exc:
            log.warning("cannot settle %s, trying again: %s", name, exc)
            self._due[name] = adopt or self._due.get(name, False)
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:
            log.exception("cannot settle %s", name)

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
        await self._forget_predecessor(environment)
        await self._set(environment.name, EnvironmentState.PENDING)

    async def _starting(self, environment: Environment, _launch: Request | None) -> None:
        await self._forget_predecessor(environment)
        await self._set(environment.name, EnvironmentState.STARTING)

    async def _serve(self, environment: Environment, launch: Request | None) -> None:
        await self._adopt(environment)
        told: Json = {}
        if launch is not None and isinstance(launch.result, dict):
            told = launch.result.get("environment", {})
        if environment.state in (EnvironmentState.PENDING, EnvironmentState.STARTING):
            await self._believe(told.get("replicas", []))
        self._ours(environment.name).set()
        await self._observe(environment.name, told.get("address", environment.address))

    async def _believe(self, replicas: list[Json]) -> None:
        """What a launch has just seen ready is ready, although its keeper was not heard here yet.

        Otherwise whoever was told of the launch's success might find it DEGRADED for a moment.
        """
        for replica in replicas:
            watch = self._watches.get(replica.get("id", ""))
            if watch is not None:
                await watch.believe_ready(replica.get("pid"))

    async def _abandon(self, environment: Environment, launch: Request | None) -> None:
        await self._stop_all(environment.name)
        error = launch.error if launch is not None else None
        await self._set(environment.name, EnvironmentState.FAILED, error=error)

    async def _call_off(self, environment: Environment, _launch: Request | None) -> None:
        await self._stop_all(environment.name)
        await self._set(environment.name, EnvironmentState.STOPPED)

    async def _sweep(self, environment: Environment, _launch: Request | None) -> None:
        left = await self._run_files(environment)
        if left:
            log.warning("stopping what the launch of %s left", environment.name)
            await asyncio.to_thread(run_files.stop_replicas, [r.run_dir for r in left])

    async def _let_go_of(self, environment: Environment, _down: Request | None) -> None:
        self._ours(environment.name).clear()

    async def _retire(self, environment: Environment, _down: Request | None) -> None:
        await self._stop_all(environment.name)
        await self._set(environment.name, EnvironmentState.STOPPED)

    async def _stuck(self, environment: Environment, down: Request | None) -> None:
        error = down.error if down is not None else None
        await self._set(environment.name, EnvironmentState.FAILED, error=error)

    # Replicas.

    async def _adopt(self, environment: Environment) -> None:
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
            watch.task = asyncio.create_task(watch.run(), name=f"watch {replica.id}")
            await self.record(replica)

    def serves(self, name: str) -> bool:
        """Whether this environment's replicas are the reconciler's to restart."""
        return name in self._serving and self._serving[name].is_set()

    async def until_serves(self, name: str) -> None:
        """Wait until this environment's replicas are the reconciler's to restart."""
        await self._ours(name).wait()

    async def record(self, replica: Replica) -> None:
        """Write how a replica is, and what that makes of its environment."""
        await self._insist(lambda: self._record(replica))

    async def _record(self, replica: Replica) -> None:
        event = await self._store.upsert_replica(replica, now=time.time())
        self._hub.publish([event] if event is not None else [])
        if self.serves(replica.environment):
            await self._observe(replica.environment)

    async def gave_up(
        self, replica: Replica, reason: ExitReason, why: str, tail: tuple[str, ...]
    ) -> None:
        """A replica's restart budget is spent: free what it holds, and say why."""
        error = error_of_exit(f"replica {replica.id} (pid {reason.pid})", reason, tail)
        error = replace(error, message=f"{error.message}; {why}", hint=_GIVEN_UP_HINT)
        await self.record(replica)
        await self._insist(lambda: self._blame(replica.environment, error))
        # Last: it cancels the watch that calls this.
        self._spawn(self._stop_one(replica), f"stop {replica.id}")

    async def _blame(self, name: str, error: RequestError) -> None:
        environment = await self._store.environment(name)
        if environment is not None and environment.state is EnvironmentState.FAILED:
            await self._set(name, EnvironmentState.FAILED, error=error)

    async def _observe(self, name: str, address: str | None = None) -> None:
        environment = await self._store.environment(name)
        if environment is None or environment.state is EnvironmentState.STOPPING:
            return  # that its replicas go is what was asked for
        replicas = [replica.state for replica in await self._store.replicas(name)]
        state = observed_state(replicas)
        # One that failed says why itself (`gave_up`).
        unexplained = state is EnvironmentState.FAILED and ReplicaState.FAILED not in replicas
        error = _lost_replicas(name) if unexplained else None
        await self._set(name, state, address=address, error=error)

    async def _stop_all(self, name: str) -> None:
        await self._unwatch(w for w in self._watches.values() if w.replica.environment == name)
        self._serving.pop(name, None)  # nobody waits for it any more
        await asyncio.to_thread(run_files.stop_environment, self._paths.runs, name)
        await self._store.delete_replicas(name)

    async def _stop_one(self, replica: Replica) -> None:
        watch = self._watches.pop(replica.id, None)
        if watch is not None:
            watch.task.cancel()
        await asyncio.to_thread(run_files.stop_replica, Path(replica.run_dir))

    async def _stop_strays(self, live: set[str]) -> None:
        """Stop replicas that belong to no environment: a launch and a daemon died together."""
        found = await asyncio.to_thread(run_files.all_of, self._paths.runs)
        strays = [run_file for run_file in found if run_file.environment not in live]
        for run_file in strays:
            log.warning("stopping %s, which belongs to nothing", run_file.replica_id)
        if strays:
            await asyncio.to_thread(run_files.stop_replicas, [r.run_dir for r in strays])

    async def _forget_predecessor(self, environment: Environment) -> None:
        """A launch is responsible now, and for an earlier environment of its name nobody is."""
        self._ours(environment.name).clear()
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
        runs = self._paths.runs
        found = await asyncio.to_thread(run_files.of_environment, runs, environment.name)
        return [run_file for run_file in found if run_file.request_id == environment.request_id]

    def _ours(self, name: str) -> asyncio.Event:
        return self._serving.setdefault(name, asyncio.Event())

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

    async def _insist(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns, as soon as the database lets it."""
        while True:
            try:
                return await work()
            except DatabaseError as exc:
                log.warning("what was observed cannot be written, trying again: %s", exc)
                await asyncio.sleep(RETRY_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)
        return task

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("%s has ended: %s", task.get_name(), exc, exc_info=exc)


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
