# SPDX-License-Identifier: Apache-2.0
"""`ReplicaManager`: finds replicas by their run files, watches, restarts and stops them.

    run files ──adopt──▶ ReplicaWatch (one task each, `replica_watch.py`)
                             ├─ changed ──▶ its row ──▶ observe ──▶ its environment's state
                             └─ given up ─▶ its row, the environment's error ──▶ it is stopped

A replica is restarted only once the request that started it has ended (`ReplicaWatch.is_kept`).
`reconciler.py`, or the change that has added the replica, says when that is.

Everything here runs on the daemon's loop; what blocks goes through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...environments import run_files
from ...environments.run_files import LOCAL, RunFile, SetAside
from ...environments.shim.client import Fork
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Generation, Replica, RequestError, launch_of
from ...requests_db.sql import queries
from ...requests_db.transactions import observing
from ...schema.errors import EngineFailed
from ...schema.replica import StatusLine
from ...schema.spec import GRACE_SECONDS
from ...schema.states import SERVING, EnvironmentState, ErrorKind, ReplicaState
from ...system.text.json_lines import Json
from .decisions import observed_state
from .replica_watch import ReplicaWatch, is_over, new_replica
from .status_writer import StatusWriter
from .watches import Moves, Watches
from .work_queue import BackgroundTasks

STOP_AGAIN_SECONDS = 10.0  # after an engine did not answer
_THREADS = ThreadPoolExecutor(32, "stop")  # each may wait for sessions, for minutes

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Observer:
    """Writes the state of an environment whose launch succeeded, by the states of its replicas."""

    store: AsyncStore
    status: StatusWriter
    watches: Watches
    changing: Mapping[str, Moves]  # by environment: those that a request changes
    set_aside: dict[str, SetAside] = field(init=False, default_factory=dict)  # by replica
    # The gateway, while its run file cannot be used.
    gateway_aside: SetAside | None = field(init=False, default=None)
    _lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _calls: Counter[str] = field(init=False, default_factory=Counter)  # by environment
    _observed: Counter[str] = field(init=False, default_factory=Counter)  # how many are answered

    async def fail(self, name: str, error: RequestError) -> None:
        """Write why a replica is not started again, if that has failed its environment."""
        environment = await self.store.read(queries.environment(name))
        if environment is not None and environment.state is EnvironmentState.FAILED:
            await self.status.set_environment(name, EnvironmentState.FAILED, error=error)

    async def set_gateway_aside(self, found: SetAside | None, names: Iterable[str]) -> None:
        """Record whether the gateway's run file is unusable; these environments show it."""
        self.gateway_aside = found
        if found is not None:
            log.warning("the gateway: %s", found.sentence)
        for name in names:
            await self.observe(name)

    async def observe(self, name: str, address: str | None = None) -> None:
        """Write the state of an environment whose launch succeeded.

        Calls take turns, so that none writes what it read before another one has written. One that
        begins after others were made counts for them, too: many replicas may change at once.
        """
        self._calls[name] += 1
        own = self._calls[name]
        async with self._lock:
            if address is None and self._observed[name] >= own:
                return
            latest = self._calls[name]
            await self._observe(name, address)
            self._observed[name] = latest

    async def _observe(self, name: str, address: str | None) -> None:
        environment = await self.store.read(queries.environment(name))
        if environment is None or environment.state is EnvironmentState.STOPPING:
            return  # its replicas were requested to stop
        found = await self.store.read(queries.replica_states(name))
        launch = environment.request_id
        kept = {w.replica.id: w.is_kept.is_set() for w in self.watches.of(name)}
        # Replicas of an update are among them once they serve.
        own = {id_: s for id_, s in found.items() if kept.get(id_, launch_of(id_) == launch)}
        replicas = list(own.values())
        aside = [self.set_aside[id_] for id_ in own if id_ in self.set_aside]
        if environment.spec.get("gateway") and self.gateway_aside is not None:
            aside.append(self.gateway_aside)
        is_in_doubt = bool(aside) or (name in self.changing and not replicas)
        state = observed_state(replicas, is_in_doubt=is_in_doubt)
        # A replica that FAILED has said why itself (`_give_up`).
        error = None
        if aside:
            who = "the gateway" if aside[0].is_gateway else f"replica {aside[0].replica_id}"
            message = f"{who}: {aside[0].sentence}"
            error = RequestError(ErrorKind.WORKER_LOST, message, aside[0].hint)
        elif state is EnvironmentState.FAILED and ReplicaState.FAILED not in replicas:
            hint = f"launch it again: openenv launch {name}"
            text = f"{name} has no replicas left"
            error = RequestError(ErrorKind.WORKER_LOST, text, hint)
        address = self._moved_to(environment) or address
        if observing.in_state(environment, state, address, error) != environment:
            await self.status.set_environment(name, state, address=address, error=error)

    def _moved_to(self, environment: Environment) -> str | None:
        """The address of a replica that serves: on some engines each start changes it."""
        if environment.spec.get("provider") == LOCAL:
            return None
        own = self.watches.of(environment.name, environment.request_id)
        serving = (watch for watch in own if watch.replica.state is ReplicaState.READY)
        return next((w.run_file.address for w in serving if not w.run_file.is_local), None)

    async def switch(self, generation: Generation, spec: Json, address: str) -> bool:
        """Write that a generation serves; `observe` writes nothing that it read before.

        False: the environment was taken down meanwhile.
        """
        async with self._lock:
            return await self.status.switch_generation(generation, spec, address)


@dataclass(eq=False)
class ReplicaManager:
    """Owns the watches of all replicas, and which of them the reconciler restarts."""

    store: AsyncStore
    status: StatusWriter
    tasks: BackgroundTasks
    runs: Path  # the folder of run files
    on_status: Callable[[ReplicaWatch], None]  # called after each status
    fork: Fork | None = None  # forks shims
    _adopting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    # Run files by environment, which were just read for all environments.
    _read: dict[str, list[RunFile]] = field(init=False, default_factory=dict)
    _moves: dict[str, Moves] = field(init=False, default_factory=dict)  # by environment
    watches: Watches = field(init=False, default_factory=Watches)
    observer: Observer = field(init=False)

    def __post_init__(self) -> None:
        self.observer = Observer(self.store, self.status, self.watches, self._moves)

    @property
    def live(self) -> dict[str, StatusLine]:
        """The last status of each watched replica, by its id; why others are not watched."""
        unwatched: dict[str, StatusLine] = {
            aside.replica_id: {"unwatched": True, "problem": aside.sentence}
            for aside in self.observer.set_aside.values()
        }
        return unwatched | {watch.replica.id: watch.status for watch in self.watches.values()}

    async def adopt(self, name: str, request_id: str | None) -> None:
        """Watch every replica of this launch of an environment that has a run file."""
        async with self._adopting:
            there = await self._look(name)
            found = [run_file for run_file in there if run_file.request_id == request_id]
            ids = {run_file.replica_id for run_file in found}
            gone = [w for w in self.watches.of(name, request_id) if w.replica.id not in ids]
            await self._unwatch(w for w in gone if w.replica.state is ReplicaState.STOPPED)
            if unknown := self.watches.without(found):
                rows = await self.store.read(queries.replicas(name))
                await self._watch(unknown, {replica.id: replica for replica in rows})

    async def adopt_started(self, started: list[RunFile]) -> None:
        """Watch replicas that have just been started; no other is looked at."""
        async with self._adopting:
            await self._watch(self.watches.without(started), {})

    async def _watch(self, found: list[RunFile], known: dict[str, Replica]) -> None:
        """Watch replicas, whose rows are `known` if they have been watched before."""
        for run_file in found:
            row = replica = known.get(run_file.replica_id)
            watch = self.watches.get(run_file.replica_id)
            if watch is not None:  # of an earlier attempt of the same launch, as is its row
                await self._unwatch([watch])
                replica = None
            if replica is None or is_over(replica.state):  # or the row of an earlier attempt
                replica = new_replica(run_file)
            again = partial(run_files.revive, fork=self.fork)
            watch = ReplicaWatch(replica, run_file, self._record, self._give_up, again)
            watch.on_status = partial(self._note_status, watch)
            self.watches.add(watch)
            watch.task = self.tasks.spawn(watch.run(), f"watch {replica.id}")
            if replica is row:
                self._note(watch)
            else:
                await self._record(replica)

    def staying(self, name: str, request_id: str | None) -> list[ReplicaWatch]:
        """The replicas of a launch that are not taken away, the oldest first."""
        own = [watch for watch in self.watches.of(name, request_id) if not is_leaving(watch)]
        return sorted(own, key=lambda watch: (watch.run_file.created_at, watch.replica.ordinal))

    @contextmanager
    def moves(self, name: str) -> Iterator[Moves]:
        """The replicas of an environment that change within the block."""
        self._moves[name] = moves = Moves()
        try:
            yield moves
        finally:
            del self._moves[name]

    def is_changing(self, name: str) -> bool:
        """Return whether a request changes an environment at this moment."""
        return name in self._moves

    async def drop(self, watches: list[ReplicaWatch]) -> None:
        """Stop replicas that a request has started and not kept."""
        async with self._adopting:
            await self._unwatch(watches)
            await self.stop([watch.run_file.run_dir for watch in watches])
        for watch in watches:
            await watch.note_drained()

    def _note_status(self, watch: ReplicaWatch) -> None:
        self._note(watch)
        self.on_status(watch)

    def _note(self, watch: ReplicaWatch) -> None:
        self.watches.note(watch)
        if (moves := self._moves.get(watch.replica.environment)) is not None:
            moves.add(watch)

    @asynccontextmanager
    async def reading_once(self) -> AsyncIterator[list[RunFile]]:
        """Read all run files; within the block `adopt` does not read an environment's again.

        Those that cannot be used are set aside.
        """
        found, aside = await asyncio.to_thread(run_files.look, self.runs)
        self._note_set_aside(None, aside)
        for run_file in found:
            self._read.setdefault(run_file.environment, []).append(run_file)
        try:
            yield found
        finally:
            self._read.clear()

    async def _look(self, name: str) -> list[RunFile]:
        """The run files of an environment; those of watched servers are not read again."""
        if name in self._read:
            return self._read.pop(name)
        known = {w.replica.id: w.run_file for w in self.watches.of(name) if w.is_followed}
        found, aside = await asyncio.to_thread(run_files.look, self.runs, name, known)
        self._note_set_aside(name, aside)
        return found

    def _note_set_aside(self, name: str | None, found: Iterable[SetAside]) -> None:
        """Record which run files cannot be used, and log each once."""
        before = {i: a for i, a in self.observer.set_aside.items() if name in (None, a.environment)}
        now = {each.replica_id: each for each in found if each.replica_id not in self.watches}
        for aside in now.values():
            if aside != before.get(aside.replica_id):
                extra = {"replica": aside.replica_id, "environment": aside.environment}
                text = "replica %s continues, but is neither watched nor restarted: %s"
                log.warning(text, aside.replica_id, aside.problem, extra=extra)
        others = {i: a for i, a in self.observer.set_aside.items() if i not in before}
        self.observer.set_aside = others | now

    async def forget_predecessor(self, environment: Environment) -> None:
        """Stop watching an earlier environment of its name."""
        watched, launch = self.watches.of(environment.name), environment.request_id
        await self._unwatch(watch for watch in watched if watch.request_id != launch)

    def let_go(self, name: str) -> None:
        """Restart no replica of this environment any more."""
        for watch in self.watches.of(name):
            watch.is_kept.clear()

    async def _unwatch(self, chosen: Iterable[ReplicaWatch]) -> None:
        watches = list(chosen)
        for watch in watches:
            self.watches.remove(watch.replica.id)
            watch.task.cancel()
        await asyncio.gather(*(watch.task for watch in watches), return_exceptions=True)

    async def _record(self, replica: Replica) -> None:
        """Write the state of a replica, and the state of its environment that follows."""
        if (watch := self.watches.get(replica.id)) is not None:
            self._note(watch)

        async def write() -> None:
            await self.status.set_replica(replica)
            if watch is not None and watch.is_kept.is_set():
                await self.observer.observe(replica.environment)

        await self.status.insist(f"write the state of {replica.id}", write)
        if replica.state is ReplicaState.STOPPED and watch is not None and watch.was_drained:
            self.tasks.spawn(self.stop([Path(replica.run_dir)]), f"remove {replica.id}")

    async def _give_up(self, replica: Replica, error: RequestError) -> None:
        """Write why a replica is not started again, and free what it holds."""
        await self._record(replica)
        fail = partial(self.observer.fail, replica.environment, error)
        await self.status.insist(f"write why {replica.id} is not restarted", fail)
        # Last: it cancels the watch that calls this.
        self.tasks.spawn(self._stop_one(replica), f"stop {replica.id}")

    async def stop_all(
        self,
        name: str,
        grace_seconds: float = GRACE_SECONDS,
        on_sessions: Callable[[str, int], None] | None = None,
        *,
        launch: str | None = None,
    ) -> list[str]:
        """Stop an environment, or one launch of it; others of its name then continue.

        Return the ids of its replicas once nothing of it is left. `on_sessions` is called by
        another thread: with a replica's id, and its sessions.
        """
        self._read.pop(name, None)
        await self._unwatch(self.watches.of(name, launch))
        stop = partial(run_files.stop_environment, request_id=launch, on_sessions=on_sessions)
        loop = asyncio.get_running_loop()
        stopped = await loop.run_in_executor(_THREADS, stop, self.runs, name, grace_seconds)
        if launch is None:
            await self.store.write(observing.delete_replicas, name)
        return stopped

    async def _stop_one(self, replica: Replica) -> None:
        watch = self.watches.remove(replica.id)
        if watch is not None:
            watch.task.cancel()
        await self.stop([Path(replica.run_dir)])

    async def take_over(self, environment: Environment) -> None:
        """Restart the replicas of its launch from now on; those that are held may accept.

        Replicas that a request under way has started, and may still drop, are left out.
        """
        own = self.watches.of(environment.name, environment.request_id)
        left = [watch for watch in own if not watch.is_kept.is_set()]
        starters = {watch.run_file.data.get("started_by") for watch in left}
        found = [await self.store.read(queries.request(each)) for each in filter(None, starters)]
        under_way = {r.id for r in found if r is not None and not r.state.is_final}
        for watch in left:
            if watch.run_file.data.get("started_by") not in under_way:
                await watch.keep()

    async def stop(self, run_dirs: list[Path], after_seconds: float = 0.0) -> None:
        """Stop replicas; if their engine does not answer, try again later."""
        await asyncio.sleep(after_seconds)
        try:
            await asyncio.to_thread(run_files.stop_replicas, run_dirs)
        except EngineFailed as exc:
            log.warning("%s", exc.message)
            again = self.stop(run_dirs, STOP_AGAIN_SECONDS)
            self.tasks.spawn(again, "stop replicas of an engine")


@dataclass(eq=False)
class Leftovers:
    """Finds what an earlier daemon has left, when the next one starts."""

    store: AsyncStore
    status: StatusWriter
    replicas: ReplicaManager
    # Replicas that no table knows.
    strays: list[RunFile | SetAside] = field(init=False, default_factory=list)

    async def adopt_unknown(self, found: list[RunFile]) -> None:
        """Write an environment for each launch that has run files and is in no table.

        The tables may have been lost: what was launched continues all the same.
        """
        launches = {(run_file.environment, run_file.request_id): run_file for run_file in found}
        counts = Counter((run_file.environment, run_file.request_id) for run_file in found)
        live = await self._live()
        # During an update, the generation that serves comes first; after it, the newer one.
        for key, run_file in sorted(
            launches.items(), key=lambda each: (each[1].is_held, -each[1].created_at)
        ):
            row = live.get(run_file.environment)
            is_free = row is None or (  # or nothing exists of its launch: the database is old
                row.state in SERVING and (row.name, row.request_id) not in launches
            )
            if is_free and not await self._is_known(run_file, row):
                adopted = _adopted(run_file, counts[key])
                await self.status.adopt(adopted)
                live[adopted.name] = adopted

    async def _live(self) -> dict[str, Environment]:
        found = await self.store.read(queries.NOT_STOPPED)
        return {each.name: each for each in found if each.state.is_live}

    async def _is_known(self, run_file: RunFile, row: Environment | None) -> bool:
        """Return whether a table has its launch, which then says whether it is wanted."""
        row = row or await self.store.read(queries.environment(run_file.environment))
        if row is not None and row.request_id == run_file.request_id:
            return True
        return await self.store.read(queries.request(run_file.request_id)) is not None

    async def stop_ownerless(self, found: list[RunFile], live: set[str]) -> None:
        """Stop replicas that a launch left when it and the daemon died; keep what no table knows.

        The tables know that launch, and that it is not wanted. A launch that they do not know is
        adopted or, if another environment has its name, becomes a stray (`self.strays`).
        """
        known = await self.store.read(queries.REPLICAS_OF_EACH)
        rows = {row.id for replicas in known.values() for row in replicas}
        aside = self.replicas.observer.set_aside.values()
        self.strays += [a for a in aside if a.environment not in live or a.replica_id not in rows]
        left, live_rows = [], await self._live()
        for run_file in found:
            row = live_rows.get(run_file.environment)
            extra = {"replica": run_file.replica_id, "environment": run_file.environment}
            is_there = run_file.run_dir.exists()  # reconciling may have stopped it
            if is_there and not await self._is_known(run_file, row):
                log.warning("%s is a stray: no table knows it", run_file.replica_id, extra=extra)
                self.strays.append(run_file)
            elif run_file.environment not in live:
                log.warning("stopping replica %s, left over", run_file.replica_id, extra=extra)
                left.append(run_file.run_dir)
        await self.replicas.stop(left)


def is_leaving(watch: ReplicaWatch) -> bool:
    """Return whether it is being taken away, or has ended."""
    is_drained = watch.is_draining or watch.was_drained or watch.status.get("is_draining")
    return bool(is_drained) or is_over(watch.replica.state)


def _adopted(run_file: RunFile, replicas: int) -> Environment:
    """Make the row of an environment from one of its run files, whose number is `replicas`."""
    base = {"provider": run_file.provider, "host": run_file.host}
    return Environment(
        run_file.environment,
        {**base, **run_file.data.get("spec", {}), "replicas": replicas},
        EnvironmentState.STARTING,
        run_file.created_at,
        time.time(),
        run_file.request_id,
        run_file.address,
    )
